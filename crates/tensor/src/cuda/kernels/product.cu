// Products with few rows on the left, as in decoding: reading the weight is all that takes time. ROWS rows of x at once.

// `at` is the place in the result, `column` that in the bias; the value before the activation is kept where it is wanted.
__device__ __forceinline__ void finish(float sum, const REAL* bias, u64 column, int activation, REAL* y, REAL* before, u64 at) {
    if (bias) sum += widen(bias[column]);
    if (before) before[at] = narrow<REAL>(sum);
    y[at] = narrow<REAL>(activation < 0 ? sum : apply(activation, sum, 0, 0));
}

// y = x·Wᵀ, W [outputs, inputs]: a warp per output.
extern "C" __global__ void few_rows_out_in(u64 outputs, u64 inputs, const REAL* x, const REAL* w, const REAL* bias, REAL* y, REAL* before, int activation) {
    int lane = threadIdx.x & 31;
    u64 column = blockIdx.x * (u64)(blockDim.x >> 5) + (threadIdx.x >> 5);
    if (column >= outputs) return;
    float sums[ROWS] = {};
    #pragma unroll 4
    for (u64 i = lane * 8; i < inputs; i += 256) {
        Pack<REAL> weight = load8(w + column * inputs + i);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Pack<REAL> row = load8(x + r * inputs + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) sums[r] += widen(row.v[j]) * widen(weight.v[j]);
        }
    }
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = warp_sum(sums[r]);
        if (lane == 0) finish(sum, bias, column, activation, y, before, r * outputs + column);
    }
}

// y = x·W, W [inputs, outputs]: a block of 512 threads per 32 columns, four threads across them, 128 down the inputs.
extern "C" __global__ void few_rows_in_out(u64 outputs, u64 inputs, const REAL* x, const REAL* w, const REAL* bias, REAL* y, REAL* before, int activation) {
    __shared__ float parts[16][ROWS][32];
    int across = threadIdx.x & 3, down = threadIdx.x >> 2, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 column = blockIdx.x * 32ull + across * 8;
    float sums[ROWS][8] = {};
    if (column < outputs) {
        #pragma unroll 4
        for (u64 i = down; i < inputs; i += 128) {
            Pack<REAL> weight = load8(w + i * outputs + column);
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float value = widen(x[r * inputs + i]);
                #pragma unroll
                for (int j = 0; j < 8; j++) sums[r][j] += value * widen(weight.v[j]);
            }
        }
    }
    // Threads of a warp with the same columns are four apart.
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            for (int step = 16; step >= 4; step >>= 1) sums[r][j] += __shfl_xor_sync(0xffffffffu, sums[r][j], step);
            if (lane < 4) parts[warp][r][across * 8 + j] = sums[r][j];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * 32; at += blockDim.x) {
        u64 own = blockIdx.x * 32ull + at % 32;
        float sum = 0.0f;
        for (int part = 0; part < 16; part++) sum += parts[part][at / 32][at % 32];
        if (own < outputs) finish(sum, bias, own, activation, y, before, at / 32 * outputs + own);
    }
}
