// What comes before and after `gradients` of attention_backward.cu: how large an integer's step is in each row, and the way back
// from integers.
//
// |dQ[m, d]| ≤ Σₙ P[m, n] |dO[m] · (V[n] - O[m])| |K[n, d]| ≤ 2 |dO[m]| maxₙ|V[n]| maxₙ|K[n, d]|, of which the first two factors are
// the row's and the last one the channel's. What is no number in keys, values or gradients makes a step no number, and with it all
// that is measured in it.

#if CHANNELS == 64
#define BLOCK_M BLOCK_M_64
#else
#define BLOCK_M BLOCK_M_128
#endif
#define LANES (CHANNELS / 8)  // that share a row
#define DQ_INTEGERS 4096      // of a group of warps: 64 × 64

// With the strides of a batch, a head, a token.
template <class T> struct Strided { T* at; u64 strides[3]; };
typedef Strided<const REAL> Heads;
typedef Strided<REAL> HeadsOut;

template <class T> __device__ __forceinline__ u64 start(const Strided<T>& heads, u64 batch, u64 head) {
    return batch * heads.strides[0] + head * heads.strides[1];
}

// The magnitude as an integer of the same order, in which what is no number is larger than all numbers.
__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// How many of something there are to a bound; none to a bound of zero, which only zeros have.
__device__ __forceinline__ float to_bound(float many, float bound) {
    return bound == 0.0f ? 0.0f : bound < INFINITY ? fminf(many / bound, 1e37f) : bound - bound;
}

// channels[unit, d] = maxₙ|K[n, d]|, values[unit] = maxₙ|V[n]|², both as integers, of zeroed memory. Grid: some, kv heads, batches.
extern "C" __global__ void bounds(
    const __grid_constant__ Heads k, const __grid_constant__ Heads v, u32 keys, u32 dim, u32* channels, u32* values
) {
    __shared__ u32 largest[CHANNELS + 1];
    u32 unit = blockIdx.z * gridDim.y + blockIdx.y, lane = threadIdx.x % LANES, rows = blockDim.x / LANES;
    for (u32 i = threadIdx.x; i <= CHANNELS; i += blockDim.x) largest[i] = 0;
    __syncthreads();
    u32 own[8] = {}, longest = 0;
    // All lanes of a warp take as many turns, so that they can add.
    for (u64 base = u64(blockIdx.x) * rows; base < keys; base += u64(gridDim.x) * rows) {
        u64 row = base + threadIdx.x / LANES;
        float squares = 0.0f;
        if (row < keys && lane * 8 < dim) {
            Pack<REAL> key = load8(k.at + start(k, blockIdx.z, blockIdx.y) + row * k.strides[2] + lane * 8);
            Pack<REAL> value = load8(v.at + start(v, blockIdx.z, blockIdx.y) + row * v.strides[2] + lane * 8);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                own[j] = max(own[j], magnitude(widen(key.v[j])));
                squares += widen(value.v[j]) * widen(value.v[j]);
            }
        }
        for (int step = LANES / 2; step > 0; step >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, step);
        longest = max(longest, magnitude(squares));
    }
    #pragma unroll
    for (int j = 0; j < 8; j++) atomicMax(&largest[lane * 8 + j], own[j]);
    atomicMax(&largest[CHANNELS], longest);
    __syncthreads();
    for (u32 i = threadIdx.x; i < CHANNELS; i += blockDim.x) atomicMax(&channels[unit * CHANNELS + i], largest[i]);
    if (threadIdx.x == 0) atomicMax(&values[unit], largest[CHANNELS]);
}

// Of each row: the log-sum-exp in bits, δ = dO · O, and how many integers there are to a unit of its gradient but for the channel's
// share. Also zeros the sums, and turns the channels' bounds into integers to a unit. Grid: padded / BLOCK_M, heads, batches.
extern "C" __global__ void rows(
    const __grid_constant__ Heads out, const __grid_constant__ Heads dout, const float* logsumexp, u32 queries, u32 dim, u32 group,
    const u32* values, float* channels, float* bits, float* delta, float* steps, int* dq
) {
    u32 lane = threadIdx.x % LANES, unit = blockIdx.z * (gridDim.y / group) + blockIdx.y / group;
    u64 head = u64(blockIdx.z) * gridDim.y + blockIdx.y, padded = u64(gridDim.x) * BLOCK_M;
    float longest = sqrtf(__uint_as_float(values[unit]));
    if (blockIdx.x == 0 && blockIdx.y % group == 0 && threadIdx.x < CHANNELS) {
        float& own = channels[unit * CHANNELS + threadIdx.x];
        own = to_bound(2147483648.0f, own);
    }
    for (u32 i = threadIdx.x; i < BLOCK_M * CHANNELS / 4; i += blockDim.x)
        ((int4*)(dq + (head * padded + blockIdx.x * BLOCK_M) * CHANNELS))[i] = make_int4(0, 0, 0, 0);
    for (u32 r = threadIdx.x / LANES; r < BLOCK_M; r += blockDim.x / LANES) {
        u64 row = u64(blockIdx.x) * BLOCK_M + r;
        float sum = 0.0f, squares = 0.0f;
        if (row < queries && lane * 8 < dim) {
            Pack<REAL> o = load8(out.at + start(out, blockIdx.z, blockIdx.y) + row * out.strides[2] + lane * 8);
            Pack<REAL> gradient = load8(dout.at + start(dout, blockIdx.z, blockIdx.y) + row * dout.strides[2] + lane * 8);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += widen(o.v[j]) * widen(gradient.v[j]);
                squares += widen(gradient.v[j]) * widen(gradient.v[j]);
            }
        }
        for (int step = LANES / 2; step > 0; step >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
        }
        if (lane != 0) continue;
        float own = row < queries ? logsumexp[head * queries + row] : INFINITY;
        // A row that sees nothing has no probabilities.
        bool sees = row < queries && own != -INFINITY;
        u64 at = head * padded + row;
        bits[at] = sees ? own * 1.4426950408889634f : INFINITY;
        delta[at] = sum;
        // 2, and room for what was rounded on the way.
        steps[at] = row >= queries ? 0.0f : own < INFINITY ? to_bound(1.0f, 2.05f * sqrtf(squares) * longest) : own - own;
    }
}

// Gradients of queries from their integers. Grid: padded / BLOCK_M, heads, batches.
extern "C" __global__ void write_queries(
    const int* dq, const float* steps, const float* channels, u32 queries, u32 dim, u32 group, float scale, const __grid_constant__ HeadsOut target
) {
    u64 head = u64(blockIdx.z) * gridDim.y + blockIdx.y, block = head * gridDim.x + blockIdx.x;
    const float* own_channels = channels + (blockIdx.z * (gridDim.y / group) + blockIdx.y / group) * CHANNELS;
    // Of the two groups of warps that made them: eights of columns, rows, warps.
    for (u32 task = threadIdx.x; task < 512; task += blockDim.x) {
        u32 eight = task % 8, g = task / 8 % 8, warp = task / 64 % 4, half = task / 256;
        const int4* from = (const int4*)(dq + (block * 2 + half) * DQ_INTEGERS) + eight * 128 + warp * 32 + g * 4;
        int4 held[4] = {from[0], from[1], from[2], from[3]};
        u32 column = (CHANNELS == 128 ? half * 64 : 0) + eight * 8, row = (CHANNELS == 64 ? half * 64 : 0) + warp * 16 + g;
        if (column >= dim) continue;
        #pragma unroll
        for (int low = 0; low < 2; low++) {
            u64 query = u64(blockIdx.x) * BLOCK_M + row + low * 8;
            if (query >= queries) continue;
            float step = steps[head * gridDim.x * BLOCK_M + query], values[8];
            float unit = step == 0.0f ? 0.0f : scale / step;
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                const int4& four = held[j / 2];
                int sum = low ? (j % 2 ? four.w : four.z) : (j % 2 ? four.y : four.x);
                float channel = own_channels[column + j];
                values[j] = channel == 0.0f ? 0.0f : float(sum) / channel * unit;
            }
            store8(target.at + start(target, blockIdx.z, blockIdx.y) + query * target.strides[2] + column, narrow8<REAL>(values));
        }
    }
}

// Gradients of keys or values from the parts that shares of their heads left, `[shares, batch · kv_heads, keys, dim]`.
extern "C" __global__ void write_keys(
    const float* parts, u32 shares, u32 batches, u32 kv_heads, u32 keys, u32 dim, const __grid_constant__ HeadsOut target
) {
    u64 eights = dim / 8, count = u64(batches) * kv_heads * keys * eights;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        Pack<float> sum = load8(parts + i * 8);
        for (u32 share = 1; share < shares; share++) {
            Pack<float> more = load8(parts + (share * count + i) * 8);
            #pragma unroll
            for (int j = 0; j < 8; j++) sum.v[j] += more.v[j];
        }
        u64 eight = i % eights, key = i / eights % keys, head = i / (eights * keys);
        store8(target.at + start(target, head / kv_heads, head % kv_heads) + key * target.strides[2] + eight * 8, narrow8<REAL>(sum.v));
    }
}
