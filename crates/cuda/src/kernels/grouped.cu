// Rows by group: a stable counting sort, rows there and back, and sums of each group's rows. Everything has one order.


// Counts of each block's slots, `[blocks, groups + 1]`; the last column is for slots that go nowhere.
extern "C" __global__ void count_groups(u64 slots, u64 groups, const i64* ids, u32* counts, u64 op, Fault* fault) {
    extern __shared__ u32 own[];
    for (u64 g = threadIdx.x; g <= groups; g += blockDim.x) own[g] = 0;
    __syncthreads();
    u64 slot = blockIdx.x * (u64)SLOTS + threadIdx.x;
    if (slot < slots) atomicAdd(&own[checked(ids[slot], slot, groups + 1, op, fault)], 1u);
    __syncthreads();
    for (u64 g = threadIdx.x; g <= groups; g += blockDim.x) counts[blockIdx.x * (groups + 1) + g] = own[g];
}

// One block: turns each block's counts into where its slots of a group begin, and leaves the totals.
extern "C" __global__ void place_groups(u64 blocks, u64 groups, u32* counts, i64* totals) {
    extern __shared__ u32 starts[];
    for (u64 g = threadIdx.x; g < groups; g += blockDim.x) {
        u32 sum = 0;
        for (u64 b = 0; b < blocks; b++) sum += counts[b * (groups + 1) + g];
        totals[g] = sum;
        starts[g] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 next = 0;
        for (u64 g = 0; g < groups; g++) {
            u32 count = starts[g];
            starts[g] = next;
            next += count;
        }
    }
    __syncthreads();
    for (u64 g = threadIdx.x; g < groups; g += blockDim.x) {
        u32 next = starts[g];
        for (u64 b = 0; b < blocks; b++) {
            u32 count = counts[b * (groups + 1) + g];
            counts[b * (groups + 1) + g] = next;
            next += count;
        }
    }
}

// Gives each slot its row, in order of slots. Rows that nobody gets keep the -1 that was written before.
extern "C" __global__ void sort_slots(u64 slots, u64 groups, const i64* ids, const u32* places, i64* order, i64* place) {
    extern __shared__ u32 next[];
    for (u64 g = threadIdx.x; g < groups; g += blockDim.x) next[g] = places[blockIdx.x * (groups + 1) + g];
    __syncthreads();
    u64 slot = blockIdx.x * (u64)SLOTS + threadIdx.x;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 id = slot < slots ? ids[slot] : -1;
    // What was out of range has been reported; it goes nowhere.
    bool goes = id >= 0 && id < i64(groups);
    u32 peers = __match_any_sync(0xffffffffu, goes ? u32(id) : 0xffffffffu);
    u32 before = __popc(peers & ((1u << lane) - 1));
    // Warps take their turns, so that ranks follow the slots.
    for (int turn = 0; turn < SLOTS / 32; turn++) {
        if (turn == warp && goes) {
            u32 row = next[id] + before;
            order[row] = i64(slot);
            place[slot] = i64(row);
            __syncwarp(peers);
            if (before == 0) next[id] += __popc(peers);
        }
        __syncthreads();
    }
    if (slot < slots && !goes) place[slot] = -1;
}

// A block per row.
extern "C" __global__ void spread_rows(u64 width, u64 chosen, const i64* order, const REAL* x, REAL* y) {
    i64 slot = order[blockIdx.x];
    const REAL* from = x + (slot < 0 ? 0 : u64(slot) / chosen) * width;
    REAL* to = y + blockIdx.x * width;
    bool wide = width % 8 == 0 && aligned16(x, y);
    u64 packs = wide ? width / 8 : 0;
    Pack<REAL> zeros = {};
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) store8(to + p * 8, slot < 0 ? zeros : load8(from + p * 8));
    for (u64 i = packs * 8 + threadIdx.x; i < width; i += blockDim.x) to[i] = slot < 0 ? narrow<REAL>(0.0f) : from[i];
}

// A block per token.
extern "C" __global__ void collect_rows(u64 width, u64 chosen, const i64* place, const REAL* x, const float* weights, REAL* y) {
    u64 first = blockIdx.x * chosen;
    REAL* to = y + blockIdx.x * width;
    u64 packs = width % 8 == 0 && aligned16(x, y) ? width / 8 : 0;
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) {
        float sums[8] = {};
        for (u64 j = 0; j < chosen; j++) {
            i64 row = place[first + j];
            if (row < 0) continue;
            float weight = weights ? weights[first + j] : 1.0f;
            Pack<REAL> pack = load8(x + u64(row) * width + p * 8);
            #pragma unroll
            for (int i = 0; i < 8; i++) sums[i] += weight * widen(pack.v[i]);
        }
        store8(to + p * 8, narrow8<REAL>(sums));
    }
    for (u64 i = packs * 8 + threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u64 j = 0; j < chosen; j++) {
            i64 row = place[first + j];
            if (row >= 0) sum += (weights ? weights[first + j] : 1.0f) * widen(x[u64(row) * width + i]);
        }
        to[i] = narrow<REAL>(sum);
    }
}

// A block per row; the gradients of weights are zero before.
extern "C" __global__ void collect_rows_backward(u64 width, u64 chosen, const i64* order, const REAL* x, const float* weights, const REAL* dy, REAL* dx, float* dweights) {
    i64 slot = order[blockIdx.x];
    const REAL* own = x + blockIdx.x * width;
    const REAL* from = dy + (slot < 0 ? 0 : u64(slot) / chosen) * width;
    REAL* to = dx + blockIdx.x * width;
    float weight = slot < 0 ? 0.0f : weights[slot], sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float gradient = slot < 0 ? 0.0f : widen(from[i]);
        sum += gradient * widen(own[i]);
        to[i] = narrow<REAL>(weight * gradient);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0 && slot >= 0) dweights[slot] = sum;
}
