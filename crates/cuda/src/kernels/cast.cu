// Conversions between element types, FROM and TO, and the same with a factor.

extern "C" __global__ void scale_by(u64 count, const FROM* x, const float* factor, TO* y) {
    float f = *factor;
    // Nothing to do, in place and by one.
    if (f == 1.0f && (const void*)x == (const void*)y) return;
    spread(count, aligned16(x, y),
        [&](u64 i) {
            Pack<FROM> a = load8(x + i);
            Pack<TO> b;
            #pragma unroll
            for (int j = 0; j < 8; j++) b.v[j] = narrow<TO>(widen(a.v[j]) * f);
            store8(y + i, b);
        },
        [&](u64 i) { y[i] = narrow<TO>(widen(x[i]) * f); });
}

extern "C" __global__ void cast(u64 count, const FROM* x, TO* y) {
    spread(count, aligned16(x, y),
        [&](u64 i) {
            Pack<FROM> a = load8(x + i);
            Pack<TO> b;
            #pragma unroll
            for (int j = 0; j < 8; j++) b.v[j] = CONVERT(a.v[j]);
            store8(y + i, b);
        },
        [&](u64 i) { y[i] = CONVERT(x[i]); });
}
