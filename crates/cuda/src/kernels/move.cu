// Kernels that move elements of any size: fills, comparisons, splits, lookups.

extern "C" __global__ void fill(u64 count, REAL* target, REAL value) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) target[i] = value;
}

extern "C" __global__ void compare(u64 count, const REAL* a, const REAL* b, u8* y, int op, Broadcast shape) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        #ifdef EXACT
        REAL l = a[place(shape, 0, i)], r = b[place(shape, 1, i)];
        #else
        float l = widen(a[place(shape, 0, i)]), r = widen(b[place(shape, 1, i)]);
        #endif
        y[i] = op == 0 ? l == r : op == 1 ? l < r : l <= r;
    }
}

// Rows of up to three parts, one behind the other; widths count REALs.
struct Parts { REAL* at[3]; u64 width[3]; };
extern "C" __global__ void split_columns(u64 rows, const REAL* x, const __grid_constant__ Parts parts) {
    u64 width = parts.width[0] + parts.width[1] + parts.width[2], count = rows * width;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 r = i / width, c = i % width;
        int part = 0;
        while (part < 2 && c >= parts.width[part]) c -= parts.width[part++];
        parts.at[part][r * parts.width[part] + c] = x[i];
    }
}

extern "C" __global__ void index_select(u64 count, const REAL* x, const INDEX* indices, u64 picked, u64 size, u64 inner, REAL* y, u64 op, Fault* fault) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 c = i % inner, p = i / inner % picked, o = i / (inner * picked);
        u64 index = checked(i64(indices[p]), p, size, op, fault);
        y[i] = x[(o * size + index) * inner + c];
    }
}

extern "C" __global__ void gather(u64 count, const REAL* x, const INDEX* indices, u64 picked, u64 width, REAL* y, u64 op, Fault* fault) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x)
        y[i] = x[i / picked * width + checked(i64(indices[i]), i, width, op, fault)];
}
