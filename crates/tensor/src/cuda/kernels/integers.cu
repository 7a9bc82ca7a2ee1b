// Values as small integers and back: the arithmetic of `cpu/quantize.rs`, to the bit.
//
// A run is the steps of its groups and then the integers, at any byte: a thread reads and writes what lies unaligned byte by byte.
// BITS: 8, 4, or 32 for values that stay as they are. A block of threads per group, eight values to a thread.

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

// Eight values from a place, or as many as there are.
__device__ __forceinline__ void values_at(const REAL* values, u64 first, int count, float* wide) {
    if (count == 8 && ((u64)(values + first) & 15) == 0) {
        Pack<REAL> own = load8(values + first);
        #pragma unroll
        for (int j = 0; j < 8; j++) wide[j] = widen(own.v[j]);
        return;
    }
    #pragma unroll
    for (int j = 0; j < 8; j++) wide[j] = j < count ? widen(values[first + j]) : 0.0f;
}

__device__ __forceinline__ u32 block_largest(u32 v) {
    __shared__ u32 found[32];
    for (int step = 16; step > 0; step >>= 1) v = max(v, __shfl_xor_sync(0xffffffffu, v, step));
    int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if ((threadIdx.x & 31) == 0) found[warp] = v;
    __syncthreads();
    v = 0;
    for (int other = 0; other < warps; other++) v = max(v, found[other]);
    __syncthreads();
    return v;
}

// How many of the thread's eight values there are.
__device__ __forceinline__ int count_of(u64 first, u64 end) {
    return first >= end ? 0 : end - first < 8 ? (int)(end - first) : 8;
}

extern "C" __global__ void pack_run(u64 numel, u64 group, const REAL* values, u8* out) {
#if BITS == 32
    for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < numel; at += (u64)gridDim.x * blockDim.x)
        write_word(out + at * 4, __float_as_uint(widen(values[at])));
#else
    u64 groups = (numel + group - 1) / group;
    u8* integers = out + groups * 4;
    for (u64 index = blockIdx.x; index < groups; index += gridDim.x) {
        u64 end = min((index + 1) * group, numel), first = index * group + threadIdx.x * 8;
        int count = count_of(first, end);
        float wide[8];
        values_at(values, first, count, wide);
        // As integers, magnitudes are ordered as they are, and NaN comes after all; the lowest bit says that it is positive.
        u32 largest = 0;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 bits = __float_as_uint(wide[j]);
            if (j < count) largest = max(largest, bits << 1 | (~bits >> 31));
        }
        largest = block_largest(largest);
        float magnitude = __uint_as_float(largest >> 1);
        float scale = magnitude == 0.0f ? 1.0f : __fdiv_rn(2.0f * HALF_RANGE, __fmul_rn(2.0f, magnitude));
        if (!(magnitude < INFINITY)) scale = __int_as_float(0x7fc00000);
        if (largest & 1) scale = -scale;
        if (threadIdx.x == 0) write_word(out + index * 4, __float_as_uint(__fdiv_rn(1.0f, scale)));
        u32 bytes[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float scaled = __fmul_rn(wide[j], scale);
            scaled = scaled > -HALF_RANGE ? scaled : -HALF_RANGE;
            scaled = scaled < HALF_RANGE - 1.0f ? scaled : HALF_RANGE - 1.0f;
            bytes[j] = j < count ? __float_as_uint(__fadd_rn(scaled, ROUNDER)) & 0xff : 0;
        }
#if BITS == 8
        u8* place = integers + first;
        if (count == 8) {
            write_word(place, bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24);
            write_word(place + 4, bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24);
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
#endif
}

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
    for (u64 index = blockIdx.x; index < groups; index += gridDim.x) {
        u64 end = min((index + 1) * group, numel), first = index * group + threadIdx.x * 8;
        int count = count_of(first, end);
        if (count == 0) continue;
        float sums[8] = {};
        for (u32 source = 0; source < sources; source++) {
            const u8* run = runs + source * stride;
            float step = __uint_as_float(read_word(run + index * 4));
            const u8* integers = run + groups * 4;
#if BITS == 8
            u32 words[2] = {0, 0};
            if (count == 8) {
                words[0] = read_word(integers + first);
                words[1] = read_word(integers + first + 4);
            } else {
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j < count) words[j / 4] |= (u32)integers[first + j] << (j % 4 * 8);
                }
            }
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                int integer = (int)(signed char)(words[j / 4] >> (j % 4 * 8));
                sums[j] = __fadd_rn(sums[j], __fmul_rn((float)integer, step));
            }
#else
            u32 word = 0;
            if (count == 8) {
                word = read_word(integers + first / 2);
            } else {
                for (int j = 0; j < count; j += 2) word |= (u32)integers[(first + j) / 2] << (4 * j);
            }
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 byte = word >> (j / 2 * 8) & 0xff;
                int integer = (int)(signed char)(j % 2 ? byte << 4 : byte) >> 4;
                sums[j] = __fadd_rn(sums[j], __fmul_rn((float)integer, step));
            }
#endif
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) sums[j] = __fmul_rn(sums[j], factor);
        if (count == 8 && ((u64)(out + first) & 15) == 0) {
            store8(out + first, Narrow8<REAL>::from(sums));
        } else {
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j < count) out[first + j] = narrow<REAL>(sums[j]);
            }
        }
    }
#endif
}
