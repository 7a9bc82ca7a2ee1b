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

struct Spec {
    u64 heads, kv_heads, width;  // width: blocks in a row of `tables`
    u32 block_tokens, chunk_doublings;          // by how much chunks are larger than `chunk_of` says, where tiles are many
    u32 part_heads, parts;                      // query heads of a tile, and how many parts the heads of a key head make
    float scale;
    u32 window;  // 0: none
    const float* slopes;
    const int *places, *table_of, *tables;  // a row's place is -1 where it is nobody's
    const int2* tiles;                      // first row, count; place of the first row, its table
    const float *cos, *sin;  // [rows, DIM / 2]: what queries and keys are turned by, halves of a head together; or null
};

// Keys of a block of threads where those of a tile are spread over blocks: by the place of the tile's last row alone. As the host
// counts them.
__device__ __forceinline__ int chunk_of(int place) { return place < 4096 ? 128 : place < 32768 ? 256 : 1024; }

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
// What another block has written while this one ran.
__device__ __forceinline__ float fresh(const float* at) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
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
    int first_row, count;   // tokens of the tile
    int from, to;           // places that any row of the tile sees
    const int* table;
    u64 kv_head;
};

// False where there is nothing to do.
__device__ __forceinline__ bool open_tile(const Spec& p, u64 number, u64 part_of, Tile& tile) {
    int2 rows = p.tiles[2 * number], lie = p.tiles[2 * number + 1];
    int first = rows.x, count = rows.y, place = lie.x;
    tile.first_row = first;
    tile.count = count;
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
    tile.table = p.tables + lie.y * p.width;
    return place >= 0;
}

// Where in the caches a place of a text is.
__device__ __forceinline__ u64 slot_of(const Spec& p, const int* table, u32 place) {
    u32 block = place / p.block_tokens;
    return u64(table[block]) * p.block_tokens + (place - block * p.block_tokens);
}

// Eight channels of a head from `at` on, turned by the row's angles where there are any.
__device__ __forceinline__ Pack<REAL> turned8(const Spec& p, const REAL* head, u64 row, int at) {
    Pack<REAL> own = load8(head + at);
    if (!p.cos) return own;
    int half = DIM / 2, pair = at % half;
    Pack<REAL> other = load8(head + (at + half) % DIM);
    Pack<float> cos = load8(p.cos + row * half + pair), sin = load8(p.sin + row * half + pair);
    float sign = at < half ? -1.0f : 1.0f, result[8];
    #pragma unroll
    for (int j = 0; j < 8; j++) result[j] = widen(own.v[j]) * cos.v[j] + sign * widen(other.v[j]) * sin.v[j];
    return narrow8<REAL>(result);
}

// The key and the value of a row into the cache, at a place of the text of a table: eight channels of one of its heads, counted
// over all of them.
__device__ __forceinline__ void append8(const Spec& p, u64 row, int place, const int* table, u64 at, const REAL* k, const REAL* v, REAL* keys, REAL* values) {
    u64 token = p.kv_heads * DIM, head = at / DIM * DIM;
    u64 to = slot_of(p, table, place) * token + at;
    store8(keys + to, turned8(p, k + row * token + head, row, int(at % DIM)));
    store8(values + to, load8(v + row * token + at));
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
    if (from > to) return;
    uint4 held_keys[2][DIM / 32], held_values[4][DIM / 64];
    auto fetch_keys = [&](u64 slot) {
        const REAL* key = keys + slot * token + tile.kv_head * DIM;
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int i = 0; i < DIM / 32; i++) held_keys[n][i] = load16(key + (g + 8 * n) * token + c * (DIM / 4) + i * 8);
        }
    };
    auto fetch_values = [&](u64 slot) {
        const REAL* value = values + slot * token + tile.kv_head * DIM;
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            int own = c * 2 + k % 2 + k / 2 * 8;
            #pragma unroll
            for (int i = 0; i < DIM / 64; i++) held_values[k][i] = load16(value + own * token + i * 64 + g * 8);
        }
    };
    u64 slot = slot_of(p, tile.table, from);
    fetch_keys(slot);
    fetch_values(slot);
    for (int start = from; start <= to; start += 16) {
        // The next keys are under way while these are weighed, the next values while the next keys are.
        bool more = start + 16 <= to;
        if (more) slot = slot_of(p, tile.table, start + 16);
        float scores[2][4] = {};
        #pragma unroll
        for (int n = 0; n < 2; n++) {
            #pragma unroll
            for (int s = 0; s < DIM / 16; s++)
                multiply(scores[n], queries[s], word(held_keys[n][s / 2], s % 2 * 2), word(held_keys[n][s / 2], s % 2 * 2 + 1));
        }
        if (more) fetch_keys(slot);
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
        // What a place behind the last holds is anything, and nothing times that must be nothing.
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            #pragma unroll
            for (int i = 0; i < DIM / 64; i++)
                if (start + c * 2 + k % 2 + k / 2 * 8 > tile.to) held_values[k][i] = make_uint4(0, 0, 0, 0);
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
        if (more) fetch_values(slot);
    }
}

// Has the keys and values at places `from` up to `to` brought nearer: those of earlier passes lie there before this one has begun.
__device__ __forceinline__ void expect_keys(const Spec& p, const Tile& tile, const REAL* keys, const REAL* values, int from, int to) {
    int lane = threadIdx.x & 31;
    u64 token = p.kv_heads * DIM;
    if (tile.to < to) to = tile.to;
    for (int place = from + lane % 16; place <= to; place += 16) {
        u64 slot = slot_of(p, tile.table, place);
        const REAL* head = (lane < 16 ? keys : values) + slot * token + tile.kv_head * DIM;
        #pragma unroll
        for (int line = 0; line < DIM * 2; line += 128) asm volatile("prefetch.global.L2 [%0];" :: "l"((const u8*)head + line));
    }
}

__device__ __forceinline__ void clear(Sums& sums) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        sums.largest[r] = -INFINITY;
        sums.total[r] = 0.0f;
    }
    #pragma unroll
    for (int j = 0; j < DIM / 8; j++) {
        #pragma unroll
        for (int e = 0; e < 4; e++) sums.out[j][e] = 0.0f;
    }
}

__device__ __forceinline__ void begin(const Spec& p, const Tile& tile, const REAL* q, u32 (*queries)[4]) {
    int c = threadIdx.x & 3;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        #pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint4 held = make_uint4(0, 0, 0, 0);
            if (tile.row[r] >= 0) {
                Pack<REAL> eight = turned8(p, q + (tile.row[r] * p.heads + tile.head[r]) * DIM, tile.row[r], c * (DIM / 4) + i * 8);
                held = *(const uint4*)&eight;
            }
            queries[2 * i][r] = held.x;
            queries[2 * i][2 + r] = held.y;
            queries[2 * i + 1][r] = held.z;
            queries[2 * i + 1][2 + r] = held.w;
        }
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
        u64 row = i / eights;
        int place = p.places[row];
        if (place >= 0) append8(p, row, place, p.tables + p.table_of[row] * p.width, i % eights * 8, k, v, keys, values);
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
    begin(p, tile, q, queries);
    clear(sums);
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

// Blocks take turns over the chunks of a tile's keys. A chunk leaves of a row DIM sums, their total and largest score, and the last
// block of a tile joins what all have left, in the order of the chunks; or the result, where the tile sees one chunk alone. Which
// keys are summed by whom, and in which order, the places of a tile's rows alone decide, up to as many rows as products by our own
// kernels have (`few_rows.cu`).
//
// `k`: new keys, with values `v`, that are not in the cache yet: whoever takes a chunk brings those that belong there. Null where
// they are. `chunks`: of which `parts` has room for each tile and part. `arrived`: a zero for each, which is left as zero.
extern "C" __global__ void __launch_bounds__(32 * WARPS, DIM == 64 ? 4 : 2) attend_chunks(const __grid_constant__ Spec p, const REAL* q, const REAL* k, const REAL* v, REAL* keys, REAL* values,
                                         REAL* out, u64 chunks, float* parts, u32* arrived) {
    __shared__ float held[WARPS][16][DIM + 2];
    __shared__ bool is_last;
    let_next_start();
    Tile tile;
    if (!open_tile(p, blockIdx.z, blockIdx.y, tile)) {
        wait_for_earlier();
        if (blockIdx.x == 0 && threadIdx.x < 32) leave_nothing(p, tile, out);
        return;
    }
    int size = chunk_of(tile.to) << p.chunk_doublings, first_chunk = tile.from / size, last_chunk = tile.to / size, step = gridDim.x;
    int chunk = first_chunk + blockIdx.x, blocks = last_chunk - first_chunk + 1 < step ? last_chunk - first_chunk + 1 : step;
    if (chunk > last_chunk) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, g = lane / 4, c = lane % 4, each = size / WARPS;
    int first_row = tile.first_row, count = tile.count;
    // Many tiles fill the device, and have the memory busy as they are.
    bool ahead = p.chunk_doublings == 0;
    if (ahead) expect_keys(p, tile, keys, values, chunk * size + warp * each, chunk * size + warp * each + each - 1);
    wait_for_earlier();
    u32 queries[DIM / 16][4];
    Sums sums;
    begin(p, tile, q, queries);
    u32 group = p.heads / p.kv_heads, skipped = blockIdx.y % p.parts * p.part_heads;
    u64 own = blockIdx.z * u64(gridDim.y) + blockIdx.y;
    float* all = parts + own * chunks * 16 * (DIM + 2);
    bool alone = first_chunk == last_chunk;
    // The rows of a tile are its tokens times the heads of a part.
    int rows = count * int(p.part_heads) < 16 ? count * int(p.part_heads) : 16;
    auto place_of = [&](int row) {
        return ((first_row + row / p.part_heads) * p.heads + (blockIdx.y / p.parts) * group + row % p.part_heads + skipped) * DIM;
    };
    auto is_row = [&](int row) { return row % p.part_heads + skipped < group; };
    for (; chunk <= last_chunk; chunk += step) {
        int start = chunk * size + warp * each;
        if (k) {
            for (u32 i = threadIdx.x; i < count * (DIM / 8); i += blockDim.x) {
                int token = i / (DIM / 8), place = tile.to - (count - 1) + token;
                if (place / size == chunk) append8(p, first_row + token, place, tile.table, tile.kv_head * DIM + i % (DIM / 8) * 8, k, v, keys, values);
            }
            __syncthreads();
        }
        if (ahead && chunk + step <= last_chunk) expect_keys(p, tile, keys, values, start + step * size, start + step * size + each - 1);
        clear(sums);
        attend(p, tile, queries, keys, values, start, start + each - 1, sums);
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
        float* left = all + u64(chunk - first_chunk) * 16 * (DIM + 2);
        for (int row = warp; row < rows; row += WARPS) {
            if (!is_row(row)) continue;
            float most = -INFINITY, total = 0.0f, share[WARPS];
            #pragma unroll
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, held[w][row][DIM + 1]);
            #pragma unroll
            for (int w = 0; w < WARPS; w++) {
                share[w] = most == -INFINITY ? 0.0f : quick_exp(held[w][row][DIM + 1] - most);
                total += share[w] * held[w][row][DIM];
            }
            float inverse = alone ? (total > 0.0f ? 1.0f / total : 0.0f) : 1.0f;
            #pragma unroll
            for (int d = lane; d < DIM; d += 32) {
                float sum = 0.0f;
                #pragma unroll
                for (int w = 0; w < WARPS; w++) sum += share[w] * held[w][row][d];
                if (alone) out[place_of(row) + d] = narrow<REAL>(sum * inverse);
                else left[row * (DIM + 2) + d] = sum;
            }
            if (!alone && lane == 0) {
                left[row * (DIM + 2) + DIM] = total;
                left[row * (DIM + 2) + DIM + 1] = most;
            }
        }
        __syncthreads();
    }
    if (alone) return;
    if (blocks > 1) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(arrived + own, 1u) == u32(blocks - 1);
            if (is_last) arrived[own] = 0;
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
    }
    int left = last_chunk - first_chunk;
    for (int row = warp; row < rows; row += WARPS) {
        if (!is_row(row)) continue;
        float most = -INFINITY, total = 0.0f, result[DIM / 32] = {};
        for (int at = lane; at <= left; at += 32) most = fmaxf(most, fresh(all + (at * 16 + row) * (DIM + 2) + DIM + 1));
        most = warp_max(most);
        #pragma unroll 8
        for (int at = 0; at <= left; at++) {
            const float* one = all + (at * 16 + row) * (DIM + 2);
            float share = most == -INFINITY ? 0.0f : quick_exp(fresh(one + DIM + 1) - most);
            total += share * fresh(one + DIM);
            #pragma unroll
            for (int i = 0; i < DIM / 32; i++) result[i] += share * fresh(one + lane + 32 * i);
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;
        #pragma unroll
        for (int i = 0; i < DIM / 32; i++) out[place_of(row) + lane + 32 * i] = narrow<REAL>(result[i] * inverse);
    }
}
