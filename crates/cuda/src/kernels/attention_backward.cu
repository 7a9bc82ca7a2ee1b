// The gradients of attention on Hopper, the same bits every time, in memory that grows with the number of tokens alone.
//
// A block of threads owns 128 keys and walks over the queries that see them, for all heads that share these keys, so gradients of
// keys and values stay in registers. Gradients of queries are sums over blocks of keys that end in no fixed order. They are
// sums of integers, which have none: a row's share is bounded by what its gradient, the values and the keys allow, which gives
// the size of an integer's step (`rows`, `bounds`), and `write_queries` turns the sums back. The way of the tiles is that of
// FlashAttention-3 (Shah et al. 2024): one warp has tiles copied to shared memory, two groups of warps multiply.
//
// Scores are computed transposed, so that the products that sum over queries find their left operand in registers:
//   Sᵀ = K Qᵀ,  dPᵀ = V dOᵀ,  Pᵀ = 2^(Sᵀ - L),  dSᵀ = Pᵀ (dPᵀ - δ),  dV += Pᵀ dO,  dK += dSᵀ Q,  dQ = dS K.
//
// Legend: n keys, m queries, d channels; g lane / 4, c lane % 4: of 64 rows a lane holds rows g and g + 8 of its warp's sixteen, and
// of eight columns 2c and 2c + 1.

#if CHANNELS == 64
#define BLOCK_M BLOCK_M_64
#else
#define BLOCK_M BLOCK_M_128
#endif
#define PARTS (CHANNELS / 64)  // of a tile's rows: 128 bytes each, which is how far the pattern of banks reaches
#define WARPS 8                // that multiply, in two groups

#if HALF == 1
#define KIND "bf16"
#else
#define KIND "f16"
#endif

// In shared memory, in bytes. Tiles come first: they begin at a multiple of 1,024.
#define Q_BYTES (BLOCK_M * CHANNELS * 2)
#define K_BYTES (BLOCK_N * CHANNELS * 2)
#define DS_BYTES (BLOCK_M * BLOCK_N * 2)
#define DQ_BYTES 16384         // of a group: 64 × 64 integers
#define AT_K 0
#define AT_V (AT_K + K_BYTES)
#define AT_Q (AT_V + K_BYTES)
#define AT_DO (AT_Q + STAGES * Q_BYTES)
#define AT_DS (AT_DO + STAGES * Q_BYTES)
#define AT_DQ (AT_DS + 2 * DS_BYTES)
#define AT_ROWS (AT_DQ + 2 * DQ_BYTES)                  // of each stage: L, step, δ
#define AT_CHANNELS (AT_ROWS + STAGES * 3 * BLOCK_M * 4)
#define AT_BARRIERS (AT_CHANNELS + CHANNELS * 4)

// A tensor of heads as the copy engine knows it.
struct alignas(64) Map { u64 words[16]; };

struct Problem {
    // Of all rows, `[batch · heads, padded]`: the log-sum-exp in bits, δ, integers to a unit of dQ but for the channel's share.
    const float *bits, *delta, *steps;
    const float* channels;                              // integers to a unit of a channel, `[batch · kv_heads, CHANNELS]`
    int* dq;                                            // sums, in the order in which lanes hold them
    REAL *dk, *dv;
    float *dk_parts, *dv_parts;                         // in place of these where the heads of a group are shared out
    u64 dk_strides[3], dv_strides[3];                   // of a batch, a head, a token
    u32 heads, kv_heads, shares;                        // heads of queries, of keys; blocks that the heads of a group are shared out to
    u32 queries, keys, dim, padded;
    float scale;
    u32 causal, window;                                 // window: how many last keys a query sees, or 0
};

__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// A tile in shared memory as the tensor cores know it, its rows 128 bytes long and scrambled in eights. `far`: from the first 64
// columns to the next, where they are the operand's columns.
__device__ __forceinline__ u64 tile_at(u32 at, u32 far = 16) {
    return u64((at & 0x3ffff) >> 4) | u64(far >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

#define R8(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3]), "+f"(a[i + 4]), "+f"(a[i + 5]), "+f"(a[i + 6]), "+f"(a[i + 7])
#define R32(a, i) R8(a, i), R8(a, i + 8), R8(a, i + 16), R8(a, i + 24)
#define N32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N64 N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// sums = (add ? sums : 0) + left · right, with 64 rows. `ACROSS`: rows and columns of both lie the other way round in memory.
template <int ACROSS> __device__ __forceinline__ void multiply(float (&sums)[32], u64 left, u64 right, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." KIND "." KIND
                 " {" N32 "}, %32, %33, add, 1, 1, %35, %35;\n}"
                 : R32(sums, 0) : "l"(left), "l"(right), "r"(add), "n"(ACROSS));
}
template <int ACROSS> __device__ __forceinline__ void multiply(float (&sums)[64], u64 left, u64 right, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." KIND "." KIND
                 " {" N64 "}, %64, %65, add, 1, 1, %67, %67;\n}"
                 : R32(sums, 0), R32(sums, 32) : "l"(left), "l"(right), "r"(add), "n"(ACROSS));
}
// sums += left · right, the left operand in registers, the right one across.
__device__ __forceinline__ void multiply_held(float (&sums)[32], const u32* left, u64 right) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." KIND "." KIND " {" N32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : R32(sums, 0) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}
__device__ __forceinline__ void multiply_held(float (&sums)[64], const u32* left, u64 right) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." KIND "." KIND " {" N64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : R32(sums, 0), R32(sums, 32) : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void submit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all but the last `LEFT` submitted, after which these sums may be read.
template <int LEFT, int N> __device__ __forceinline__ void wait_products(float (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
    #pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i]) :: "memory");
}

__device__ __forceinline__ void bring_tile(u32 to, const Map* map, int channel, int token, int head, int batch, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(to), "l"(map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bring(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// Shared memory that threads wrote is to be read by tensor cores or the copy engine.
__device__ __forceinline__ void show_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" :: "r"(2 + group) : "memory"); }

// sums = left · rightᵀ of 64 rows and a tile, over all channels.
__device__ __forceinline__ void multiply_scores(float (&sums)[BLOCK_M / 2], u32 left, u32 right) {
    #pragma unroll
    for (int kk = 0; kk < CHANNELS / 16; kk++)
        multiply<0>(sums, tile_at(left + kk / 4 * BLOCK_N * 128 + kk % 4 * 32), tile_at(right + kk / 4 * BLOCK_M * 128 + kk % 4 * 32), kk);
}

__device__ __forceinline__ float2 two_at(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ float one_at(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}

// What a block computes: some keys of a head of them, for some heads of queries.
struct Work {
    u32 units, batch, kv_head, share, first_head, heads, first_key, m_begin, m_end;
    __device__ Work(const Problem& p) {
        units = gridDim.x / ((p.keys + BLOCK_N - 1) / BLOCK_N);
        u32 unit = blockIdx.x % units;
        share = unit % p.shares;
        kv_head = unit / p.shares % p.kv_heads;
        batch = unit / p.shares / p.kv_heads;
        heads = p.heads / p.kv_heads / p.shares;
        first_head = (kv_head * p.shares + share) * heads;
        // The first keys are seen by the most queries, so they come first.
        first_key = blockIdx.x / units * BLOCK_N;
        m_begin = p.causal ? first_key / BLOCK_M : 0;
        m_end = (p.queries + BLOCK_M - 1) / BLOCK_M;
        if (p.window) m_end = min(m_end, (first_key + BLOCK_N - 1 + p.window - 1) / BLOCK_M + 1);
    }
};

// The queries that see a key.
struct Seen {
    u32 first, count;
    __device__ Seen(const Problem& p, u32 key) {
        first = p.causal ? key : 0;
        count = key >= p.keys ? 0 : p.window ? p.window : 1u << 30;
    }
};

// Barriers of the stages: tiles have arrived, all are done with them.
struct Barriers {
    u32 first;
    __device__ u32 keys() const { return first; }
    __device__ u32 q_full(u32 stage) const { return first + 8 + stage * 32; }
    __device__ u32 q_empty(u32 stage) const { return first + 16 + stage * 32; }
    __device__ u32 do_full(u32 stage) const { return first + 24 + stage * 32; }
    __device__ u32 do_empty(u32 stage) const { return first + 32 + stage * 32; }
};

__device__ __forceinline__ void bring_tiles(
    const Map* q, const Map* k, const Map* v, const Map* dout, const Problem& p, const Work& work, u32 shared, Barriers barriers
) {
    expect(barriers.keys(), 2 * K_BYTES);
    for (int part = 0; part < PARTS; part++) {
        bring_tile(shared + AT_K + part * BLOCK_N * 128, k, part * 64, work.first_key, work.kv_head, work.batch, barriers.keys());
        bring_tile(shared + AT_V + part * BLOCK_N * 128, v, part * 64, work.first_key, work.kv_head, work.batch, barriers.keys());
    }
    u32 turn = 0;
    for (u32 head = work.first_head; head < work.first_head + work.heads; head++)
        for (u32 m = work.m_begin; m < work.m_end; m++, turn++) {
            u32 stage = turn % STAGES, parity = turn / STAGES % 2 ^ 1;
            u64 row = u64(work.batch * p.heads + head) * p.padded + m * BLOCK_M;
            u32 rows = shared + AT_ROWS + stage * 3 * BLOCK_M * 4;
            wait(barriers.q_empty(stage), parity);
            expect(barriers.q_full(stage), Q_BYTES + 2 * BLOCK_M * 4);
            for (int part = 0; part < PARTS; part++)
                bring_tile(shared + AT_Q + stage * Q_BYTES + part * BLOCK_M * 128, q, part * 64, m * BLOCK_M, head, work.batch, barriers.q_full(stage));
            bring(rows, p.bits + row, BLOCK_M * 4, barriers.q_full(stage));
            bring(rows + BLOCK_M * 4, p.steps + row, BLOCK_M * 4, barriers.q_full(stage));
            wait(barriers.do_empty(stage), parity);
            expect(barriers.do_full(stage), Q_BYTES + BLOCK_M * 4);
            for (int part = 0; part < PARTS; part++)
                bring_tile(shared + AT_DO + stage * Q_BYTES + part * BLOCK_M * 128, dout, part * 64, m * BLOCK_M, head, work.batch, barriers.do_full(stage));
            bring(rows + 2 * BLOCK_M * 4, p.delta + row, BLOCK_M * 4, barriers.do_full(stage));
        }
}

// The gradients of 64 keys, as a group of warps holds them, to memory.
__device__ __forceinline__ void write_keys(
    const Problem& p, const Work& work, u32 key, int c, const float (&sums)[CHANNELS / 2], float factor, REAL* out, float* parts, const u64* strides
) {
    #pragma unroll
    for (int half = 0; half < 2; half++, key += 8) {
        if (key >= p.keys) continue;
        if (parts) {
            u64 head = u64(work.share) * (work.units / p.shares) + work.batch * p.kv_heads + work.kv_head;
            float* to = parts + (head * p.keys + key) * p.dim;
            #pragma unroll
            for (int j = 0; j < CHANNELS / 8; j++)
                if (j * 8 < p.dim) *(float2*)(to + j * 8 + 2 * c) = make_float2(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
        } else {
            REAL* to = out + work.batch * strides[0] + work.kv_head * strides[1] + key * strides[2];
            #pragma unroll
            for (int j = 0; j < CHANNELS / 8; j++)
                if (j * 8 < p.dim) *(u32*)(to + j * 8 + 2 * c) = pair(sums[4 * j + 2 * half] * factor, sums[4 * j + 2 * half + 1] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) gradients(
    const __grid_constant__ Map q, const __grid_constant__ Map k, const __grid_constant__ Map v, const __grid_constant__ Map dout,
    const __grid_constant__ Problem p
) {
    extern __shared__ u8 memory[];
    u32 shared = (shared_address(memory) + 1023) & ~1023u;
    Barriers barriers{shared + AT_BARRIERS};
    Work work(p);
    if (threadIdx.x == 0) {
        open_barrier(barriers.keys(), 1);
        for (int stage = 0; stage < STAGES; stage++) {
            open_barrier(barriers.q_full(stage), 1);
            open_barrier(barriers.do_full(stage), 1);
            open_barrier(barriers.q_empty(stage), WARPS);
            open_barrier(barriers.do_empty(stage), WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < CHANNELS) {
        float own = p.channels[u64(work.batch * p.kv_heads + work.kv_head) * CHANNELS + threadIdx.x];
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(shared + AT_CHANNELS + threadIdx.x * 4), "f"(own) : "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) bring_tiles(&q, &k, &v, &dout, p, work, shared, barriers);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

    int thread = threadIdx.x % 128, group = threadIdx.x / 128 - 1, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
    float dk[CHANNELS / 2], dv[CHANNELS / 2];
    #pragma unroll
    for (int i = 0; i < CHANNELS / 2; i++) dk[i] = dv[i] = 0.0f;
    float scale_bits = p.scale * 1.4426950408889634f;
    u32 own_key = work.first_key + group * 64 + warp * 16 + g;
    // Where this lane's rows of dSᵀ go: its address for four 8 × 8 matrices at once.
    u32 ds_row = group * 64 + warp * 16 + (lane / 8 % 2) * 8 + lane % 8;
    u32 own_channels = shared + AT_CHANNELS + (CHANNELS == 128 ? group * 256 : 0) + 8 * c;
    u32 staging = shared + AT_DQ + group * DQ_BYTES;
    wait(barriers.keys(), 0);

    u32 steps_of_head = work.m_end - work.m_begin, turns = work.heads * steps_of_head, m = work.m_begin;
    int* dq_to = p.dq + ((u64(work.batch * p.heads + work.first_head) * (p.padded / BLOCK_M) + m) * 2 + group) * (DQ_BYTES / 4);
    u64 dq_skip = u64(p.padded / BLOCK_M - steps_of_head) * (2 * DQ_BYTES / 4);
    #pragma unroll 1
    for (u32 turn = 0; turn < turns; turn++) {
        u32 stage = turn % STAGES, parity = turn / STAGES % 2;
        u32 q_at = shared + AT_Q + stage * Q_BYTES, do_at = shared + AT_DO + stage * Q_BYTES;
        u32 ds_at = shared + AT_DS + turn % 2 * DS_BYTES, rows = shared + AT_ROWS + stage * 3 * BLOCK_M * 4;
        float s[BLOCK_M / 2], dp[BLOCK_M / 2];
        wait(barriers.q_full(stage), parity);
        begin_products();
        multiply_scores(s, shared + AT_K + group * 8192, q_at);
        submit_products();
        wait(barriers.do_full(stage), parity);
        begin_products();
        multiply_scores(dp, shared + AT_V + group * 8192, do_at);
        submit_products();

        wait_products<1>(s);
        u32 first = m * BLOCK_M;
        bool whole = work.first_key + BLOCK_N <= p.keys && !(p.causal && first < work.first_key + BLOCK_N - 1)
            && !(p.window && first + BLOCK_M - 1 >= work.first_key + p.window);
        if (!whole) {
            Seen near_key(p, own_key), far_key(p, own_key + 8);
            #pragma unroll
            for (int i = 0; i < BLOCK_M / 2; i++) {
                Seen seen = i / 2 % 2 ? far_key : near_key;
                if (first + i / 4 * 8 + 2 * c + i % 2 - seen.first >= seen.count) s[i] = -INFINITY;
            }
        }
        #pragma unroll
        for (int j = 0; j < BLOCK_M / 8; j++) {
            float2 bits = two_at(rows + j * 32 + c * 8);
            #pragma unroll
            for (int i = 0; i < 4; i++) s[4 * j + i] = power_of_two(s[4 * j + i] * scale_bits - (i % 2 ? bits.y : bits.x));
        }
        u32 probabilities[BLOCK_M / 4], ds[BLOCK_M / 4];
        wait_products<0>(dp);
        #pragma unroll
        for (int j = 0; j < BLOCK_M / 8; j++) {
            float2 delta = two_at(rows + 2 * BLOCK_M * 4 + j * 32 + c * 8);
            #pragma unroll
            for (int i = 0; i < 4; i++) dp[4 * j + i] = s[4 * j + i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
        }
        #pragma unroll
        for (int i = 0; i < BLOCK_M / 4; i++) {
            probabilities[i] = pair(s[2 * i], s[2 * i + 1]);
            ds[i] = pair(dp[2 * i], dp[2 * i + 1]);
        }
        begin_products();
        #pragma unroll
        for (int kk = 0; kk < BLOCK_M / 16; kk++) multiply_held(dv, probabilities + 4 * kk, tile_at(do_at + kk * 2048, BLOCK_M * 128));
        submit_products();
        #pragma unroll
        for (int kk = 0; kk < BLOCK_M / 16; kk++) {
            u32 eight = 2 * kk + lane / 16;
            u32 at = ds_at + eight / 8 * (BLOCK_N * 128) + ds_row * 128 + ((eight % 8 ^ ds_row % 8) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         :: "r"(at), "r"(ds[4 * kk]), "r"(ds[4 * kk + 1]), "r"(ds[4 * kk + 2]), "r"(ds[4 * kk + 3]) : "memory");
        }
        show_shared();
        asm volatile("bar.sync 1, 256;" ::: "memory");
        float dq[32];
        begin_products();
        #pragma unroll
        for (int kk = 0; kk < BLOCK_N / 16; kk++)
            multiply<1>(dq, tile_at(ds_at + (CHANNELS == 64 ? group * BLOCK_N * 128 : 0) + kk * 2048),
                        tile_at(shared + AT_K + (CHANNELS == 64 ? 0 : group * BLOCK_N * 128) + kk * 2048), kk);
        submit_products();
        begin_products();
        #pragma unroll
        for (int kk = 0; kk < BLOCK_M / 16; kk++) multiply_held(dk, ds + 4 * kk, tile_at(q_at + kk * 2048, BLOCK_M * 128));
        submit_products();
        wait_products<2>(dv);
        if (lane == 0) arrive(barriers.do_empty(stage));
        wait_products<1>(dq);
        u32 row = rows + BLOCK_M * 4 + ((CHANNELS == 64 ? group * 64 : 0) + warp * 16 + g) * 4;
        float near = one_at(row), far = one_at(row + 32);
        if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        meet_group(group);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 channel = two_at(own_channels + j * 32);
            int a = __float2int_rn(dq[4 * j] * near * channel.x), b = __float2int_rn(dq[4 * j + 1] * near * channel.y);
            int e = __float2int_rn(dq[4 * j + 2] * far * channel.x), f = __float2int_rn(dq[4 * j + 3] * far * channel.y);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(staging + (j * 128 + thread) * 16), "r"(a), "r"(b), "r"(e), "r"(f) : "memory");
        }
        show_shared();
        meet_group(group);
        if (thread == 0)
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;\ncp.async.bulk.commit_group;"
                         :: "l"(dq_to), "r"(staging), "n"(DQ_BYTES) : "memory");
        wait_products<0>(dk);
        if (lane == 0) arrive(barriers.q_empty(stage));
        dq_to += 2 * DQ_BYTES / 4;
        if (++m == work.m_end) {
            m = work.m_begin;
            dq_to += dq_skip;
        }
    }
    write_keys(p, work, own_key, c, dk, p.scale, p.dk, p.dk_parts, p.dk_strides);
    write_keys(p, work, own_key, c, dv, 1.0f, p.dv, p.dv_parts, p.dv_strides);
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
