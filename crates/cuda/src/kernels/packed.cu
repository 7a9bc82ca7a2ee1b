// Products with weights of few bits. See `tensor/src/packed.rs` for how they lie: for sixteen outputs and a block of 32 inputs,
// lines of 64 bytes, each four neighbours along the inputs for every output, and sixteen scales.
//
// Few rows of x are rounded to eight bits too, each block with a scale of its own. A block of a weight by a block of eight rows is
// then one instruction of the tensor cores, whose result the scales multiply. For many rows the weight is widened first.

// Blocks whose weights a warp has under way before the kernels that make x have ended.
#define HELD 4
#define ROWS (8 * CHUNKS)

#if BITS == 4
#define LINES 4
#else
#define LINES 8
#endif

#if BITS == 1
#define TOP 448.0f
#else
#define TOP 127.0f
#endif

// Bytes between rows in eight bits: a quarter of the banks more than whole blocks, so that eight rows lie in different ones.
__device__ __forceinline__ u32 row_bytes(u32 blocks) { return blocks * BLOCK + 16; }

// One over the root of a row's mean square, known to all threads of a block. As many sum as the smallest block has, so that a row has
// the same bits in every kernel.
__device__ __forceinline__ float inverse_rms(const REAL* row, u32 inputs, float eps) {
    float sum = 0.0f;
    for (u32 at = threadIdx.x * 8; threadIdx.x < 256 && at < inputs; at += 256 * 8) {
        Pack<REAL> own = load8(row + at);
        #pragma unroll
        for (int j = 0; j < 8; j++) sum += widen(own.v[j]) * widen(own.v[j]);
    }
    return rsqrtf(block_sum(sum) / inputs + eps);
}

// A row in eight bits, and its scales: four threads of a block of threads per block of the row. With a gain it is normed first, by
// its root mean square; that multiplies the scales alone.
__device__ __forceinline__ void round_row(const REAL* x, const REAL* gain, float eps, u32 blocks, u8* values, float* scales) {
    float norm = gain ? inverse_rms(x, blocks * BLOCK, eps) : 1.0f;
    for (u32 at = threadIdx.x; at < blocks * 4; at += blockDim.x) {
        u32 block = at / 4, quarter = at & 3;
        // Threads of a warp leave together, since blocks are whole fours.
        u32 active = __activemask();
        Pack<REAL> own = load8(x + block * BLOCK + quarter * 8), gains;
        if (gain) gains = load8(gain + block * BLOCK + quarter * 8);
        float wide[8], largest = 0.0f;
        bool finite = true;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            wide[j] = gain ? widen(own.v[j]) * widen(gains.v[j]) : widen(own.v[j]);
            largest = fmaxf(largest, fabsf(wide[j]));
            finite = finite && fabsf(wide[j]) < INFINITY;
        }
        float flag = finite ? 0.0f : 1.0f;
        #pragma unroll
        for (int step = 1; step < 4; step <<= 1) {
            largest = fmaxf(largest, __shfl_xor_sync(active, largest, step));
            flag += __shfl_xor_sync(active, flag, step);
        }
        finite = flag == 0.0f;
        float inverse = largest > 0.0f && finite ? TOP / largest : 0.0f;
        u32 words[2] = {0, 0};
        #pragma unroll
        for (int j = 0; j < 8; j += 2) {
            float low = wide[j] * inverse, high = wide[j + 1] * inverse;
#if BITS == 1
            u16 pair;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
            words[j / 4] |= u32(pair) << (j % 4 * 8);
#else
            u32 first = (u32)(int)rintf(fminf(fmaxf(low, -TOP), TOP)) & 0xff;
            u32 second = (u32)(int)rintf(fminf(fmaxf(high, -TOP), TOP)) & 0xff;
            words[j / 4] |= (first | second << 8) << (j % 4 * 8);
#endif
        }
        *(uint2*)(values + block * BLOCK + quarter * 8) = uint2{words[0], words[1]};
        if (quarter == 0) scales[block] = finite ? largest / TOP * norm : __int_as_float(0x7fffffff);
    }
}

// What a product is made of beside weights. The rows are normed first where there is a gain; `gated`: the first of two weights gates
// the second, and the result is the first's; it is added to `residual` where there is one.
struct Rows { const REAL *x, *gain, *residual; const u8* prepared; u32 blocks, rows; float eps; int activation, gated, unused; };

// Rows in eight bits once for all blocks of threads that read them, as these place them: a block of threads for each.
extern "C" __global__ void prepare_rows(const __grid_constant__ Rows r, u8* prepared) {
    let_next_start();
    wait_for_earlier();
    u32 row = blockIdx.x;
    float* scales = (float*)(prepared + ROWS * row_bytes(r.blocks));
    round_row(r.x + (u64)row * r.blocks * BLOCK, r.gain, r.eps, r.blocks, prepared + row * row_bytes(r.blocks), scales + row * r.blocks);
}

// What a thread has of a block of the weight: outputs 2·(lane / 4) and the next, inputs 4·(lane % 4) and those 16 further on.
struct Part {
#if BITS == 4
    uint2 both;
#else
    uint2 low, high;
#endif
    u32 scales;
};

__device__ __forceinline__ Part part_of(const u8* lines, const u16* scales, u64 block, int lane) {
    Part part;
    const u8* own = lines + block * (LINES * 64) + (lane & 3) * 64 + (lane >> 2) * 8;
#if BITS == 4
    part.both = *(const uint2*)own;
#else
    part.low = *(const uint2*)own;
    part.high = *(const uint2*)(own + 4 * 64);
#endif
    part.scales = *(const u32*)(scales + block * 16 + (lane >> 2) * 2);
    return part;
}

// Four values of 0 to 15 as signed bytes around zero.
__device__ __forceinline__ u32 around_zero(u32 nibbles) { return ((nibbles & 0x0f0f0f0fu) + 0x78787878u) ^ 0x80808080u; }

__device__ __forceinline__ void multiply(const Part& part, u32 x0, u32 x1, float* result) {
#if BITS == 4
    u32 a0 = around_zero(part.both.x), a1 = around_zero(part.both.y);
    u32 a2 = around_zero(part.both.x >> 4), a3 = around_zero(part.both.y >> 4);
#elif BITS == 8
    u32 a0 = part.low.x ^ 0x80808080u, a1 = part.low.y ^ 0x80808080u;
    u32 a2 = part.high.x ^ 0x80808080u, a3 = part.high.y ^ 0x80808080u;
#else
    u32 a0 = part.low.x, a1 = part.low.y, a2 = part.high.x, a3 = part.high.y;
#endif
#if BITS == 1
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(result[0]), "=f"(result[1]), "=f"(result[2]), "=f"(result[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x0), "r"(x1), "f"(0.0f));
#else
    int whole[4];
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(whole[0]), "=r"(whole[1]), "=r"(whole[2]), "=r"(whole[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(x0), "r"(x1), "r"(0));
    #pragma unroll
    for (int i = 0; i < 4; i++) result[i] = float(whole[i]);
#endif
}

// Up to three weights for the same rows. `ends`: the groups of sixteen outputs of the first, of the first two, of all.
struct Sides { const u8* lines[MOST_SIDES]; const u16* scales[MOST_SIDES]; const REAL* bias[MOST_SIDES]; REAL* y[MOST_SIDES]; u64 outputs[MOST_SIDES]; u64 ends[MOST_SIDES]; };

// y = f(x·Wᵀ + b): a block of threads per sixteen outputs; its warps share the inputs out among them. Of a gated pair, half of the
// warps are each weight's.
extern "C" __global__ void __launch_bounds__(32 * WARPS) packed_product(const __grid_constant__ Sides sides, const __grid_constant__ Rows r) {
    u32 blocks = r.blocks, rows = r.rows;
    __shared__ float parts[WARPS][ROWS * 16];
    extern __shared__ __align__(16) u8 rounded[];
    u8* values = rounded;
    float* row_scales = (float*)(rounded + ROWS * row_bytes(blocks));
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, four = lane & 3, pair = lane >> 2;
    int warps = blockDim.x / 32, sharing = r.gated ? warps / 2 : warps, member = warp % sharing;
    int side = r.gated ? warp / sharing : blockIdx.x < sides.ends[0] ? 0 : blockIdx.x < sides.ends[1] ? 1 : 2;
    u64 group = blockIdx.x - (side && !r.gated ? sides.ends[side - 1] : 0);
    const u8* own_lines = sides.lines[side] + group * blocks * (LINES * 64);
    const u16* own_scales = sides.scales[side] + group * blocks * 16;
    Part held[HELD];
    let_next_start();
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        u32 block = member + h * sharing;
        if (block < blocks) held[h] = part_of(own_lines, own_scales, block, lane);
    }
    wait_for_earlier();
    if (r.prepared) {
        u32 bytes = ROWS * (row_bytes(blocks) + blocks * 4);
        #pragma unroll 4
        for (u32 at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) *(uint4*)(rounded + at) = *(const uint4*)(r.prepared + at);
    } else {
        for (u32 row = 0; row < rows; row++)
            round_row(r.x + (u64)row * blocks * BLOCK, r.gain, r.eps, blocks, values + row * row_bytes(blocks), row_scales + row * blocks);
    }
    __syncthreads();
    float sums[CHUNKS][4] = {};
    auto take = [&](const Part& part, u32 block) {
        u16 low = (u16)part.scales, high = (u16)(part.scales >> 16);
        float even = widen(f16{low}), odd = widen(f16{high});
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            u32 row = chunk * 8 + pair, left = chunk * 8 + 2 * four;
            // What lies behind the last row is multiplied too, and goes nowhere: columns of a result know nothing of each other.
            const u8* own = values + row * row_bytes(blocks) + block * BLOCK + four * 4;
            float result[4];
            multiply(part, *(const u32*)own, *(const u32*)(own + 16), result);
            float left_scale = row_scales[left * blocks + block], right_scale = row_scales[(left + 1) * blocks + block];
            sums[chunk][0] += even * left_scale * result[0];
            sums[chunk][1] += even * right_scale * result[1];
            sums[chunk][2] += odd * left_scale * result[2];
            sums[chunk][3] += odd * right_scale * result[3];
        }
    };
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        u32 block = member + h * sharing;
        if (block < blocks) take(held[h], block);
    }
    #pragma unroll 4
    for (u32 block = member + HELD * sharing; block < blocks; block += sharing) take(part_of(own_lines, own_scales, block, lane), block);
    #pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        float* own = parts[warp] + (chunk * 8 + 2 * four) * 16 + 2 * pair;
        own[0] = sums[chunk][0];
        own[16] = sums[chunk][1];
        own[1] = sums[chunk][2];
        own[17] = sums[chunk][3];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * 16; at += blockDim.x) {
        int to = r.gated ? 0 : side;
        u64 row = at / 16, column = group * 16 + at % 16, outputs = sides.outputs[to], place = row * outputs + column;
        if (row >= rows || column >= outputs) continue;
        auto sum_of = [&](int first, int of) {
            float sum = 0.0f;
            for (int part = 0; part < sharing; part++) sum += parts[first + part][at];
            return sides.bias[of] ? sum + widen(sides.bias[of][column]) : sum;
        };
        float value = sum_of(0, to);
        if (r.activation >= 0) value = apply(r.activation, value, 0, 0);
        if (r.gated) value *= sum_of(sharing, 1);
        if (r.residual) value += widen(r.residual[place]);
        sides.y[to][place] = narrow<REAL>(value);
    }
}

__device__ __forceinline__ float float8(u32 value) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)value));
    return widen(f16{(u16)halves});
}

// The weight in full, [outputs, inputs]: a warp per sixteen outputs and block.
extern "C" __global__ void widen_weight(u64 outputs, u64 blocks, const u8* lines, const u16* scales, REAL* weight) {
    u64 at = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x & 31, four = lane & 3;
    let_next_start();
    wait_for_earlier();
    if (at >= (outputs + 15) / 16 * blocks) return;
    Part part = part_of(lines, scales, at, lane);
    u64 row = at / blocks * 16 + (lane >> 2) * 2, column = at % blocks * BLOCK + four * 4;
    #pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        if (row + odd >= outputs) break;
        u16 bits = (u16)(odd ? part.scales >> 16 : part.scales);
        float scale = widen(f16{bits});
        #pragma unroll
        for (int half = 0; half < 2; half++) {
#if BITS == 4
            u32 word = around_zero((odd ? part.both.y : part.both.x) >> (half * 4));
#elif BITS == 8
            u32 word = (odd ? half ? part.high.y : part.low.y : half ? part.high.x : part.low.x) ^ 0x80808080u;
#else
            u32 word = odd ? half ? part.high.y : part.low.y : half ? part.high.x : part.low.x;
#endif
            struct alignas(4 * sizeof(REAL)) Four { REAL v[4]; } out;
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 byte = word >> (8 * j) & 0xff;
#if BITS == 1
                out.v[j] = narrow<REAL>(scale * float8(byte));
#else
                out.v[j] = narrow<REAL>(scale * float((int)(signed char)byte));
#endif
            }
            *(Four*)(weight + (row + odd) * (blocks * BLOCK) + column + half * 16) = out;
        }
    }
}
