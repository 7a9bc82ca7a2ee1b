// Products with few rows on the left, as in decoding: reading the weight is all that takes time. ROWS rows of x at once.

// `at` is the place in the result, `column` that in the bias; the value before the activation is kept where it is wanted.
__device__ __forceinline__ void finish(float sum, const REAL* bias, u64 column, int activation, REAL* y, REAL* before, u64 at) {
    if (bias) sum += widen(bias[column]);
    if (before) before[at] = narrow<REAL>(sum);
    y[at] = narrow<REAL>(activation < 0 ? sum : apply(activation, sum, 0, 0));
}

#define HELD 6  // packs of the weight that a thread has under way before the kernels that make x have ended

// Up to three weights for the same rows. `ends`: the columns of the first, of the first two, of all.
struct Sides { const REAL* w[MOST_SIDES]; const REAL* bias[MOST_SIDES]; REAL* y[MOST_SIDES]; u64 ends[MOST_SIDES]; };

// y = x·Wᵀ, W [outputs, inputs]: a warp per output.
extern "C" __global__ void few_rows_out_in(const __grid_constant__ Sides sides, u64 inputs, const REAL* x, REAL* before, int activation) {
    int lane = threadIdx.x & 31;
    u64 all = blockIdx.x * (u64)(blockDim.x >> 5) + (threadIdx.x >> 5);
    int side = all < sides.ends[0] ? 0 : all < sides.ends[1] ? 1 : 2;
    u64 first = side ? sides.ends[side - 1] : 0, outputs = sides.ends[side] - first, column = all - first;
    const REAL* bias = sides.bias[side];
    REAL* y = sides.y[side];
    const REAL* own = sides.w[side] + (column < outputs ? column : 0) * inputs;
    Pack<REAL> held[HELD];
    let_next_start();
    #pragma unroll
    for (int h = 0; h < HELD; h++) if (lane * 8 + h * 256 < inputs) held[h] = load8(own + lane * 8 + h * 256);
    wait_for_earlier();
    if (column >= outputs) return;
    float sums[ROWS] = {};
    auto take = [&](const Pack<REAL>& weight, u64 i) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            Pack<REAL> row = load8(x + r * inputs + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) sums[r] += widen(row.v[j]) * widen(weight.v[j]);
        }
    };
    #pragma unroll
    for (int h = 0; h < HELD; h++) if (lane * 8 + h * 256 < inputs) take(held[h], lane * 8 + h * 256);
    #pragma unroll 4
    for (u64 i = lane * 8 + HELD * 256; i < inputs; i += 256) take(load8(own + i), i);
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = warp_sum(sums[r]);
        if (lane == 0) finish(sum, bias, column, activation, y, before, r * outputs + column);
    }
}

// y = x·W, W [inputs, outputs]: a block of 512 threads per 8·ACROSS columns, ACROSS threads along them, the others down the
// inputs.
#define DOWN (512 / ACROSS)
extern "C" __global__ void few_rows_in_out(u64 outputs, u64 inputs, const REAL* x, const REAL* w, const REAL* bias, REAL* y, REAL* before, int activation) {
    __shared__ float parts[16][ROWS][8 * ACROSS];
    int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 column = blockIdx.x * (8ull * ACROSS) + across * 8;
    u64 rows = column < outputs ? inputs : 0;
    Pack<REAL> held[HELD];
    let_next_start();
    #pragma unroll
    for (int h = 0; h < HELD; h++) if (down + h * DOWN < rows) held[h] = load8(w + (down + h * DOWN) * outputs + column);
    wait_for_earlier();
    float sums[ROWS][8] = {};
    auto take = [&](const Pack<REAL>& weight, u64 i) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float value = widen(x[r * inputs + i]);
            #pragma unroll
            for (int j = 0; j < 8; j++) sums[r][j] += value * widen(weight.v[j]);
        }
    };
    #pragma unroll
    for (int h = 0; h < HELD; h++) if (down + h * DOWN < rows) take(held[h], down + h * DOWN);
    #pragma unroll 4
    for (u64 i = down + HELD * DOWN; i < rows; i += DOWN) take(load8(w + i * outputs + column), i);
    // Threads of a warp with the same columns are ACROSS apart.
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            #pragma unroll
            for (int step = 16; step >= ACROSS; step >>= 1) sums[r][j] += __shfl_xor_sync(0xffffffffu, sums[r][j], step);
            if (lane < ACROSS) parts[warp][r][across * 8 + j] = sums[r][j];
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * 8 * ACROSS; at += blockDim.x) {
        int row = at / (8 * ACROSS), place = at % (8 * ACROSS);
        u64 own = blockIdx.x * (8ull * ACROSS) + place;
        float sum = 0.0f;
        #pragma unroll
        for (int part = 0; part < 16; part++) sum += parts[part][row][place];
        if (own < outputs) finish(sum, bias, own, activation, y, before, row * outputs + own);
    }
}
