// Rows looked up, and the gradient: rows added per index, in the order of positions, so that bits repeat.
//
// Backward sorts positions by index: count, scan, drop positions into their index's bucket in any order, then give each
// its rank there. Every step has one possible result.

extern "C" __global__ void embedding(u64 width, u64 limit, const REAL* table, const INDEX* ids, REAL* out, u64 op, Fault* fault) {
    u64 position = blockIdx.x;
    const REAL* row = table + checked(i64(ids[position]), position, limit, op, fault) * width;
    REAL* target = out + position * width;
    u64 packs = width % 8 == 0 && aligned16(table, out) ? width / 8 : 0;
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) store8(target + p * 8, load8(row + p * 8));
    for (u64 i = packs * 8 + threadIdx.x; i < width; i += blockDim.x) target[i] = row[i];
}

extern "C" __global__ void count_ids(u64 count, u64 limit, const INDEX* ids, u32* counts, u64 op, Fault* fault) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x)
        atomicAdd(&counts[checked(i64(ids[i]), i, limit, op, fault)], 1u);
}

// starts[i] = how many ids are below i; one block of 1024, as many at a time.
extern "C" __global__ void scan_counts(u64 limit, const u32* counts, u32* starts, u32* next) {
    __shared__ u32 of_warps[2][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, turn = 0;
    // What this thread and those before it have among their own warp.
    auto scan = [&](u32 upto) {
        for (int step = 1; step < 32; step <<= 1) {
            u32 lower = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += lower;
        }
        return upto;
    };
    u32 before = 0;
    for (u64 first = 0; first < limit; first += 1024, turn ^= 1) {
        u64 i = first + threadIdx.x;
        u32 own = i < limit ? counts[i] : 0, upto = scan(own);
        // A warp may be a round ahead of another, never two.
        if (lane == 31) of_warps[turn][warp] = upto;
        __syncthreads();
        u32 warps = scan(of_warps[turn][lane]);
        u32 lower = __shfl_sync(0xffffffffu, warps, warp > 0 ? warp - 1 : 0);
        u32 start = before + upto - own + (warp > 0 ? lower : 0);
        if (i < limit) starts[i] = next[i] = start;
        before += __shfl_sync(0xffffffffu, warps, 31);
    }
}

extern "C" __global__ void drop_positions(u64 count, u64 limit, const INDEX* ids, u32* next, u32* bucket) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        i64 id = i64(ids[i]);
        if (id < 0 || u64(id) >= limit) id = 0;
        bucket[atomicAdd(&next[id], 1u)] = u32(i);
    }
}

extern "C" __global__ void rank_positions(u64 count, u64 limit, const INDEX* ids, const u32* counts, const u32* starts, const u32* bucket, u32* sorted) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        i64 id = i64(ids[i]);
        if (id < 0 || u64(id) >= limit) id = 0;
        u32 start = starts[id], size = counts[id], rank = 0;
        for (u32 j = 0; j < size; j++) rank += bucket[start + j] < u32(i);
        sorted[start + rank] = u32(i);
    }
}

// dtable[id] = Σ dout[position]. One block per id.
extern "C" __global__ void add_rows(u64 width, const u32* counts, const u32* starts, const u32* sorted, const REAL* dout, REAL* dtable) {
    u32 start = starts[blockIdx.x], size = counts[blockIdx.x];
    REAL* target = dtable + blockIdx.x * width;
    u64 packs = width % 8 == 0 && aligned16(dout, dtable) ? width / 8 : 0;
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) {
        float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        #pragma unroll 4
        for (u32 j = 0; j < size; j++) {
            Pack<REAL> row = load8(dout + sorted[start + j] * width + p * 8);
            #pragma unroll
            for (int c = 0; c < 8; c++) sums[c] += widen(row.v[c]);
        }
        Pack<REAL> out;
        #pragma unroll
        for (int c = 0; c < 8; c++) out.v[c] = narrow<REAL>(sums[c]);
        store8(target + p * 8, out);
    }
    for (u64 i = packs * 8 + threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 j = 0; j < size; j++) sum += widen(dout[sorted[start + j] * width + i]);
        target[i] = narrow<REAL>(sum);
    }
}

// Gradients of selections over small dimensions: each output walks all indices in order.
extern "C" __global__ void index_add(u64 count, const REAL* dy, const INDEX* indices, u64 picked, u64 size, u64 inner, REAL* dx, u64 op, Fault* fault) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 c = i % inner, own = i / inner % size, o = i / (inner * size);
        float sum = 0.0f;
        for (u64 p = 0; p < picked; p++)
            if (checked(i64(indices[p]), p, size, op, fault) == own) sum += widen(dy[(o * picked + p) * inner + c]);
        dx[i] = narrow<REAL>(sum);
    }
}

extern "C" __global__ void scatter_add(u64 count, const REAL* dy, const INDEX* indices, u64 picked, u64 width, REAL* dx, u64 op, Fault* fault) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 r = i / width, own = i % width;
        float sum = 0.0f;
        for (u64 p = 0; p < picked; p++)
            if (checked(i64(indices[r * picked + p]), r * picked + p, width, op, fault) == own) sum += widen(dy[r * picked + p]);
        dx[i] = narrow<REAL>(sum);
    }
}
