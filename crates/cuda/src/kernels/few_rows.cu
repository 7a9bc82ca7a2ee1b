// Products with few rows on the left, as in decoding, for types of 16 bits, with what stands before and behind them in a block of a
// model: y = r + f(norm(x)·Wᵀ + b). Reading the weights is all that takes time, so nothing else may.
//
// A block of threads takes tiles of sixteen outputs. One warp has the weights brought to shared memory, stage by stage and tile by
// tile, from before the kernels that make x have ended; the others share the inputs of a stage out among them, 32 at a time, by
// tensor cores. The weight is the left operand and the rows of x are its columns. Which inputs a lane holds is chosen so that it
// loads sixteen bytes at once: their order does not matter to a sum.
//
// Legend: g lane / 4, c lane % 4: a lane holds weights of outputs g and g + 8 and values of row g of x, sums of rows 2c and 2c + 1.

#if HALF == 1
#define KIND "bf16"
#else
#define KIND "f16"
#endif
#define STEP 32      // inputs of one turn of a warp
#if TILES == 1
#define PART PART_1
#define STAGES STAGES_1
#else
#define PART PART_2
#define STAGES STAGES_2
#endif
#define ROW_BYTES (PART * 2 + 64)  // half of all banks more than its values, so that neighbouring rows lie in different ones
#define STAGE_BYTES (16 * ROW_BYTES)

// Up to three weights for the same rows. `ends`: the tiles of the first, of the first two, of all. Of a gated pair, whose tiles hold
// eight outputs of each, the second has none.
struct Sides { const REAL* w[MOST_SIDES]; const REAL* bias[MOST_SIDES]; REAL* y[MOST_SIDES]; u64 outputs[MOST_SIDES]; u64 ends[MOST_SIDES]; };
// `gain`: of the root-mean-square norm of x that comes first, or null. `residual`: what the result is added to, or null.
struct Rows { const REAL *x, *gain, *residual; u64 inputs; u32 rows; float eps; int activation, gated; };

__device__ __forceinline__ void multiply(float* c, const uint4& near, const uint4& far, const uint4& x) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(near.x), "r"(far.x), "r"(near.y), "r"(far.y), "r"(x.x), "r"(x.y));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(near.z), "r"(far.z), "r"(near.w), "r"(far.w), "r"(x.z), "r"(x.w));
}

// Which weight a tile is of, and its first output.
struct Tile { int side; u64 first; };

__device__ __forceinline__ Tile tile_of(const Sides& sides, const Rows& p, u64 number) {
    int side = number < sides.ends[0] ? 0 : number < sides.ends[1] ? 1 : 2;
    return Tile{side, (number - (side ? sides.ends[side - 1] : 0)) * (p.gated ? 8 : 16)};
}

__device__ __forceinline__ void bring(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ uint4 from_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// The stages of all tiles of this block, one after the other: `full` says that one has arrived, `empty` that all are done with it.
__device__ __forceinline__ void bring_weights(const Sides& sides, const Rows& p, u32 ring, u32 full, u32 empty, int lane) {
    u32 at = 0, turn = 0;
    bool again = false;
    for (u64 number = blockIdx.x; number < sides.ends[2]; number += gridDim.x) {
        Tile tile = tile_of(sides, p, number);
        u64 outputs = sides.outputs[tile.side], own = tile.first + (p.gated ? lane % 8 : lane);
        const REAL* w = sides.w[p.gated ? lane / 8 % 2 : tile.side] + own * p.inputs;
        bool is = lane < 16 && own < outputs;
        u32 rows = __popc(__ballot_sync(0xffffffffu, is));
        for (u64 first = 0; first < p.inputs; first += PART) {
            u32 bytes = u32(p.inputs - first < PART ? p.inputs - first : PART) * 2;
            if (again) wait(empty + at * 8, turn);
            if (lane == 0) expect(full + at * 8, rows * bytes);
            __syncwarp();
            if (is) bring(ring + at * STAGE_BYTES + lane * ROW_BYTES, w + first, bytes, full + at * 8);
            if (++at == STAGES) {
                at = 0;
                turn ^= again;
                again = true;
            }
        }
    }
}

// Eight values of a row of x, or zeros where there are none.
__device__ __forceinline__ uint4 load(const REAL* from, u64 at, bool is) {
    return is && from ? *(const uint4*)(from + at) : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) few_rows(const __grid_constant__ Sides sides, const __grid_constant__ Rows p) {
    extern __shared__ __align__(128) u8 stages[];
    __shared__ float parts[2][WARPS][TILES * 128];
    __shared__ float squares[WARPS][TILES * 8];
    __shared__ u64 barriers[2 * STAGES];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    u32 ring = shared_address(stages), full = shared_address(barriers), empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            open_barrier(full + i * 8, 1);
            open_barrier(empty + i * 8, WARPS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    let_next_start();
    __syncthreads();
    if (warp == WARPS) return bring_weights(sides, p, ring, full, empty, lane);
    // Turns of a warp to a stage.
    constexpr int TURNS = PART / STEP / WARPS;
    auto is = [&](u64 first, int i) { return first + (i * WARPS + warp) * STEP + c * 8 < p.inputs; };
    const REAL* own_rows[TILES];
    uint4 x[TURNS][TILES], gain[TURNS];
    auto fetch = [&](u64 first) {
        #pragma unroll
        for (int i = 0; i < TURNS; i++) {
            u64 at = first + (i * WARPS + warp) * STEP + c * 8;
            gain[i] = load(p.gain, at, is(first, i));
            #pragma unroll
            for (int t = 0; t < TILES; t++) x[i][t] = load(own_rows[t], at, is(first, i));
        }
    };
    wait_for_earlier();
    #pragma unroll
    for (int t = 0; t < TILES; t++) own_rows[t] = t * 8 + g < p.rows ? p.x + (t * 8 + g) * p.inputs : 0;
    fetch(0);
    float square[TILES] = {};
    bool is_first = true;
    u32 at = 0, turn = 0;
    for (u64 number = blockIdx.x, odd = 0; number < sides.ends[2]; number += gridDim.x, odd ^= 1) {
        float sums[TILES][4] = {};
        for (u64 first = 0; first < p.inputs; first += PART) {
            uint4 rows[TURNS][TILES];
            #pragma unroll
            for (int i = 0; i < TURNS; i++) {
                #pragma unroll
                for (int t = 0; t < TILES; t++) {
                    rows[i][t] = x[i][t];
                    if (!p.gain) continue;
                    float scaled[8];
                    #pragma unroll
                    for (int j = 0; j < 8; j++) {
                        float value = widen(((const REAL*)&x[i][t])[j]);
                        if (is_first) square[t] += value * value;
                        scaled[j] = value * widen(((const REAL*)&gain[i])[j]);
                    }
                    *(Pack<REAL>*)&rows[i][t] = narrow8<REAL>(scaled);
                }
            }
            // Those of the next stage, or of the first of the next tile.
            if (p.inputs > PART) fetch(first + PART < p.inputs ? first + PART : 0);
            wait(full + at * 8, turn);
            #pragma unroll
            for (int i = 0; i < TURNS; i++) {
                u32 from = ring + at * STAGE_BYTES + g * ROW_BYTES + ((i * WARPS + warp) * STEP + c * 8) * 2;
                uint4 near = from_shared(from), far = from_shared(from + 8 * ROW_BYTES);
                // What lies behind the last input is anything, and nothing times that must be nothing.
                if (!is(first, i)) near = far = make_uint4(0, 0, 0, 0);
                #pragma unroll
                for (int t = 0; t < TILES; t++) multiply(sums[t], near, far, rows[i][t]);
            }
            __syncwarp();
            if (lane == 0) arrive(empty + at * 8);
            if (++at == STAGES) {
                at = 0;
                turn ^= 1;
            }
        }
        #pragma unroll
        for (int t = 0; t < TILES; t++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) parts[odd][warp][t * 128 + e * 32 + lane] = sums[t][e];
            if (is_first && p.gain) {
                square[t] += __shfl_xor_sync(0xffffffffu, square[t], 1);
                square[t] += __shfl_xor_sync(0xffffffffu, square[t], 2);
                if (c == 0) squares[warp][t * 8 + g] = square[t];
            }
        }
        // The warps that multiply. The parts of the tile after the next take the place of these, and lie behind its own wait.
        asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory");
        Tile tile = tile_of(sides, p, number);
        int own = threadIdx.x, e = own / 32 % 4, row = own / 128 * 8 + c * 2 + e % 2;
        u64 output = tile.first + g + (e / 2) * 8;
        if (own < TILES * 128 && row < p.rows && (!p.gated || e < 2) && output < sides.outputs[tile.side]) {
            float scale = 1.0f;
            if (p.gain) {
                float total = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) total += squares[w][row];
                scale = rsqrtf(total / float(p.inputs) + p.eps);
            }
            auto sum_of = [&](int place, const REAL* bias) {
                float sum = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) sum += parts[odd][w][place];
                sum *= scale;
                return bias ? sum + widen(bias[output]) : sum;
            };
            float value = sum_of(own, sides.bias[tile.side]);
            if (p.gated) {
                // As separate kernels leave it: each of the two rounded.
                float other = widen(narrow<REAL>(sum_of(own + 64, sides.bias[1])));
                value = apply(p.activation, widen(narrow<REAL>(value)), 0, 0) * other;
            } else if (p.activation >= 0) {
                value = apply(p.activation, widen(narrow<REAL>(value)), 0, 0);
            }
            u64 place = row * sides.outputs[tile.side] + output;
            if (p.residual) value = widen(narrow<REAL>(value)) + widen(p.residual[place]);
            sides.y[tile.side][place] = narrow<REAL>(value);
        }
        is_first = false;
    }
}
