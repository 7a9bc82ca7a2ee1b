// Patches of NCHW images, and pooling.

struct Window { u64 batch, channels, height, width, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w; };

extern "C" __global__ void image_to_columns(u64 count, const REAL* x, REAL* columns, Window w) {
    u64 patch = w.channels * w.kernel_h * w.kernel_w;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 element = i % patch, row = i / patch;
        u64 kx = element % w.kernel_w, ky = element / w.kernel_w % w.kernel_h, c = element / (w.kernel_w * w.kernel_h);
        u64 ox = row % w.out_w, oy = row / w.out_w % w.out_h, b = row / (w.out_w * w.out_h);
        i64 y = i64(oy * w.stride_h + ky) - i64(w.pad_h), xx = i64(ox * w.stride_w + kx) - i64(w.pad_w);
        bool inside = y >= 0 && y < i64(w.height) && xx >= 0 && xx < i64(w.width);
        columns[i] = inside ? x[((b * w.channels + c) * w.height + y) * w.width + xx] : narrow<REAL>(0.0f);
    }
}

// Each pixel adds up the patches it is part of, in the order of their rows.
extern "C" __global__ void columns_to_image(u64 count, const REAL* columns, REAL* x, Window w) {
    u64 patch = w.channels * w.kernel_h * w.kernel_w;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 px = i % w.width, py = i / w.width % w.height, c = i / (w.width * w.height) % w.channels, b = i / (w.width * w.height * w.channels);
        float sum = 0.0f;
        for (u64 oy = 0; oy < w.out_h; oy++) {
            i64 ky = i64(py + w.pad_h) - i64(oy * w.stride_h);
            if (ky < 0 || ky >= i64(w.kernel_h)) continue;
            for (u64 ox = 0; ox < w.out_w; ox++) {
                i64 kx = i64(px + w.pad_w) - i64(ox * w.stride_w);
                if (kx < 0 || kx >= i64(w.kernel_w)) continue;
                u64 row = (b * w.out_h + oy) * w.out_w + ox;
                sum += widen(columns[row * patch + (c * w.kernel_h + ky) * w.kernel_w + kx]);
            }
        }
        x[i] = narrow<REAL>(sum);
    }
}

extern "C" __global__ void max_pool(u64 count, const REAL* x, REAL* y, i64* indices, Window w) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 ox = i % w.out_w, oy = i / w.out_w % w.out_h, plane = i / (w.out_w * w.out_h);
        float best = -INFINITY;
        i64 where = -1;
        for (u64 ky = 0; ky < w.kernel_h; ky++) {
            i64 yy = i64(oy * w.stride_h + ky) - i64(w.pad_h);
            if (yy < 0 || yy >= i64(w.height)) continue;
            for (u64 kx = 0; kx < w.kernel_w; kx++) {
                i64 xx = i64(ox * w.stride_w + kx) - i64(w.pad_w);
                if (xx < 0 || xx >= i64(w.width)) continue;
                u64 at = (plane * w.height + yy) * w.width + xx;
                float v = widen(x[at]);
                if (v > best || where < 0) {
                    best = v;
                    where = i64(at);
                }
            }
        }
        y[i] = where < 0 ? narrow<REAL>(-INFINITY) : x[where];
        indices[i] = where;
    }
}
