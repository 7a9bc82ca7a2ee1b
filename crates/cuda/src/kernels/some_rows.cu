// Products with some rows on the left, as when many texts are decoded together, for types of 16 bits on Hopper:
// y = r + f(x·Wᵀ + b). Reading the weights is most of what takes time.
//
// A block of threads takes a tile of 128 outputs for all rows: the weight is the left operand of the tensor cores' instruction, rows
// of x are its columns, and each of two teams of four warps has half of the outputs. One thread has both operands brought to shared
// memory, 64 inputs at a time, the weights from before the kernels that make x have ended. Where a weight has few tiles, four
// neighbouring blocks share the inputs of one and add up what each has found, always in the same order. Which of these it is does
// not depend on the number of rows, so a row has the same bits alone and in company.
//
// ROOM: blocks that a multiprocessor holds.
// Legend: n a row of x, o an output of the tile. Of a gated pair a tile holds 64 of each.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define NAME_OF_bf16 "bf16"
#define NAME_OF_f16 "f16"
#define JOIN(a, b) a##b
#define NAME_OF(real) JOIN(NAME_OF_, real)
#define KIND NAME_OF(REAL)
#define WEIGHT_BYTES (OUTPUTS * PART * 2)
#define STAGE_BYTES (WEIGHT_BYTES + ROWS * PART * 2)
#if ROOM == 1
#define SPLIT 4
#define STAGES 8
#elif ROOM == 2
#define SPLIT 1
#define STAGES (110000 / STAGE_BYTES)
#else
#define SPLIT 4
#define STAGES (74000 / STAGE_BYTES)
#endif
#define PITCH (OUTPUTS + 4)                           // of a row of sums, so that neighbouring rows begin in different banks

// How a matrix lies in memory, as the copying unit reads it (cuTensorMapEncodeTiled).
struct __align__(64) Map { u64 words[16]; };
// Up to three weights for the same rows. `ends`: the tiles of the first, of the first two, of all.
struct Sides { Map w[MOST_SIDES]; const REAL* bias[MOST_SIDES]; REAL* y[MOST_SIDES]; u64 outputs[MOST_SIDES]; u64 ends[MOST_SIDES]; };
struct Rows { Map x; const REAL* residual; u64 inputs; u32 rows; int activation, gated; };

// A box of 64 inputs by the map's number of rows.
__device__ __forceinline__ void bring(u32 to, const Map& map, u64 input, u64 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(int(input)), "r"(int(row)), "r"(barrier) : "memory");
}

// How the instruction finds an operand: eight rows of 128 bytes, whose chunks are shuffled, lie together.
__device__ __forceinline__ u64 described(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
__device__ __forceinline__ void multiply(float* d, u64 w, u64 x) {
    asm volatile("{.reg .pred added; setp.ne.u32 added, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." KIND "." KIND
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, added, 1, 1, 0, 0;}"
                 : F16(0) : "l"(w), "l"(x));
}

__device__ __forceinline__ void meet_neighbours() {
#if SPLIT > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Four sums that a neighbour has found.
__device__ __forceinline__ float4 of_neighbour(u32 at, u32 neighbour) {
    float4 v;
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(neighbour) : "memory");
    return v;
}

// Stages in shared memory. `full` says that one has arrived, `empty` that both teams are done with it.
struct Ring {
    u32 start, full, empty;
    __device__ __forceinline__ u32 place(u32 i) const { return start + i % STAGES * STAGE_BYTES; }
    __device__ __forceinline__ u32 arrived(u32 i) const { return full + i % STAGES * 8; }
    __device__ __forceinline__ u32 released(u32 i) const { return empty + i % STAGES * 8; }
    __device__ __forceinline__ u32 turn(u32 i) const { return i / STAGES & 1; }
};

// All parts of this block's inputs, one after the other.
__device__ __forceinline__ void bring_all(const Sides& sides, const Rows& p, int side, u64 output, u32 first, u32 count, const Ring& ring) {
    const Map &near = sides.w[side], &far = p.gated ? sides.w[1] : near;
    auto weights = [&](u32 i) {
        expect(ring.arrived(i), STAGE_BYTES);
        bring(ring.place(i), near, (first + i) * PART, output, ring.arrived(i));
        bring(ring.place(i) + WEIGHT_BYTES / 2, far, (first + i) * PART, p.gated ? output : output + OUTPUTS / 2, ring.arrived(i));
    };
    auto rows = [&](u32 i) { bring(ring.place(i) + WEIGHT_BYTES, p.x, (first + i) * PART, 0, ring.arrived(i)); };
    u32 early = count < STAGES ? count : STAGES;
    for (u32 i = 0; i < early; i++) weights(i);
    wait_for_earlier();
    for (u32 i = 0; i < early; i++) rows(i);
    for (u32 i = early; i < count; i++) {
        wait(ring.released(i), ring.turn(i - STAGES));
        weights(i);
        rows(i);
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(288) some_rows(const __grid_constant__ Sides sides, const __grid_constant__ Rows p) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * STAGES];
    u32 start = (shared_address(memory) + 1023) & ~1023u, opened = shared_address(barriers);
    const Ring ring{start, opened, opened + STAGES * 8};
    int team = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            open_barrier(ring.arrived(i), 1);
            open_barrier(ring.released(i), 2);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    let_next_start();
    __syncthreads();
    u64 number = blockIdx.x / SPLIT;
    u32 own = blockIdx.x % SPLIT;
    int side = number < sides.ends[0] ? 0 : number < sides.ends[1] ? 1 : 2;
    u64 output = (number - (side ? sides.ends[side - 1] : 0)) * (p.gated ? OUTPUTS / 2 : OUTPUTS);
    u32 parts = u32((p.inputs + PART - 1) / PART), first = parts * own / SPLIT, count = parts * (own + 1) / SPLIT - first;
    u32 sums = start;
    if (team == 2) {
        if (lane == 0) bring_all(sides, p, side, output, first, count, ring);
        __syncwarp();
    } else {
        float d[ROWS / 2];
        #pragma unroll
        for (int i = 0; i < ROWS / 2; i++) d[i] = 0.0f;
        for (u32 i = 0; i < count; i++) {
            wait(ring.arrived(i), ring.turn(i));
            u32 w = ring.place(i) + team * (WEIGHT_BYTES / 2), x = ring.place(i) + WEIGHT_BYTES;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int k = 0; k < PART / 16; k++) multiply(d, described(w + k * 32), described(x + k * 32));
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
            // The part before has been multiplied.
            if (i > 0 && threadIdx.x % 128 == 0) arrive(ring.released(i - 1));
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // All stages have been read, by both teams: sums take their place.
        asm volatile("bar.sync 1, %0;" :: "n"(256) : "memory");
        #pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            u32 n = i / 4 * 8 + lane % 4 * 2 + i % 2, o = team * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            asm volatile("st.shared.f32 [%0], %1;" :: "r"(sums + (n * PITCH + o) * 4), "f"(d[i]) : "memory");
        }
        asm volatile("bar.sync 1, %0;" :: "n"(256) : "memory");
        wait_for_earlier();
    }
    meet_neighbours();
    if (team < 2) {
        // Each of the neighbours finishes some of the rows, four outputs a thread.
        constexpr int FOURS = OUTPUTS / 4, SHARE = (ROWS + SPLIT - 1) / SPLIT;
        auto sum_of = [&](u32 at) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            #pragma unroll
            for (int s = 0; s < SPLIT; s++) {
                float4 more = of_neighbour(at, s);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            return sum;
        };
        for (int place = threadIdx.x; place < SHARE * FOURS; place += 256) {
            u32 n = own * SHARE + place / FOURS, o = place % FOURS * 4;
            u64 column = output + o, outputs = sides.outputs[side];
            if (n >= p.rows || column >= outputs || (p.gated && o >= OUTPUTS / 2)) continue;
            u32 at = sums + (n * PITCH + o) * 4;
            float4 near = sum_of(at), far = near;
            if (p.gated) far = sum_of(at + OUTPUTS / 2 * 4);
            float values[4] = {near.x, near.y, near.z, near.w}, others[4] = {far.x, far.y, far.z, far.w};
            u64 to = n * outputs + column;
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                if (sides.bias[side]) values[j] += widen(sides.bias[side][column + j]);
                if (p.gated) {
                    // As separate kernels leave it: each of the two rounded.
                    if (sides.bias[1]) others[j] += widen(sides.bias[1][column + j]);
                    values[j] = apply(p.activation, widen(narrow<REAL>(values[j])), 0, 0) * widen(narrow<REAL>(others[j]));
                } else if (p.activation >= 0) {
                    values[j] = apply(p.activation, widen(narrow<REAL>(values[j])), 0, 0);
                }
                if (p.residual) values[j] = widen(narrow<REAL>(values[j])) + widen(p.residual[to + j]);
            }
            REAL four[4] = {narrow<REAL>(values[0]), narrow<REAL>(values[1]), narrow<REAL>(values[2]), narrow<REAL>(values[3])};
            *(uint2*)(sides.y[side] + to) = *(const uint2*)four;
        }
    }
    // Nobody leaves while a neighbour reads its sums.
    meet_neighbours();
}
#endif
