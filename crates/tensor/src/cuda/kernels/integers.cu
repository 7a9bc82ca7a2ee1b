// Values as small integers and back: the arithmetic of `cpu/quantize.rs`, to the bit.
//
// A run is the steps of its groups and then the integers, at any byte: a thread reads and writes what lies unaligned byte by byte.
// BITS: 8, 4, or 32 for values that stay as they are. A warp per group, PACKS times eight values to a thread: nobody waits for
// other warps, and a thread's loads are all under way before the first is needed.

#if BITS == 4
#define HALF_RANGE 8.0f
#else
#define HALF_RANGE 128.0f
#endif
#define ROUNDER 12582912.0f

__device__ __forceinline__ void write_word(u8* at, u32 word) {
    if (((u64)at & 3) == 0) {
        *(u32*)at = word;
        return;
    }
    #pragma unroll
    for (int j = 0; j < 4; j++) at[j] = (u8)(word >> (8 * j));
}

__device__ __forceinline__ u32 read_word(const u8* at) {
    if (((u64)at & 3) == 0) return *(const u32*)at;
    return (u32)at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

#define FULL 0xffffffffu

// How many of the eight values from a place on there are.
__device__ __forceinline__ int count_of(u64 first, u64 end) {
    return first >= end ? 0 : end - first < 8 ? (int)(end - first) : 8;
}

// Those values; zeros behind them.
__device__ __forceinline__ Pack<REAL> values_at(const REAL* values, u64 first, int count) {
    if (count == 8 && ((u64)(values + first) & 15) == 0) return load8(values + first);
    Pack<REAL> own;
    #pragma unroll
    for (int j = 0; j < 8; j++) own.v[j] = j < count ? values[first + j] : narrow<REAL>(0.0f);
    return own;
}

extern "C" __global__ void pack_run(u64 numel, u64 group, const REAL* values, u8* out) {
#if BITS == 32
    for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < numel; at += (u64)gridDim.x * blockDim.x)
        write_word(out + at * 4, __float_as_uint(widen(values[at])));
#else
    u64 groups = (numel + group - 1) / group;
    u8* integers = out + groups * 4;
    int lane = threadIdx.x & 31;
    u64 warps = (u64)gridDim.x * blockDim.x / 32;
    for (u64 index = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32; index < groups; index += warps) {
        u64 start = index * group + lane * 8, end = min((index + 1) * group, numel);
        Pack<REAL> own[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; p++) own[p] = values_at(values, start + p * 256, count_of(start + p * 256, end));
        // As integers, magnitudes are ordered as they are, and NaN comes after all; the lowest bit says that it is positive.
        u32 largest = 0;
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int count = count_of(start + p * 256, end);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 bits = __float_as_uint(widen(own[p].v[j]));
                if (j < count) largest = max(largest, bits << 1 | (~bits >> 31));
            }
        }
        for (int step = 16; step > 0; step >>= 1) largest = max(largest, __shfl_xor_sync(FULL, largest, step));
        float magnitude = __uint_as_float(largest >> 1);
        float scale = magnitude == 0.0f ? 1.0f : __fdiv_rn(2.0f * HALF_RANGE, __fmul_rn(2.0f, magnitude));
        if (!(magnitude < INFINITY)) scale = __int_as_float(0x7fc00000);
        if (largest & 1) scale = -scale;
        if (lane == 0) write_word(out + index * 4, __float_as_uint(__fdiv_rn(1.0f, scale)));
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            u64 first = start + p * 256;
            int count = count_of(first, end);
            u32 bytes[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float scaled = __fmul_rn(widen(own[p].v[j]), scale);
                scaled = scaled > -HALF_RANGE ? scaled : -HALF_RANGE;
                scaled = scaled < HALF_RANGE - 1.0f ? scaled : HALF_RANGE - 1.0f;
                bytes[j] = j < count ? __float_as_uint(__fadd_rn(scaled, ROUNDER)) & 0xff : 0;
            }
#if BITS == 8
            u8* place = integers + first;
            u32 low = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
            u32 high = bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24;
            if (count == 8 && ((u64)place & 7) == 0) {
                *(uint2*)place = uint2{low, high};
            } else if (count == 8) {
                write_word(place, low);
                write_word(place + 4, high);
            } else {
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j < count) place[j] = (u8)bytes[j];
                }
            }
#else
            u8* place = integers + first / 2;
            u32 word = 0;
            #pragma unroll
            for (int j = 0; j < 8; j += 2) word |= ((bytes[j] << 4 | (bytes[j + 1] & 0xf)) & 0xff) << (4 * j);
            if (count == 8) {
                write_word(place, word);
            } else {
                for (int j = 0; j < count; j += 2) place[j / 2] = (u8)(word >> (4 * j));
            }
#endif
        }
    }
#endif
}

#if BITS != 32
// Eight integers from a place on, or as many as there are.
__device__ __forceinline__ uint2 integers_at(const u8* integers, u64 first, int count) {
#if BITS == 8
    const u8* at = integers + first;
    if (count == 8 && ((u64)at & 7) == 0) return *(const uint2*)at;
    if (count == 8) return uint2{read_word(at), read_word(at + 4)};
    u32 words[2] = {0, 0};
    #pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < count) words[j / 4] |= (u32)at[j] << (j % 4 * 8);
    }
    return uint2{words[0], words[1]};
#else
    const u8* at = integers + first / 2;
    if (count == 8) return uint2{read_word(at), 0};
    u32 word = 0;
    for (int j = 0; j < count; j += 2) word |= (u32)at[j / 2] << (4 * j);
    return uint2{word, 0};
#endif
}
#endif

// The sum of runs that lie `stride` bytes from each other, times `factor`.
extern "C" __global__ void unpack_sum(u64 numel, u64 group, const u8* runs, u64 stride, u32 sources, float factor, REAL* out) {
#if BITS == 32
    for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < numel; at += (u64)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (u32 source = 0; source < sources; source++)
            sum = __fadd_rn(sum, __uint_as_float(read_word(runs + source * stride + at * 4)));
        out[at] = narrow<REAL>(__fmul_rn(sum, factor));
    }
#else
    u64 groups = (numel + group - 1) / group;
    int lane = threadIdx.x & 31;
    u64 warps = (u64)gridDim.x * blockDim.x / 32;
    for (u64 index = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / 32; index < groups; index += warps) {
        u64 start = index * group + lane * 8, end = min((index + 1) * group, numel);
        float sums[PACKS][8] = {};
        for (u32 source = 0; source < sources; source++) {
            const u8* run = runs + source * stride;
            const u8* integers = run + groups * 4;
            float step = __uint_as_float(read_word(run + index * 4));
            uint2 words[PACKS];
            #pragma unroll
            for (int p = 0; p < PACKS; p++) words[p] = integers_at(integers, start + p * 256, count_of(start + p * 256, end));
            #pragma unroll
            for (int p = 0; p < PACKS; p++) {
                #pragma unroll
                for (int j = 0; j < 8; j++) {
#if BITS == 8
                    int integer = (int)(signed char)((j < 4 ? words[p].x : words[p].y) >> (j % 4 * 8));
#else
                    u32 byte = words[p].x >> (j / 2 * 8) & 0xff;
                    int integer = (int)(signed char)(j % 2 ? byte << 4 : byte) >> 4;
#endif
                    sums[p][j] = __fadd_rn(sums[p][j], __fmul_rn((float)integer, step));
                }
            }
        }
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            u64 first = start + p * 256;
            int count = count_of(first, end);
            #pragma unroll
            for (int j = 0; j < 8; j++) sums[p][j] = __fmul_rn(sums[p][j], factor);
            if (count == 8 && ((u64)(out + first) & 15) == 0) {
                store8(out + first, Narrow8<REAL>::from(sums[p]));
            } else {
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j < count) out[first + j] = narrow<REAL>(sums[p][j]);
                }
            }
        }
    }
#endif
}
