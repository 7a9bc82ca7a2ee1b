// Conversions between element types: FROM and TO.

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
