// Attention of 16-bit values on tensor cores in every case: masks, windows, documents, ALiBi, dropout, shared key heads, heads of up
// to 256 channels. What the kernels for the usual cases do not know comes here.
//
// A block owns 64 tokens, a warp of it sixteen, and walks over the tokens of the other side, 64 at a time. The way of the tiles is
// that of FlashAttention-2 (Dao 2023), but that gradients of queries and of keys come from kernels of their own, each of which
// computes the scores again: so every sum has one owner and one order, and the same input gives the same bits.
//
// Dropout's numbers are drawn in blocks of four neighbouring keys, so lanes draw for each other: each draws one block for every
// four weights, and none is drawn twice.
//
// Legend: g lane / 4, c lane % 4: of a warp's sixteen rows a lane holds g and g + 8, of eight columns 2c and 2c + 1. `OUT`: which
// gradients a pass over keys computes, 1 values, 2 keys, 3 both: of wide heads the registers hold one alone.

#define WIDE (CHANNELS > 128)
#define STAGES (WIDE ? 1 : 2)
#define TILE_BYTES (TILE * CHANNELS * 2)
#define LOG2E 1.4426950408889634f

extern __shared__ u8 memory[];

template <class T> struct Cores;
#define CORES(T, KIND)                                                                                                           \
    template <> struct Cores<T> {                                                                                                \
        __device__ static void multiply(float* c, const u32* a, const u32* b) {                                                  \
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                    \
        }                                                                                                                        \
        __device__ static u32 pair(float low, float high) {                                                                      \
            u32 both;                                                                                                            \
            asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));                                         \
            return both;                                                                                                         \
        }                                                                                                                        \
    };
CORES(bf16, "bf16")
CORES(f16, "f16")
typedef Cores<REAL> Own;

__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// Sixteen bytes of a tile in shared memory, scattered so that neither copies nor loads meet in a bank.
__device__ __forceinline__ u32 chunk(u32 tile, int row, int at) { return tile + row * (CHANNELS * 2) + ((at ^ (row & 7)) << 4); }

// Begins to bring 64 tokens from `first` on; what lies beyond the tensor is brought as zeros.
__device__ __forceinline__ void bring(u32 tile, const REAL* from, u64 stride, u64 first, u64 tokens, u64 dim) {
    #pragma unroll
    for (int i = threadIdx.x; i < TILE * CHANNELS / 8; i += 128) {
        int row = i / (CHANNELS / 8), at = i % (CHANNELS / 8);
        bool is_there = first + row < tokens && at * 8 < dim;
        const REAL* source = is_there ? from + (first + row) * stride + at * 8 : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(chunk(tile, row, at)), "l"(source), "r"(is_there ? 16 : 0) : "memory");
    }
}
__device__ __forceinline__ void submit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

__device__ __forceinline__ void load_matrices(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// sums = rows · columnsᵀ over all channels: a warp's sixteen rows of one tile with the 64 of another.
__device__ __forceinline__ void multiply_scores(float (&sums)[8][4], u32 rows, u32 columns) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    #pragma unroll
    for (int n = 0; n < 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    #pragma unroll
    for (int kk = 0; kk < CHANNELS / 16; kk++) {
        u32 a[4], b[4];
        load_matrices(a, chunk(rows, warp * 16 + (lane & 15), 2 * kk + (lane >> 4)));
        #pragma unroll
        for (int n = 0; n < 8; n += 2) {
            load_matrices(b, chunk(columns, n * 8 + (lane & 7) + (lane >> 4) * 8, 2 * kk + (lane >> 3 & 1)));
            Own::multiply(sums[n], a, b);
            Own::multiply(sums[n + 1], a, b + 2);
        }
    }
}

// sums += weights · values: sixteen rows of 64 weights, as `multiply_scores` leaves them, with a tile.
__device__ __forceinline__ void multiply_values(float (&sums)[CHANNELS / 8][4], const float (&weights)[8][4], u32 values) {
    int lane = threadIdx.x & 31;
    #pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        const float *left = weights[2 * kk], *right = weights[2 * kk + 1];
        u32 a[4] = {Own::pair(left[0], left[1]), Own::pair(left[2], left[3]), Own::pair(right[0], right[1]), Own::pair(right[2], right[3])};
        #pragma unroll
        for (int n = 0; n < CHANNELS / 8; n += 2) {
            u32 b[4];
            load_transposed(b, chunk(values, kk * 16 + (lane & 15), n + (lane >> 4)));
            Own::multiply(sums[n], a, b);
            Own::multiply(sums[n + 1], a, b + 2);
        }
    }
}

// Where dropout's numbers of a head begin, and whether four neighbouring keys are one block of them.
struct Drawn {
    u64 head;
    bool in_blocks;
    __device__ Drawn(const Spec& p, u64 b, u64 h) {
        head = b * p.drawn[0] + p.drawn_first[0] + h;
        in_blocks = p.drawn[2] % 4 == 0 && p.drawn_first[2] % 4 == 0;
    }
    __device__ u64 at(const Spec& p, u64 t, u64 s) const {
        return ((head * p.drawn[1]) + p.drawn_first[1] + t) * p.drawn[2] + p.drawn_first[2] + s;
    }
};
__device__ __forceinline__ u32 chosen(const Words& words, int at) {
    u32 low = at & 1 ? words.w[1] : words.w[0], high = at & 1 ? words.w[3] : words.w[2];
    return at & 2 ? high : low;
}
// What the four weights of a lane are multiplied by: rows are queries t and t + 8, columns keys from s + 2c on.
__device__ __forceinline__ void keep_of_queries(float* keep, const Spec& p, const Drawn& drawn, u64 t, u64 s) {
    int lane = threadIdx.x & 31, c = lane & 3;
    if (!drawn.in_blocks) {
        for (int i = 0; i < 4; i++) {
            u32 word = random_word(p.key, drawn.at(p, t + i / 2 * 8, s + 2 * c + i % 2));
            keep[i] = word >= p.drop_threshold ? p.keep_scale : 0.0f;
        }
        return;
    }
    // Of the four lanes of a row each draws one block: of its own row or the one eight below, four keys or the next four.
    Words words = random_block(p.key, drawn.at(p, t + c / 2 * 8, s + c % 2 * 4) / 4);
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        int from = (lane & ~3) | half * 2 | c / 2;
        Words theirs;
        #pragma unroll
        for (int i = 0; i < 4; i++) theirs.w[i] = __shfl_sync(0xffffffffu, words.w[i], from);
        #pragma unroll
        for (int i = 0; i < 2; i++) keep[2 * half + i] = chosen(theirs, c % 2 * 2 + i) >= p.drop_threshold ? p.keep_scale : 0.0f;
    }
}
// The same where rows are keys s + g and s + g + 8 of sixteen, and columns queries t and t + 1.
__device__ __forceinline__ void keep_of_keys(float* keep, const Spec& p, const Drawn& drawn, u64 t, u64 s) {
    int lane = threadIdx.x & 31, g = lane >> 2, own = g & 3;
    if (!drawn.in_blocks) {
        for (int i = 0; i < 4; i++) {
            u32 word = random_word(p.key, drawn.at(p, t + i % 2, s + g + i / 2 * 8));
            keep[i] = word >= p.drop_threshold ? p.keep_scale : 0.0f;
        }
        return;
    }
    // Four lanes with the same columns, whose keys are neighbours, need the same four blocks: each draws one, and gets its own key's
    // word of all.
    Words words = random_block(p.key, drawn.at(p, t + own % 2, s + (g & ~3) + own / 2 * 8) / 4);
    u32 kept = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 word = __shfl_xor_sync(0xffffffffu, chosen(words, own ^ i), i << 2);
        kept |= u32(word >= p.drop_threshold) << (own ^ i);
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) keep[i] = kept >> i & 1 ? p.keep_scale : 0.0f;
}

// ALiBi's share of the scores of a key, in powers of two.
__device__ __forceinline__ float bias_of(const Spec& p, u64 b, u64 h, u64 s) {
    return p.slopes && s < p.keys ? score(p, b, h, s, 0.0f) * LOG2E : 0.0f;
}

// The keys that one of a lane's queries sees.
struct Sees {
    u64 first, last;
    __device__ Sees(const Spec& p, u64 b, u64 t) {
        first = last = 0;
        if (t < p.queries) key_range(p, b, t, first, last);
    }
    __device__ bool operator()(u64 s) const { return s >= first && s < last; }
};

// The keys that some and those that all of a block's queries see.
struct Span {
    u64 begin, end, all_begin, all_end;
    __device__ Span(const Spec& p, u64 b, u64 t) {
        Sees first(p, b, t), last(p, b, min(t + TILE, p.queries) - 1);
        begin = first.first / TILE * TILE;
        end = last.last;
        all_begin = last.first;
        all_end = p.key_mask ? 0 : first.last;
    }
    __device__ bool is_whole(u64 s) const { return s >= all_begin && s + TILE <= all_end; }
};

// Scores in powers of two, without what is not seen.
__device__ __forceinline__ void finish_scores(
    float (&s)[8][4], const Spec& p, u64 b, u64 h, u64 first, bool is_whole, const Sees& near, const Sees& far
) {
    int c = threadIdx.x & 3;
    float scale = p.scale * LOG2E;
    #pragma unroll
    for (int n = 0; n < 8; n++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 key = first + n * 8 + 2 * c + i;
            float bias = bias_of(p, b, h, key);
            s[n][i] = s[n][i] * scale + bias;
            s[n][2 + i] = s[n][2 + i] * scale + bias;
            if (is_whole) continue;
            bool is_open = !p.key_mask || (key < p.keys && p.key_mask[b * p.keys + key]);
            if (!is_open || !near(key)) s[n][i] = -INFINITY;
            if (!is_open || !far(key)) s[n][2 + i] = -INFINITY;
        }
}

// A warp's rows of a result.
__device__ __forceinline__ void write(const float (&sums)[CHANNELS / 8][4], REAL* to, u64 stride, u64 row, u64 rows, u64 dim, float near, float far) {
    int c = threadIdx.x & 3;
    #pragma unroll
    for (int n = 0; n < CHANNELS / 8; n++) {
        if (n * 8 >= dim) continue;
        if (row < rows) *(u32*)(to + row * stride + n * 8 + 2 * c) = Own::pair(sums[n][0] * near, sums[n][1] * near);
        if (row + 8 < rows) *(u32*)(to + (row + 8) * stride + n * 8 + 2 * c) = Own::pair(sums[n][2] * far, sums[n][3] * far);
    }
}

#define ZERO(sums)                                                            \
    _Pragma("unroll") for (int n = 0; n < CHANNELS / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f

// Grid: blocks of queries, heads, batches. The last queries see the most keys, so they come first.
extern "C" __global__ void __launch_bounds__(128) any_forward(
    const __grid_constant__ Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs, REAL* out, Heads os, float* lse
) {
    u64 b = blockIdx.z, h = blockIdx.y, kv = h / (p.heads / p.kv_heads), t = u64(gridDim.x - 1 - blockIdx.x) * TILE;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    u32 at_q = shared_address(memory), at_k = at_q + TILE_BYTES, at_v = at_k + STAGES * TILE_BYTES;
    k += b * ks.batch + kv * ks.head;
    v += b * vs.batch + kv * vs.head;
    Span span(p, b, t);
    u64 own = t + warp * 16 + g;
    Sees near(p, b, own), far(p, b, own + 8);
    Drawn drawn(p, b, h);
    bring(at_q, q + b * qs.batch + h * qs.head, qs.token, t, p.queries, p.dim);
    bring(at_k, k, ks.token, span.begin, p.keys, p.dim);
    bring(at_v, v, vs.token, span.begin, p.keys, p.dim);
    submit();
    float sums[CHANNELS / 8][4], largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    ZERO(sums);
    int turn = 0;
    for (u64 s = span.begin; s < span.end; s += TILE, turn ^= STAGES - 1) {
        u64 next = s + TILE;
        if (STAGES > 1 && next < span.end) {
            bring(at_k + (turn ^ 1) * TILE_BYTES, k, ks.token, next, p.keys, p.dim);
            bring(at_v + (turn ^ 1) * TILE_BYTES, v, vs.token, next, p.keys, p.dim);
        }
        submit();
        arrived<STAGES - 1>();
        __syncthreads();
        float scores[8][4];
        multiply_scores(scores, at_q, at_k + turn * TILE_BYTES);
        finish_scores(scores, p, b, h, s, span.is_whole(s), near, far);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = largest[half];
            #pragma unroll
            for (int n = 0; n < 8; n++) most = fmaxf(most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float base = most == -INFINITY ? 0.0f : most, shrink = power_of_two(largest[half] - base);
            largest[half] = most;
            total[half] *= shrink;
            #pragma unroll
            for (int n = 0; n < 8; n++)
                #pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = power_of_two(scores[n][i] - base);
                    total[half] += scores[n][i];
                }
            #pragma unroll
            for (int n = 0; n < CHANNELS / 8; n++) {
                sums[n][2 * half] *= shrink;
                sums[n][2 * half + 1] *= shrink;
            }
        }
        if (p.dropout) {
            #pragma unroll
            for (int n = 0; n < 8; n++) {
                float keep[4];
                keep_of_queries(keep, p, drawn, own, s + n * 8);
                #pragma unroll
                for (int i = 0; i < 4; i++) scores[n][i] *= keep[i];
            }
        }
        multiply_values(sums, scores, at_v + turn * TILE_BYTES);
        __syncthreads();
        if (STAGES == 1 && next < span.end) {
            bring(at_k, k, ks.token, next, p.keys, p.dim);
            bring(at_v, v, vs.token, next, p.keys, p.dim);
        }
    }
    float factor[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
        factor[half] = total[half] > 0.0f ? 1.0f / total[half] : 0.0f;
        u64 row = own + 8 * half;
        if (c == 0 && row < p.queries) lse[(b * p.heads + h) * p.queries + row] = largest[half] / LOG2E + logf(total[half]);
    }
    write(sums, out + b * os.batch + h * os.head, os.token, own, p.queries, p.dim, factor[0], factor[1]);
}

// What a row's probabilities are measured from, in powers of two: none where it sees nothing.
__device__ __forceinline__ float base_of(const float* lse, u64 row, u64 rows, u64 first) {
    float own = row < rows ? lse[first + row] : -INFINITY;
    return own == -INFINITY ? INFINITY : own * LOG2E;
}

// Gradients of queries. Grid as of `any_forward`.
extern "C" __global__ void __launch_bounds__(128) any_queries(
    const __grid_constant__ Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs, const REAL* dout, Heads ds,
    const float* lse, const float* delta, REAL* dq, Heads dqs
) {
    u64 b = blockIdx.z, h = blockIdx.y, kv = h / (p.heads / p.kv_heads), t = u64(gridDim.x - 1 - blockIdx.x) * TILE;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
    u32 at_q = shared_address(memory), at_do = at_q + TILE_BYTES, at_k = at_do + TILE_BYTES, at_v = at_k + STAGES * TILE_BYTES;
    k += b * ks.batch + kv * ks.head;
    v += b * vs.batch + kv * vs.head;
    Span span(p, b, t);
    u64 own = t + warp * 16 + g, first_row = (b * p.heads + h) * p.queries;
    Sees near(p, b, own), far(p, b, own + 8);
    Drawn drawn(p, b, h);
    bring(at_q, q + b * qs.batch + h * qs.head, qs.token, t, p.queries, p.dim);
    bring(at_do, dout + b * ds.batch + h * ds.head, ds.token, t, p.queries, p.dim);
    bring(at_k, k, ks.token, span.begin, p.keys, p.dim);
    bring(at_v, v, vs.token, span.begin, p.keys, p.dim);
    submit();
    float base[2], change[2], sums[CHANNELS / 8][4];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 row = own + 8 * half;
        base[half] = base_of(lse, row, p.queries, first_row);
        change[half] = row < p.queries ? delta[first_row + row] : 0.0f;
    }
    ZERO(sums);
    int turn = 0;
    for (u64 s = span.begin; s < span.end; s += TILE, turn ^= STAGES - 1) {
        u64 next = s + TILE;
        if (STAGES > 1 && next < span.end) {
            bring(at_k + (turn ^ 1) * TILE_BYTES, k, ks.token, next, p.keys, p.dim);
            bring(at_v + (turn ^ 1) * TILE_BYTES, v, vs.token, next, p.keys, p.dim);
        }
        submit();
        arrived<STAGES - 1>();
        __syncthreads();
        float scores[8][4], changes[8][4];
        multiply_scores(scores, at_q, at_k + turn * TILE_BYTES);
        multiply_scores(changes, at_do, at_v + turn * TILE_BYTES);
        finish_scores(scores, p, b, h, s, span.is_whole(s), near, far);
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            float keep[4] = {1.0f, 1.0f, 1.0f, 1.0f};
            if (p.dropout) keep_of_queries(keep, p, drawn, own, s + n * 8);
            #pragma unroll
            for (int i = 0; i < 4; i++)
                changes[n][i] = power_of_two(scores[n][i] - base[i / 2]) * (changes[n][i] * keep[i] - change[i / 2]);
        }
        multiply_values(sums, changes, at_k + turn * TILE_BYTES);
        __syncthreads();
        if (STAGES == 1 && next < span.end) {
            bring(at_k, k, ks.token, next, p.keys, p.dim);
            bring(at_v, v, vs.token, next, p.keys, p.dim);
        }
    }
    write(sums, dq + b * dqs.batch + h * dqs.head, dqs.token, own, p.queries, p.dim, p.scale, p.scale);
}

// The queries that see a key.
struct Seen {
    i64 first, last;
    __device__ Seen(const Spec& p, u64 b, u64 s) {
        first = last = 0;
        if (s >= p.keys || (p.key_mask && !p.key_mask[b * p.keys + s])) return;
        first = p.causal ? i64(s) - p.shift : 0;
        last = p.window ? i64(s) - p.shift + p.window : i64(p.queries);
        within_document(p, b, s, first, last);
        first = first < 0 ? 0 : first;
        last = last > i64(p.queries) ? i64(p.queries) : last;
    }
    __device__ bool operator()(i64 t) const { return t >= first && t < last; }
};

// Gradients of keys and values. Grid: blocks of keys, heads of keys, batches.
extern "C" __global__ void __launch_bounds__(128) any_keys(
    const __grid_constant__ Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs, const REAL* dout, Heads ds,
    const float* lse, const float* delta, REAL* dk, Heads dks, REAL* dv, Heads dvs
) {
    __shared__ float bases[STAGES][TILE], deltas[STAGES][TILE];
    u64 b = blockIdx.z, kv = blockIdx.y, s = u64(blockIdx.x) * TILE, group = p.heads / p.kv_heads;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    u32 at_k = shared_address(memory), at_v = at_k + TILE_BYTES, at_q = at_v + TILE_BYTES, at_do = at_q + STAGES * TILE_BYTES;
    u64 own = s + warp * 16 + g;
    Seen near(p, b, own), far(p, b, own + 8);
    // What some and what all of the block's keys are seen by, but for those that a mask hides.
    i64 begin = p.causal ? i64(s) - p.shift : 0, end = p.window ? i64(s) + TILE - 1 - p.shift + p.window : i64(p.queries);
    if (p.documents) {
        u64 last_key = min(s + TILE, p.keys) - 1;
        begin = max(begin, p.documents[2 * (b * p.keys + s)]);
        end = min(end, p.documents[2 * (b * p.keys + last_key) + 1]);
    }
    begin = max(begin, 0ll) / TILE * TILE;
    end = min(end, i64(p.queries));
    i64 all_begin = p.causal ? i64(s) + TILE - 1 - p.shift : 0, all_end = p.window ? i64(s) - p.shift + p.window : i64(p.queries);
    bool may_be_whole = !p.key_mask && !p.documents && s + TILE <= p.keys;
    bring(at_k, k + b * ks.batch + kv * ks.head, ks.token, s, p.keys, p.dim);
    bring(at_v, v + b * vs.batch + kv * vs.head, vs.token, s, p.keys, p.dim);
    u64 steps = end > begin ? u64(end - begin + TILE - 1) / TILE : 0, turns = steps * group;
    auto bring_turn = [&](u64 turn, int stage) {
        u64 h = kv * group + turn / steps, t = u64(begin) + turn % steps * TILE;
        bring(at_q + stage * TILE_BYTES, q + b * qs.batch + h * qs.head, qs.token, t, p.queries, p.dim);
        bring(at_do + stage * TILE_BYTES, dout + b * ds.batch + h * ds.head, ds.token, t, p.queries, p.dim);
        u64 row = t + threadIdx.x % TILE, first_row = (b * p.heads + h) * p.queries;
        if (threadIdx.x < TILE) bases[stage][threadIdx.x] = base_of(lse, row, p.queries, first_row);
        else deltas[stage][threadIdx.x - TILE] = row < p.queries ? delta[first_row + row] : 0.0f;
    };
    if (turns) bring_turn(0, 0);
    submit();
#if OUT & 1
    float dvalues[CHANNELS / 8][4];
    ZERO(dvalues);
#endif
#if OUT & 2
    float dkeys[CHANNELS / 8][4];
    ZERO(dkeys);
#endif
    float scale = p.scale * LOG2E;
    for (u64 turn = 0; turn < turns; turn++) {
        int stage = STAGES > 1 ? turn % STAGES : 0;
        if (STAGES > 1 && turn + 1 < turns) bring_turn(turn + 1, stage ^ 1);
        submit();
        arrived<STAGES - 1>();
        __syncthreads();
        u64 h = kv * group + turn / steps;
        i64 t = begin + i64(turn % steps) * TILE;
        bool is_whole = may_be_whole && t >= all_begin && t + TILE <= all_end;
        float bias[2] = {bias_of(p, b, h, own), bias_of(p, b, h, own + 8)};
        Drawn drawn(p, b, h);
        float scores[8][4], keep[8][4];
        multiply_scores(scores, at_k, at_q + stage * TILE_BYTES);
        #pragma unroll
        for (int n = 0; n < 8; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = n * 8 + 2 * c + i % 2;
                float own_score = scores[n][i] * scale + bias[i / 2];
                if (!is_whole && !(i < 2 ? near : far)(t + column)) own_score = -INFINITY;
                scores[n][i] = power_of_two(own_score - bases[stage][column]);
                keep[n][i] = 1.0f;
            }
            if (p.dropout) keep_of_keys(keep[n], p, drawn, u64(t) + n * 8 + 2 * c, s + warp * 16);
        }
#if OUT & 2
        float changes[8][4];
        multiply_scores(changes, at_v, at_do + stage * TILE_BYTES);
        #pragma unroll
        for (int n = 0; n < 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                float change = deltas[stage][n * 8 + 2 * c + i % 2];
                changes[n][i] = scores[n][i] * (changes[n][i] * keep[n][i] - change);
            }
        multiply_values(dkeys, changes, at_q + stage * TILE_BYTES);
#endif
#if OUT & 1
        #pragma unroll
        for (int n = 0; n < 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] *= keep[n][i];
        multiply_values(dvalues, scores, at_do + stage * TILE_BYTES);
#endif
        __syncthreads();
        if (STAGES == 1 && turn + 1 < turns) bring_turn(turn + 1, 0);
    }
    arrived<0>();
#if OUT & 1
    write(dvalues, dv + b * dvs.batch + kv * dvs.head, dvs.token, own, p.keys, p.dim, 1.0f, 1.0f);
#endif
#if OUT & 2
    write(dkeys, dk + b * dks.batch + kv * dks.head, dks.token, own, p.keys, p.dim, p.scale, p.scale);
#endif
}
