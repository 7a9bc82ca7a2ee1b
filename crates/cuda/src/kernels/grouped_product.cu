// Products of rows that are sorted by group with the matrix of each group. How many rows a group has is read on the device:
// a plan of tiles is made there, and blocks that got none end at once.
//
// 16-bit types whose sizes are multiples of 8 go through the tensor cores, in tiles of 128 × 128 with sums in f32, on Hopper by its
// own instruction; all else through a plain kernel with tiles of 64 × 64. The order of sums depends on the sizes alone.

struct Places { u64 at[MOST]; };
struct Tile { int group, row, end, unused; };

// One block: of each group where its rows begin (`groups + 1`), and all tiles of `tile_rows` rows; -1 behind the last.
extern "C" __global__ void plan_tiles(u64 groups, u64 rows, u64 tile_rows, u64 most_tiles, const i64* counts, int* starts, Tile* tiles) {
    __shared__ u64 used;
    if (threadIdx.x == 0) {
        u64 next = 0, tile = 0;
        for (u64 g = 0; g < groups; g++) {
            starts[g] = int(next);
            u64 count = counts[g] < 0 ? 0 : u64(counts[g]);
            u64 end = next + count < rows ? next + count : rows;
            for (; next < end; next += tile_rows) {
                tiles[tile++] = Tile{int(g), int(next), int(end < next + tile_rows ? end : next + tile_rows), 0};
            }
            next = end;
        }
        starts[groups] = int(next);
        used = tile;
    }
    __syncthreads();
    for (u64 t = used + threadIdx.x; t < most_tiles; t += blockDim.x) tiles[t] = Tile{-1, 0, 0, 0};
}

// Rows behind the last group are zero in every result.
extern "C" __global__ void zero_tail(u64 groups, u64 rows, u64 width, const int* starts, REAL* c) {
    u64 first = u64(starts[groups]) * width, last = rows * width;
    for (u64 i = first + blockIdx.x * (u64)blockDim.x + threadIdx.x; i < last; i += gridDim.x * (u64)blockDim.x) c[i] = narrow<REAL>(0.0f);
}

// The sum of each group's rows: a column per thread.
extern "C" __global__ void group_sums(u64 first, u64 width, const int* starts, const REAL* x, const __grid_constant__ Places targets) {
    u64 column = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    REAL* target = (REAL*)targets.at[blockIdx.y];
    if (!target || column >= width) return;
    float sum = 0.0f;
    for (int row = starts[first + blockIdx.y]; row < starts[first + blockIdx.y + 1]; row++) sum += widen(x[u64(row) * width + column]);
    target[column] = narrow<REAL>(sum);
}

// A matrix of which element (i, j) lies at i·down + j·across.
struct Strided { const REAL* at; u64 down, across; };

// c[m, n] of at most 64 × 64 = a[m, k]·b[k, n], by 256 threads.
__device__ __forceinline__ void plain_tile(u64 m, u64 n, u64 k, Strided a, Strided b, const REAL* bias, REAL* c, u64 row_stride) {
    __shared__ float left[16][65], right[16][65];
    int x = threadIdx.x & 15, y = threadIdx.x >> 4;
    float sums[4][4] = {};
    for (u64 k0 = 0; k0 < k; k0 += 16) {
        for (int i = threadIdx.x; i < 1024; i += 256) {
            // Neighbouring threads read along what is contiguous.
            u64 down = a.across == 1 ? i / 16 : i % 64, along = a.across == 1 ? i % 16 : i / 64;
            left[along][down] = down < m && k0 + along < k ? widen(a.at[down * a.down + (k0 + along) * a.across]) : 0.0f;
            down = b.across == 1 ? i % 64 : i / 16, along = b.across == 1 ? i / 64 : i % 16;
            right[along][down] = down < n && k0 + along < k ? widen(b.at[(k0 + along) * b.down + down * b.across]) : 0.0f;
        }
        __syncthreads();
        #pragma unroll
        for (int j = 0; j < 16; j++) {
            #pragma unroll
            for (int r = 0; r < 4; r++) {
                #pragma unroll
                for (int s = 0; s < 4; s++) sums[r][s] += left[j][y + 16 * r] * right[j][x + 16 * s];
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int r = 0; r < 4; r++) {
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            u64 row = y + 16 * r, column = x + 16 * s;
            if (row >= m || column >= n) continue;
            c[row * row_stride + column] = narrow<REAL>(sums[r][s] + (bias ? widen(bias[column]) : 0.0f));
        }
    }
}

__device__ __forceinline__ u64 least(u64 a, u64 b) { return a < b ? a : b; }

// A tile of `c[rows of g] = a[rows of g]·b[g]` per block; `transposed`: b[g] is stored [n, k].
extern "C" __global__ void plain_rows(u64 first, u64 n, u64 k, int transposed, const Tile* tiles, const REAL* a, const __grid_constant__ Places b, const __grid_constant__ Places bias, REAL* c) {
    Tile tile = tiles[blockIdx.y];
    i64 own = i64(tile.group) - i64(first);
    if (tile.group < 0 || own < 0 || own >= MOST) return;
    u64 column = blockIdx.x * 64ull;
    const REAL* weight = (const REAL*)b.at[own];
    const REAL* added = (const REAL*)bias.at[own];
    Strided right = transposed ? Strided{weight + column * k, 1, k} : Strided{weight + column, n, 1};
    plain_tile(tile.end - tile.row, least(n - column, 64), k, Strided{a + u64(tile.row) * k, k, 1}, right,
               added ? added + column : added, c + u64(tile.row) * n + column, n);
}

// A tile of `c[g] = left[rows of g]ᵀ·right[rows of g]` per block.
extern "C" __global__ void plain_outer(u64 first, u64 m, u64 n, const int* starts, const REAL* left, const REAL* right, const __grid_constant__ Places c) {
    REAL* target = (REAL*)c.at[blockIdx.z];
    if (!target) return;
    u64 start = starts[first + blockIdx.z], count = starts[first + blockIdx.z + 1] - start;
    u64 row = blockIdx.y * 64ull, column = blockIdx.x * 64ull;
    plain_tile(least(m - row, 64), least(n - column, 64), count, Strided{left + start * m + row, 1, m},
               Strided{right + start * n + column, n, 1}, nullptr, target + row * n + column, n);
}

#ifdef HALF
#if HALF == 1
#define KIND "bf16"
#else
#define KIND "f16"
#endif
// Tensor cores: 8 warps, each with 64 × 32 of the tile; operands come by asynchronous copies, STAGES parts of k under way.
#define OPERAND_BYTES (128 * PART * 2)

__device__ __forceinline__ void fetch16(u32 to, const REAL* from, bool is_there) {
    int bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void load_matrices(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32* to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void multiply(float* c, const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// An operand in shared memory, in chunks of 16 bytes that are shuffled so that neither copies nor loads meet in a bank. Where k
// runs along memory it is [128][PART]: 4 chunks a row; where it runs across, [PART][128]: 16 chunks a row.
template <bool ACROSS> __device__ __forceinline__ u32 chunk(u32 base, int row, int at) {
    return ACROSS ? base + row * 256 + ((at ^ (row & 7)) << 4) : base + row * 64 + ((at ^ ((row >> 1) & 3)) << 4);
}

// Brings part `k0` of an operand whose first element of the tile is `from`; what lies outside becomes zero.
template <bool ACROSS> __device__ __forceinline__ void fetch(u32 base, const REAL* from, u64 stride, u64 limit, u64 k0, u64 k) {
    #pragma unroll
    for (int i = threadIdx.x; i < 512; i += 256) {
        int row = ACROSS ? i >> 4 : i >> 2, at = ACROSS ? i & 15 : i & 3;
        bool is_there = ACROSS ? k0 + row < k && u64(at) * 8 < limit : u64(row) < limit && k0 + at * 8 < k;
        const REAL* source = ACROSS ? from + (k0 + row) * stride + at * 8 : from + row * stride + k0 + at * 8;
        fetch16(chunk<ACROSS>(base, row, at), is_there ? source : from, is_there);
    }
}

// c[m, n] of at most 128 × 128 = a·b over k. A_ACROSS: a is stored [k, m] instead of [m, k]; B_ACROSS: b [k, n] instead of [n, k].
template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void core_tile(u64 m, u64 n, u64 k, const REAL* a, u64 a_stride, const REAL* b, u64 b_stride, const REAL* bias, REAL* c, u64 row_stride) {
    extern __shared__ __align__(128) u8 parts[];
    u32 base = shared_address(parts);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int m0 = (warp & 1) * 64, n0 = (warp >> 1) * 32;
    float sums[4][4][4] = {};
    u64 count = (k + PART - 1) / PART;
    auto bring = [&](u64 part) {
        u32 at = base + u32(part % STAGES) * 2 * OPERAND_BYTES;
        if (part < count) {
            fetch<A_ACROSS>(at, a, a_stride, m, part * PART, k);
            fetch<B_ACROSS>(at + OPERAND_BYTES, b, b_stride, n, part * PART, k);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int part = 0; part < STAGES - 1; part++) bring(part);
    for (u64 part = 0; part < count; part++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();
        bring(part + STAGES - 1);
        u32 left = base + u32(part % STAGES) * 2 * OPERAND_BYTES, right = left + OPERAND_BYTES;
        // Of the four 8 × 8 matrices that an instruction loads, `which` is the one whose row this lane names.
        int which = lane >> 3, line = lane & 7;
        #pragma unroll
        for (int kk = 0; kk < PART; kk += 16) {
            u32 of_a[4][4], of_b[2][4];
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = m0 + i * 16;
                if (A_ACROSS) load_transposed(of_a[i], chunk<true>(left, kk + (which >> 1) * 8 + line, row / 8 + (which & 1)));
                else load_matrices(of_a[i], chunk<false>(left, row + (which & 1) * 8 + line, kk / 8 + (which >> 1)));
            }
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                int column = n0 + j * 16;
                if (B_ACROSS) load_transposed(of_b[j], chunk<true>(right, kk + (which & 1) * 8 + line, column / 8 + (which >> 1)));
                else load_matrices(of_b[j], chunk<false>(right, column + (which >> 1) * 8 + line, kk / 8 + (which & 1)));
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                #pragma unroll
                for (int j = 0; j < 4; j++) multiply(sums[i][j], of_a[i], of_b[j >> 1] + (j & 1) * 2);
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            u64 column = n0 + j * 8 + (lane & 3) * 2;
            if (column >= n) continue;
            float first = bias ? widen(bias[column]) : 0.0f, second = bias ? widen(bias[column + 1]) : 0.0f;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                u64 row = m0 + i * 16 + half * 8 + (lane >> 2);
                if (row >= m) continue;
                REAL pair[2] = {narrow<REAL>(sums[i][j][half * 2] + first), narrow<REAL>(sums[i][j][half * 2 + 1] + second)};
                *(u32*)(c + row * row_stride + column) = u32(pair[0].bits) | u32(pair[1].bits) << 16;
            }
        }
    }
}

template <bool B_ACROSS>
__device__ __forceinline__ void core_rows(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const Places& b, const Places& bias, REAL* c) {
    Tile tile = tiles[blockIdx.y];
    i64 own = i64(tile.group) - i64(first);
    if (tile.group < 0 || own < 0 || own >= MOST) return;
    u64 column = blockIdx.x * 128ull;
    const REAL* weight = (const REAL*)b.at[own];
    const REAL* added = (const REAL*)bias.at[own];
    core_tile<false, B_ACROSS>(tile.end - tile.row, least(n - column, 128), k, a + u64(tile.row) * k, k,
                               B_ACROSS ? weight + column : weight + column * k, B_ACROSS ? n : k,
                               added ? added + column : added, c + u64(tile.row) * n + column, n);
}
extern "C" __global__ void __launch_bounds__(256) core_rows_out_in(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const __grid_constant__ Places b, const __grid_constant__ Places bias, REAL* c) {
    core_rows<false>(first, n, k, tiles, a, b, bias, c);
}
extern "C" __global__ void __launch_bounds__(256) core_rows_in_out(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const __grid_constant__ Places b, const __grid_constant__ Places bias, REAL* c) {
    core_rows<true>(first, n, k, tiles, a, b, bias, c);
}
extern "C" __global__ void __launch_bounds__(256) core_outer(u64 first, u64 m, u64 n, const int* starts, const REAL* left, const REAL* right, const __grid_constant__ Places c) {
    REAL* target = (REAL*)c.at[blockIdx.z];
    if (!target) return;
    u64 start = starts[first + blockIdx.z], count = starts[first + blockIdx.z + 1] - start;
    u64 row = blockIdx.y * 128ull, column = blockIdx.x * 128ull;
    core_tile<true, true>(least(m - row, 128), least(n - column, 128), count, left + start * m + row, m,
                          right + start * n + column, n, nullptr, target + row * n + column, n);
}

// Hopper's own instruction takes both operands from shared memory, and its accumulators stay in the registers of four warps: two
// such teams, each with 64 × 128 of the tile. Parts of 64 of k, in rows of 128 bytes whose chunks are shuffled by the row's number.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TEAM_AHEAD 2                              // parts that are fetched before they are needed
#define TEAM_LATE (TEAM_STAGES - TEAM_AHEAD - 1)  // parts still being multiplied when the next begins
#define TEAM_OPERAND_BYTES (128 * TEAM_PART * 2)

// Brings parts of an operand, one after the other. Where k runs along memory, row `row` of 128 is 64 of k; where it runs across,
// row `row` of 64 is one of k, in two halves of 64 columns. A thread has the same chunk of four rows in every part.
template <bool ACROSS> struct Fetch {
    const REAL* from;
    u64 stride;       // between its four rows
    u64 step;         // from part to part
    u64 left;         // of k from its first element on
    u32 place, rows;  // in a stage; which of its rows are there, where that does not change
    __device__ __forceinline__ Fetch(const REAL* tile, u64 tile_stride, u64 limit, u64 k) {
        int row = threadIdx.x >> (ACROSS ? 4 : 3), at = threadIdx.x & (ACROSS ? 15 : 7);
        from = tile + row * tile_stride + at * 8;
        stride = (ACROSS ? 16 : 32) * tile_stride;
        step = ACROSS ? TEAM_PART * tile_stride : TEAM_PART;
        u64 skipped = ACROSS ? row : at * 8;
        left = k > skipped ? k - skipped : 0;
        place = (ACROSS ? (at >> 3) * (TEAM_PART * 128) : 0) + row * 128 + (((at & 7) ^ (row & 7)) << 4);
        rows = 0;
        #pragma unroll
        for (int j = 0; j < 4; j++) rows |= u32(ACROSS ? u64(at) * 8 < limit : row + j * 32 < limit) << j;
    }
    __device__ __forceinline__ void next(u32 base) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            bool is_there = (rows >> j & 1) && (ACROSS ? left > j * 16 : left > 0);
            fetch16(base + place + j * (ACROSS ? 16 : 32) * 128, from + j * stride, is_there);
        }
        from += step;
        left = left > TEAM_PART ? left - TEAM_PART : 0;
    }
};

// How the instruction finds an operand: groups of eight rows lie 1,024 bytes apart, halves of columns 8,192.
__device__ __forceinline__ u64 described(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64((TEAM_PART * 128) >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void multiply_team(float* d, u64 a, u64 b) {
    asm volatile(
        "{.reg .pred added; setp.ne.u32 added, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." KIND "." KIND
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, added, 1, 1, %66, %67;}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "n"(A_ACROSS ? 1 : 0), "n"(B_ACROSS ? 1 : 0));
}

template <bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void team_tile(u64 m, u64 n, u64 k, const REAL* a, u64 a_stride, const REAL* b, u64 b_stride, const REAL* bias, REAL* c, u64 row_stride) {
    extern __shared__ u8 parts[];
    u32 base = (shared_address(parts) + 1023) & ~1023u;
    int team = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    float d[64];
    #pragma unroll
    for (int i = 0; i < 64; i++) d[i] = 0.0f;
    u32 count = u32((k + TEAM_PART - 1) / TEAM_PART), reading = base, writing = base, end = base + TEAM_STAGES * 2 * TEAM_OPERAND_BYTES;
    Fetch<A_ACROSS> of_a(a, a_stride, m, k);
    Fetch<B_ACROSS> of_b(b, b_stride, n, k);
    auto bring = [&](u32 part) {
        if (part < count) {
            of_a.next(writing);
            of_b.next(writing + TEAM_OPERAND_BYTES);
        }
        writing = writing + 2 * TEAM_OPERAND_BYTES == end ? base : writing + 2 * TEAM_OPERAND_BYTES;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (u32 part = 0; part < TEAM_AHEAD; part++) bring(part);
    for (u32 part = 0; part < count; part++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(TEAM_AHEAD - 1) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        // Both teams are done with what was in this place: each has waited for it before the barrier.
        bring(part + TEAM_AHEAD);
        // 64 rows of either kind take half of an operand's bytes.
        u32 left = reading + team * (TEAM_OPERAND_BYTES / 2), right = reading + TEAM_OPERAND_BYTES;
        reading = reading + 2 * TEAM_OPERAND_BYTES == end ? base : reading + 2 * TEAM_OPERAND_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int kk = 0; kk < TEAM_PART / 16; kk++) {
            multiply_team<A_ACROSS, B_ACROSS>(d, described(left + kk * (A_ACROSS ? 2048 : 32)), described(right + kk * (B_ACROSS ? 2048 : 32)));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(TEAM_LATE) : "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    #pragma unroll
    for (int j = 0; j < 16; j++) {
        u64 column = j * 8 + (lane & 3) * 2;
        if (column >= n) continue;
        float first = bias ? widen(bias[column]) : 0.0f, second = bias ? widen(bias[column + 1]) : 0.0f;
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            u64 row = team * 64 + warp * 16 + half * 8 + (lane >> 2);
            if (row >= m) continue;
            REAL pair[2] = {narrow<REAL>(d[j * 4 + half * 2] + first), narrow<REAL>(d[j * 4 + half * 2 + 1] + second)};
            *(u32*)(c + row * row_stride + column) = u32(pair[0].bits) | u32(pair[1].bits) << 16;
        }
    }
}

template <bool B_ACROSS>
__device__ __forceinline__ void team_rows(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const Places& b, const Places& bias, REAL* c) {
    Tile tile = tiles[blockIdx.y];
    i64 own = i64(tile.group) - i64(first);
    if (tile.group < 0 || own < 0 || own >= MOST) return;
    u64 column = blockIdx.x * 128ull;
    const REAL* weight = (const REAL*)b.at[own];
    const REAL* added = (const REAL*)bias.at[own];
    team_tile<false, B_ACROSS>(tile.end - tile.row, least(n - column, 128), k, a + u64(tile.row) * k, k,
                               B_ACROSS ? weight + column : weight + column * k, B_ACROSS ? n : k,
                               added ? added + column : added, c + u64(tile.row) * n + column, n);
}
extern "C" __global__ void __launch_bounds__(256, 2) team_rows_out_in(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const __grid_constant__ Places b, const __grid_constant__ Places bias, REAL* c) {
    team_rows<false>(first, n, k, tiles, a, b, bias, c);
}
extern "C" __global__ void __launch_bounds__(256, 2) team_rows_in_out(u64 first, u64 n, u64 k, const Tile* tiles, const REAL* a, const __grid_constant__ Places b, const __grid_constant__ Places bias, REAL* c) {
    team_rows<true>(first, n, k, tiles, a, b, bias, c);
}
extern "C" __global__ void __launch_bounds__(256, 2) team_outer(u64 first, u64 m, u64 n, const int* starts, const REAL* left, const REAL* right, const __grid_constant__ Places c) {
    REAL* target = (REAL*)c.at[blockIdx.z];
    if (!target) return;
    u64 start = starts[first + blockIdx.z], count = starts[first + blockIdx.z + 1] - start;
    u64 row = blockIdx.y * 128ull, column = blockIdx.x * 128ull;
    team_tile<true, true>(least(m - row, 128), least(n - column, 128), count, left + start * m + row, m,
                          right + start * n + column, n, nullptr, target + row * n + column, n);
}
#endif
#endif
