// Sums and other reductions in a fixed order, softmax, running sums, the largest of a row.

// The sum of few long rows: a thread has its columns and walks down.
extern "C" __global__ void sum_few_rows(u64 rows, u64 width, const REAL* x, REAL* y) {
    spread(width, width % 8 == 0 && aligned16(x, y),
        [&](u64 column) {
            float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            #pragma unroll 4
            for (u64 r = 0; r < rows; r++) {
                Pack<REAL> row = load8(x + r * width + column);
                #pragma unroll
                for (int j = 0; j < 8; j++) sums[j] += widen(row.v[j]);
            }
            store8(y + column, narrow8<REAL>(sums));
        },
        [&](u64 column) {
            float sum = 0.0f;
            for (u64 r = 0; r < rows; r++) sum += widen(x[r * width + column]);
            y[column] = narrow<REAL>(sum);
        });
}

// Stage one of a sum over rows: block (column tile, row slice) leaves its sums in partial[slice, column].
extern "C" __global__ void sum_rows_partial(u64 rows, u64 width, u64 slice_rows, const REAL* x, float* partial) {
    let_next_start();
    wait_for_earlier();
    // 32 threads along columns, 8 along rows; each thread has 8 neighbouring columns.
    u64 column = (blockIdx.x * 32ull + threadIdx.x) * 8;
    u64 first = blockIdx.y * slice_rows, last = first + slice_rows < rows ? first + slice_rows : rows;
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    bool wide = aligned16(x) && width % 8 == 0;
    if (column < width && wide) {
        // Several rows under way at a time.
        for (u64 r = first + threadIdx.y; r < last; r += 32) {
            Pack<REAL> row[4];
            #pragma unroll
            for (int k = 0; k < 4; k++) if (r + 8 * k < last) row[k] = load8(x + (r + 8 * k) * width + column);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                if (r + 8 * k >= last) continue;
                #pragma unroll
                for (int j = 0; j < 8; j++) sums[j] += widen(row[k].v[j]);
            }
        }
    } else if (column < width) {
        for (u64 r = first + threadIdx.y; r < last; r += 8)
            #pragma unroll
            for (int j = 0; j < 8; j++) if (column + j < width) sums[j] += widen(x[r * width + column + j]);
    }
    leave_columns(sums, width, partial);
}

// Stage two: sums partial[slices, width] over slices. 32 columns and 32 slices at a time.
template <class T> __device__ void finish_rows(u64 slices, u64 width, const float* partial, T* y) {
    __shared__ float parts[32][33];
    u64 column = blockIdx.x * 32ull + threadIdx.x;
    float sum = 0.0f;
    if (column < width) for (u64 s = threadIdx.y; s < slices; s += 32) sum += partial[s * width + column];
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    float total = warp_sum(parts[threadIdx.x][threadIdx.y]);
    u64 own = blockIdx.x * 32ull + threadIdx.y;
    if (threadIdx.x == 0 && own < width) y[own] = narrow<T>(total);
}
extern "C" __global__ void sum_rows_finish(u64 slices, u64 width, const float* partial0, REAL* y0, const float* partial1, REAL* y1) {
    let_next_start();
    wait_for_earlier();
    finish_rows(slices, width, blockIdx.y == 0 ? partial0 : partial1, blockIdx.y == 0 ? y0 : y1);
}

enum { SUM, MAX, MIN };
__device__ __forceinline__ float neutral(int op) { return op == SUM ? 0.0f : op == MAX ? -INFINITY : INFINITY; }
__device__ __forceinline__ float join(int op, float a, float b) { return op == SUM ? a + b : op == MAX ? fmaxf(a, b) : fminf(a, b); }

extern "C" __global__ void reduce_rows(u64 size, const REAL* x, REAL* y, int op) {
    const REAL* row = x + blockIdx.x * size;
    float v = neutral(op);
    for (u64 i = threadIdx.x; i < size; i += blockDim.x) v = join(op, v, widen(row[i]));
    v = block_reduce(v, neutral(op), [&](float a, float b) { return join(op, a, b); });
    if (threadIdx.x == 0) y[blockIdx.x] = narrow<REAL>(v);
}

extern "C" __global__ void reduce_middle(u64 outer, u64 size, u64 inner, const REAL* x, REAL* y, int op) {
    u64 count = outer * inner;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        const REAL* start = x + i / inner * size * inner + i % inner;
        float v = neutral(op);
        for (u64 s = 0; s < size; s++) v = join(op, v, widen(start[s * inner]));
        y[i] = narrow<REAL>(v);
    }
}

extern "C" __global__ void softmax(u64 width, const REAL* x, REAL* y, int log) {
    const REAL* row = x + blockIdx.x * width;
    REAL* out = y + blockIdx.x * width;
    float largest = -INFINITY;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) largest = fmaxf(largest, widen(row[i]));
    largest = block_max(largest);
    float shift = largest == -INFINITY ? 0.0f : largest, total = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) total += expf(widen(row[i]) - shift);
    total = block_sum(total);
    float offset = shift + logf(total);
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float v = widen(row[i]);
        out[i] = narrow<REAL>(log ? v - offset : expf(v - shift) / total);
    }
}

extern "C" __global__ void softmax_backward(u64 width, const REAL* y, const REAL* dy, REAL* dx, int log) {
    u64 start = blockIdx.x * width;
    float total = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) total += widen(dy[start + i]) * (log ? 1.0f : widen(y[start + i]));
    total = block_sum(total);
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float v = widen(y[start + i]), d = widen(dy[start + i]);
        dx[start + i] = narrow<REAL>(log ? d - expf(v) * total : v * (d - total));
    }
}

extern "C" __global__ void cumsum(u64 rows, u64 width, const REAL* x, REAL* y, int reverse) {
    for (u64 r = blockIdx.x * (u64)blockDim.x + threadIdx.x; r < rows; r += gridDim.x * (u64)blockDim.x) {
        float sum = 0.0f;
        for (u64 step = 0; step < width; step++) {
            u64 i = r * width + (reverse ? width - 1 - step : step);
            sum += widen(x[i]);
            y[i] = narrow<REAL>(sum);
        }
    }
}

// Orders floats as their bits, NaN above all: larger key first, then lower index.
__device__ __forceinline__ u64 rank_key(float v, u64 index) {
    u32 bits = __float_as_uint(v);
    u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64(key) << 32) | u32(~u32(index));
}

extern "C" __global__ void top_k(u64 width, u64 k, const REAL* x, REAL* values, i64* indices) {
    __shared__ u64 best_of[32];
    __shared__ u64 winner;
    const REAL* row = x + blockIdx.x * width;
    u64 limit = ~0ull;
    for (u64 j = 0; j < k; j++) {
        u64 best = 0;
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            u64 key = rank_key(widen(row[i]), i);
            if (key < limit && key > best) best = key;
        }
        for (int step = 16; step > 0; step >>= 1) {
            u64 other = __shfl_xor_sync(0xffffffffu, best, step);
            best = other > best ? other : best;
        }
        if ((threadIdx.x & 31) == 0) best_of[threadIdx.x >> 5] = best;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < int(blockDim.x >> 5); w++) best = best_of[w] > best ? best_of[w] : best;
            winner = best;
            u64 index = u32(~u32(best));
            values[blockIdx.x * k + j] = row[index];
            indices[blockIdx.x * k + j] = i64(index);
        }
        __syncthreads();
        limit = winner;
    }
}
