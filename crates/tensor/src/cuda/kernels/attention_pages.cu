// Attention of rows of many sequences over a cache in blocks [block, token, key head, channel], for types of 16 bits.
//
// A warp takes a tile: up to 16 rows, which are some neighbouring tokens of one sequence times the query heads that share a
// key head. It goes over the keys sixteen at a time, by tensor cores, with a running maximum and sum per row. Which of its
// channels a lane holds is chosen so that it loads sixteen bytes at once and nothing has to go through shared memory: the
// order of channels does not matter to a score, and the columns of a result may lie in any.
//
// Legend: g lane / 4, c lane % 4: a lane holds scores of rows g and g + 8.

#if HALF == 1
#define KIND "bf16"
#else
#define KIND "f16"
#endif
#define CHUNK 256  // keys of a block where the keys of a tile are spread over blocks
#define WARPS 4

struct Spec {
    u64 heads, kv_heads, block_tokens, width;  // width: blocks in a row of `tables`
    u32 part_heads, parts;                      // query heads of a tile, and how many parts the heads of a key head make
    float scale;
    u32 window;  // 0: none
    const float* slopes;
    const int *places, *table_of, *tables, *tiles;  // a row's place is -1 where it is nobody's; tiles: first row, count
};

__device__ __forceinline__ void multiply(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 two(float low, float high) {
    u32 word;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ uint4 load16(const REAL* at) { return *(const uint4*)at; }
__device__ __forceinline__ u32 word(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }
__device__ __forceinline__ float over_quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float over_quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// What a warp knows of its tile. The two of everything are rows g and g + 8.
struct Tile {
    int row[2];           // of the pass; -1: none
    int head[2];
    int first[2], last[2];  // places that the row sees
    int from, to;           // places that any row of the tile sees
    const int* table;
    u64 kv_head;
};

// False where there is nothing to do.
__device__ __forceinline__ bool open_tile(const Spec& p, u64 number, u64 part_of, Tile& tile) {
    int first = p.tiles[2 * number], count = p.tiles[2 * number + 1];
    int place = p.places[first];
    tile.kv_head = part_of / p.parts;
    u32 group = p.heads / p.kv_heads, skipped = part_of % p.parts * p.part_heads;
    int g = (threadIdx.x & 31) / 4;
    for (int i = 0; i < 2; i++) {
        int t = (g + 8 * i) / p.part_heads, head = (g + 8 * i) % p.part_heads + skipped;
        bool is = t < count && head < group;
        tile.row[i] = is ? first + t : -1;
        tile.head[i] = is ? tile.kv_head * group + head : 0;
        tile.last[i] = is && place >= 0 ? place + t : -1;
        tile.first[i] = p.window && tile.last[i] >= int(p.window) ? tile.last[i] - int(p.window) + 1 : 0;
    }
    tile.from = p.window && place >= int(p.window) ? place - int(p.window) + 1 : 0;
    tile.to = place + count - 1;
    tile.table = p.tables + p.table_of[first] * p.width;
    return place >= 0;
}

struct Sums {
    float largest[2], total[2];
    float out[DIM / 8][4];
};

// Adds the keys at places `from` (a multiple of 16) up to `to`, and not beyond the tile's last.
__device__ __forceinline__ void attend(const Spec& p, const Tile& tile, const u32 (*queries)[4], const REAL* keys, const REAL* values,
                                       int from, int to, Sums& sums) {
    int lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    u64 token = p.kv_heads * DIM;
    float slope[2] = {p.slopes ? p.slopes[tile.head[0]] : 0.0f, p.slopes ? p.slopes[tile.head[1]] : 0.0f};
    if (tile.to < to) to = tile.to;
    for (int start = from; start <= to; start += 16) {
        u64 slot = u64(tile.table[start / p.block_tokens]) * p.block_tokens + start % p.block_tokens;
        const REAL* key = keys + slot * token + tile.kv_head * DIM;
        const REAL* value = values + slot * token + tile.kv_head * DIM;
        uint4 held_keys[2][DIM / 32], held_values[4][DIM / 64];
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int i = 0; i < DIM / 32; i++) held_keys[n][i] = load16(key + (g + 8 * n) * token + c * (DIM / 4) + i * 8);
        }
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            int own = c * 2 + k % 2 + k / 2 * 8;
            #pragma unroll
            for (int i = 0; i < DIM / 64; i++) {
                held_values[k][i] = load16(value + own * token + i * 64 + g * 8);
                // What a place behind the last holds is anything, and nothing times that must be nothing.
                if (start + own > tile.to) held_values[k][i] = make_uint4(0, 0, 0, 0);
            }
        }
        float scores[2][4] = {};
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int s = 0; s < DIM / 16; s++)
                multiply(scores[n], queries[s], word(held_keys[n][s / 2], s % 2 * 2), word(held_keys[n][s / 2], s % 2 * 2 + 1));
        }
        float most[2] = {sums.largest[0], sums.largest[1]};
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                int place = start + 8 * n + c * 2 + e % 2, r = e / 2;
                bool seen = place >= tile.first[r] && place <= tile.last[r];
                scores[n][e] = seen ? scores[n][e] * p.scale + slope[r] * float(place) : -INFINITY;
                most[r] = fmaxf(most[r], scores[n][e]);
            }
        }
        float shift[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            most[r] = over_quad_max(most[r]);
            shift[r] = most[r] == -INFINITY ? 0.0f : most[r];
            float shrink = quick_exp(sums.largest[r] - shift[r]);
            sums.largest[r] = most[r];
            sums.total[r] *= shrink;
            #pragma unroll
            for (int j = 0; j < DIM / 8; j++) {
                sums.out[j][2 * r] *= shrink;
                sums.out[j][2 * r + 1] *= shrink;
            }
        }
        u32 weights[4];
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float one = quick_exp(scores[n][2 * r] - shift[r]), other = quick_exp(scores[n][2 * r + 1] - shift[r]);
                sums.total[r] += one + other;
                weights[2 * n + r] = two(one, other);
            }
        }
        #pragma unroll
        for (int i = 0; i < DIM / 64; i++) {
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 halves = j % 2 ? 0x7632 : 0x5410;
                u32 near = __byte_perm(word(held_values[0][i], j / 2), word(held_values[1][i], j / 2), halves);
                u32 far = __byte_perm(word(held_values[2][i], j / 2), word(held_values[3][i], j / 2), halves);
                multiply(sums.out[i * 8 + j], weights, near, far);
            }
        }
    }
}

__device__ __forceinline__ void begin(const Spec& p, const Tile& tile, const REAL* q, u32 (*queries)[4], Sums& sums) {
    int c = threadIdx.x & 3;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint4 held = make_uint4(0, 0, 0, 0);
            if (tile.row[r] >= 0) held = load16(q + (tile.row[r] * p.heads + tile.head[r]) * DIM + c * (DIM / 4) + i * 8);
            queries[2 * i][r] = held.x;
            queries[2 * i][2 + r] = held.y;
            queries[2 * i + 1][r] = held.z;
            queries[2 * i + 1][2 + r] = held.w;
        }
        sums.largest[r] = -INFINITY;
        sums.total[r] = 0.0f;
    }
    #pragma unroll
    for (int j = 0; j < DIM / 8; j++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) sums.out[j][e] = 0.0f;
    }
}

// Zeros for the rows of a tile that is nobody's: what is computed from them must be numbers.
__device__ __forceinline__ void leave_nothing(const Spec& p, const Tile& tile, REAL* out) {
    int c = threadIdx.x & 3;
    for (int r = 0; r < 2; r++) {
        if (tile.row[r] < 0) continue;
        for (int i = 0; i < DIM / 32; i++)
            *(uint4*)(out + (tile.row[r] * p.heads + tile.head[r]) * DIM + c * (DIM / 4) + i * 8) = make_uint4(0, 0, 0, 0);
    }
}

// New keys and values into the cache, eight channels per thread.
extern "C" __global__ void append_pages(const __grid_constant__ Spec p, u64 count, const REAL* k, const REAL* v, REAL* keys, REAL* values) {
    let_next_start();
    wait_for_earlier();
    u64 eights = p.kv_heads * DIM / 8;
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += gridDim.x * u64(blockDim.x)) {
        u64 row = i / eights, at = i % eights * 8;
        int place = p.places[row];
        if (place < 0) continue;
        int block = p.tables[p.table_of[row] * p.width + place / p.block_tokens];
        u64 to = (u64(block) * p.block_tokens + place % p.block_tokens) * eights * 8 + at;
        store8(keys + to, load8(k + row * eights * 8 + at));
        store8(values + to, load8(v + row * eights * 8 + at));
    }
}

// A warp per tile, over all its keys.
extern "C" __global__ void attend_whole(const __grid_constant__ Spec p, u64 tiles, const REAL* q, const REAL* keys, const REAL* values, REAL* out) {
    u64 number = blockIdx.x * u64(WARPS) + threadIdx.x / 32;
    if (number >= tiles) return;
    Tile tile;
    if (!open_tile(p, number, blockIdx.y, tile)) return leave_nothing(p, tile, out);
    u32 queries[DIM / 16][4];
    Sums sums;
    begin(p, tile, q, queries, sums);
    attend(p, tile, queries, keys, values, tile.from / 16 * 16, tile.to, sums);
    int c = threadIdx.x & 3;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = over_quad_sum(sums.total[r]);
        if (tile.row[r] < 0) continue;
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        REAL* target = out + (tile.row[r] * p.heads + tile.head[r]) * DIM;
        #pragma unroll
        for (int i = 0; i < DIM / 64; i++) {
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                float own[8];
                #pragma unroll
                for (int j = 0; j < 8; j++) own[j] = sums.out[i * 8 + j][2 * r + e] * inverse;
                store8(target + i * 64 + (c * 2 + e) * 8, narrow8<REAL>(own));
            }
        }
    }
}

// A block per tile and CHUNK of its keys. What it leaves of a row: DIM sums, their total and largest score; or the result, where
// the tile sees no other chunk. Which keys are summed by whom, and in which order, the place of a row alone decides.
extern "C" __global__ void attend_chunks(const __grid_constant__ Spec p, const REAL* q, const REAL* keys, const REAL* values, REAL* out, float* parts) {
    __shared__ float held[WARPS][16][DIM + 2];
    let_next_start();
    wait_for_earlier();
    Tile tile;
    if (!open_tile(p, blockIdx.z, blockIdx.y, tile)) {
        if (blockIdx.x == 0 && threadIdx.x < 32) leave_nothing(p, tile, out);
        return;
    }
    int chunk = blockIdx.x, first_chunk = tile.from / CHUNK, last_chunk = tile.to / CHUNK;
    if (chunk < first_chunk || chunk > last_chunk) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4;
    u32 queries[DIM / 16][4];
    Sums sums;
    begin(p, tile, q, queries, sums);
    int start = chunk * CHUNK + warp * (CHUNK / WARPS);
    attend(p, tile, queries, keys, values, start, start + CHUNK / WARPS - 1, sums);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = over_quad_sum(sums.total[r]);
        float* row = held[warp][g + 8 * r];
        #pragma unroll
        for (int i = 0; i < DIM / 64; i++) {
            #pragma unroll
            for (int e = 0; e < 2; e++) {
                #pragma unroll
                for (int j = 0; j < 8; j++) row[i * 64 + (c * 2 + e) * 8 + j] = sums.out[i * 8 + j][2 * r + e];
            }
        }
        if (c == 0) {
            row[DIM] = total;
            row[DIM + 1] = sums.largest[r];
        }
    }
    __syncthreads();
    int first_row = p.tiles[2 * blockIdx.z], count = p.tiles[2 * blockIdx.z + 1];
    u32 group = p.heads / p.kv_heads, skipped = blockIdx.y % p.parts * p.part_heads;
    float* left = parts + ((blockIdx.z * u64(gridDim.y) + blockIdx.y) * gridDim.x + chunk) * 16 * (DIM + 2);
    for (int row = warp; row < 16; row += WARPS) {
        int t = row / p.part_heads;
        u32 head = row % p.part_heads + skipped;
        if (t >= count || head >= group) continue;
        float most = -INFINITY, total = 0.0f, share[WARPS];
        #pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, held[w][row][DIM + 1]);
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
            share[w] = most == -INFINITY ? 0.0f : quick_exp(held[w][row][DIM + 1] - most);
            total += share[w] * held[w][row][DIM];
        }
        bool alone = first_chunk == last_chunk;
        float inverse = alone ? (total > 0.0f ? 1.0f / total : 0.0f) : 1.0f;
        for (int d = lane; d < DIM; d += 32) {
            float sum = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) sum += share[w] * held[w][row][d];
            if (alone) out[((first_row + t) * p.heads + (blockIdx.y / p.parts) * group + head) * DIM + d] = narrow<REAL>(sum * inverse);
            else left[row * (DIM + 2) + d] = sum;
        }
        if (!alone && lane == 0) {
            left[row * (DIM + 2) + DIM] = total;
            left[row * (DIM + 2) + DIM + 1] = most;
        }
    }
}

// Joins what the chunks of a tile have left. `chunks` is how many `attend_chunks` was launched for.
extern "C" __global__ void join_chunks(const __grid_constant__ Spec p, u64 chunks, const float* parts, REAL* out) {
    let_next_start();
    wait_for_earlier();
    Tile tile;
    if (!open_tile(p, blockIdx.x, blockIdx.y, tile)) return;
    int first_chunk = tile.from / CHUNK, last_chunk = tile.to / CHUNK;
    if (first_chunk == last_chunk) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int first_row = p.tiles[2 * blockIdx.x], count = p.tiles[2 * blockIdx.x + 1];
    u32 group = p.heads / p.kv_heads, skipped = blockIdx.y % p.parts * p.part_heads;
    const float* left = parts + (blockIdx.x * u64(gridDim.y) + blockIdx.y) * chunks * 16 * (DIM + 2);
    for (int row = warp; row < 16; row += WARPS) {
        int t = row / p.part_heads;
        u32 head = row % p.part_heads + skipped;
        if (t >= count || head >= group) continue;
        float most = -INFINITY, total = 0.0f, sums[DIM / 32] = {};
        for (int chunk = first_chunk; chunk <= last_chunk; chunk++) most = fmaxf(most, left[(chunk * 16 + row) * (DIM + 2) + DIM + 1]);
        for (int chunk = first_chunk; chunk <= last_chunk; chunk++) {
            const float* own = left + (chunk * 16 + row) * (DIM + 2);
            float share = most == -INFINITY ? 0.0f : quick_exp(own[DIM + 1] - most);
            total += share * own[DIM];
            #pragma unroll
            for (int i = 0; i < DIM / 32; i++) sums[i] += share * own[lane + 32 * i];
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        #pragma unroll
        for (int i = 0; i < DIM / 32; i++)
            out[((first_row + t) * p.heads + (blockIdx.y / p.parts) * group + head) * DIM + lane + 32 * i] = narrow<REAL>(sums[i] * inverse);
    }
}
