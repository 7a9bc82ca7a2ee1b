// Values as small integers and back: the arithmetic of `tensor/src/quantize.rs`, to the bit.
//
// A run is the steps of its groups and then the integers, at any byte: a thread reads and writes what lies unaligned byte by byte.
// BITS: 8, 4, or 32 for values that stay as they are. A group is PACKS times 256 values: one warp's, or two warps' that tell each
// other their largest. A thread holds HELD times eight, whose loads are all under way before the first is needed. Groups that are
// whole and lie on words, which almost all do, are spared the looks at what is there.

#if BITS == 4
#define HALF_RANGE 8.0f
#else
#define HALF_RANGE 128.0f
#endif
#define ROUNDER 12582912.0f
#if PACKS > MOST_HELD
#define HELD (PACKS / 2)
#define SHARING 2  // warps of a group
#else
#define HELD PACKS
#define SHARING 1
#endif
// Groups that a warp which packs has under way: short ones as many as make a long one. (Unpacking is bound by what it writes.)
#if PACKS == 1
#define AT_ONCE 4
#elif PACKS == 2
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif

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

// How many of the eight values from a place on there are.
__device__ __forceinline__ int count_of(u64 first, u64 end) {
    return first >= end ? 0 : end - first < 8 ? (int)(end - first) : 8;
}

// Those values; zeros behind them.
template <bool WHOLE> __device__ __forceinline__ Pack<REAL> values_at(const REAL* values, u64 first, int count) {
    if (WHOLE || (count == 8 && ((u64)(values + first) & 15) == 0)) return load8(values + first);
    Pack<REAL> own;
    #pragma unroll
    for (int j = 0; j < 8; j++) own.v[j] = j < count ? values[first + j] : narrow<REAL>(0.0f);
    return own;
}

#if BITS != 32
// Magnitudes as integers are ordered as they are, and NaN comes after all; the lowest bit says that it is positive.
__device__ __forceinline__ u32 ordered(u32 bits) { return bits << 1 | (~bits >> 31); }

// The largest of those of eight values, of which `count` are there. Types of 16 bits go in pairs.
__device__ __forceinline__ u32 largest_of(const Pack<float>& own, int count) {
    u32 largest = 0;
    #pragma unroll
    for (int j = 0; j < 8; j++) largest = max(largest, j < count ? ordered(__float_as_uint(own.v[j])) : 0);
    return largest;
}
template <class T> __device__ __forceinline__ u32 largest_of(const Pack<T>& own, int count) {
    uint4 words = *(const uint4*)&own;
    u32 pairs[4] = {words.x, words.y, words.z, words.w}, largest = 0;
    if (count < 8) {
        float wide[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) wide[j] = widen(own.v[j]);
        return largest_of(*(const Pack<float>*)wide, count);
    }
    #pragma unroll
    for (int j = 0; j < 4; j++) largest = __vmaxu2(largest, (pairs[j] << 1 & 0xfffefffe) | (~pairs[j] >> 15 & 0x00010001));
    T magnitude;
    u32 both = max(largest & 0xffff, largest >> 16);
    *(unsigned short*)&magnitude = both >> 1;
    return __float_as_uint(widen(magnitude)) << 1 | (both & 1);
}

// A value on the grid: the low bits of what comes back are the integer.
__device__ __forceinline__ u32 integer_of(float value, float scale) {
    float scaled = fminf(fmaxf(__fmul_rn(value, scale), -HALF_RANGE), HALF_RANGE - 1.0f);
    return __float_as_uint(__fadd_rn(scaled, ROUNDER));
}

// The low bytes of four words.
__device__ __forceinline__ u32 low_bytes(const u32* words) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}
#endif

#if BITS != 32
// The largest of a group, of which a warp knows what it holds. `turn` changes from group to group: what is told may be read late.
__device__ __forceinline__ u32 over_group_max(u32 largest, int turn) {
    for (int step = 16; step > 0; step >>= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
#if SHARING == 2
    __shared__ u32 told[2][32];
    int warp = threadIdx.x / 32;
    if ((threadIdx.x & 31) == 0) told[turn][warp] = largest;
    asm volatile("bar.sync %0, 64;" :: "r"(warp / 2 + 1) : "memory");
    largest = max(largest, told[turn][warp ^ 1]);
#endif
    return largest;
}

// Which values of a group a thread holds: eight from here on, and from each 256 further.
__device__ __forceinline__ u64 place_in_group() { return threadIdx.x / 32 % SHARING * (HELD * PER_WARP) + (threadIdx.x & 31) * 8; }

template <bool WHOLE> __device__ __forceinline__ void write8(u8* integers, u64 first, int count, const u32* found) {
#if BITS == 8
    u8* place = integers + first;
    u32 low = low_bytes(found), high = low_bytes(found + 4);
    if ((WHOLE || count == 8) && ((u64)place & 7) == 0) {
        *(uint2*)place = uint2{low, high};
    } else if (WHOLE || count == 8) {
        write_word(place, low);
        write_word(place + 4, high);
    } else {
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (j < count) place[j] = (u8)found[j];
        }
    }
#else
    u8* place = integers + first / 2;
    u32 pairs[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = found[2 * j] << 4 | (WHOLE || 2 * j + 1 < count ? found[2 * j + 1] & 0xf : 0);
    u32 word = low_bytes(pairs);
    if (WHOLE || count == 8) {
        write_word(place, word);
    } else {
        for (int j = 0; j < count; j += 2) place[j / 2] = (u8)(word >> (4 * j));
    }
#endif
}

// `GROUPS` neighbouring groups, the first of which has the number `index`; a thread's first value of it is at `start`.
template <bool WHOLE, int GROUPS> __device__ __forceinline__ void pack_groups(u64 index, u64 start, u64 end, int turn, const REAL* values, u8* out, u8* integers) {
    Pack<REAL> own[GROUPS][HELD];
    u32 largest[GROUPS];
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        #pragma unroll
        for (int p = 0; p < HELD; p++) {
            u64 first = start + (g * PACKS + p) * PER_WARP;
            own[g][p] = values_at<WHOLE>(values, first, WHOLE ? 8 : count_of(first, end));
        }
    }
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        largest[g] = 0;
        #pragma unroll
        for (int p = 0; p < HELD; p++) {
            u64 first = start + (g * PACKS + p) * PER_WARP;
            largest[g] = max(largest[g], largest_of(own[g][p], WHOLE ? 8 : count_of(first, end)));
        }
        largest[g] = over_group_max(largest[g], turn);
    }
    #pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float magnitude = __uint_as_float(largest[g] >> 1);
        float scale = magnitude == 0.0f ? 1.0f : __fdiv_rn(2.0f * HALF_RANGE, __fmul_rn(2.0f, magnitude));
        if (!(magnitude < INFINITY)) scale = __int_as_float(0x7fc00000);
        if (largest[g] & 1) scale = -scale;
        if (place_in_group() == 0) write_word(out + (index + g) * 4, __float_as_uint(__fdiv_rn(1.0f, scale)));
        #pragma unroll
        for (int p = 0; p < HELD; p++) {
            u64 first = start + (g * PACKS + p) * PER_WARP;
            u32 found[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) found[j] = integer_of(widen(own[g][p].v[j]), scale);
            write8<WHOLE>(integers, first, WHOLE ? 8 : count_of(first, end), found);
        }
    }
}
#endif

extern "C" __global__ void pack_run(u64 numel, u64 group, const REAL* values, u8* out) {
#if BITS == 32
    for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < numel; at += (u64)gridDim.x * blockDim.x)
        write_word(out + at * 4, __float_as_uint(widen(values[at])));
#else
    u64 groups = (numel + group - 1) / group, step = (u64)gridDim.x * blockDim.x / (32 * SHARING);
    u8* integers = out + groups * 4;
    bool on_words = ((u64)values & 15) == 0 && ((u64)out & 3) == 0;
    int turn = 0;
    for (u64 some = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / (32 * SHARING); some * AT_ONCE < groups; some += step, turn ^= 1) {
        u64 index = some * AT_ONCE, start = index * group + place_in_group();
        if (on_words && (index + AT_ONCE) * group <= numel) {
            pack_groups<true, AT_ONCE>(index, start, numel, turn, values, out, integers);
            continue;
        }
        for (; index < groups && index < (some + 1) * AT_ONCE; index++, start += group)
            pack_groups<false, 1>(index, start, min((index + 1) * group, numel), turn, values, out, integers);
    }
#endif
}

#if BITS != 32
// Eight integers from a place on, or as many as there are.
template <bool WHOLE> __device__ __forceinline__ uint2 integers_at(const u8* integers, u64 first, int count) {
#if BITS == 8
    const u8* at = integers + first;
    if ((WHOLE || count == 8) && ((u64)at & 7) == 0) return *(const uint2*)at;
    if (WHOLE || count == 8) return uint2{read_word(at), read_word(at + 4)};
    u32 words[2] = {0, 0};
    #pragma unroll
    for (int j = 0; j < 8; j++) {
        if (j < count) words[j / 4] |= (u32)at[j] << (j % 4 * 8);
    }
    return uint2{words[0], words[1]};
#else
    const u8* at = integers + first / 2;
    if (WHOLE || count == 8) return uint2{read_word(at), 0};
    u32 word = 0;
    for (int j = 0; j < count; j += 2) word |= (u32)at[j / 2] << (4 * j);
    return uint2{word, 0};
#endif
}

template <bool WHOLE> __device__ __forceinline__ void unpack_group(u64 index, u64 start, u64 end, u64 groups, const u8* runs, u64 stride, u32 sources, float factor, REAL* out) {
    float sums[HELD][8] = {};
    for (u32 source = 0; source < sources; source++) {
        const u8* run = runs + source * stride;
        const u8* integers = run + groups * 4;
        float step = __uint_as_float(read_word(run + index * 4));
        uint2 words[HELD];
        #pragma unroll
        for (int p = 0; p < HELD; p++) words[p] = integers_at<WHOLE>(integers, start + p * PER_WARP, WHOLE ? 8 : count_of(start + p * PER_WARP, end));
        #pragma unroll
        for (int p = 0; p < HELD; p++) {
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
    for (int p = 0; p < HELD; p++) {
        u64 first = start + p * PER_WARP;
        #pragma unroll
        for (int j = 0; j < 8; j++) sums[p][j] = __fmul_rn(sums[p][j], factor);
        int count = WHOLE ? 8 : count_of(first, end);
        if (WHOLE || (count == 8 && ((u64)(out + first) & 15) == 0)) {
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
    u64 groups = (numel + group - 1) / group, step = (u64)gridDim.x * blockDim.x / (32 * SHARING);
    bool on_words = ((u64)out & 15) == 0 && ((u64)runs & 3) == 0 && (stride & 3) == 0;
    for (u64 index = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / (32 * SHARING); index < groups; index += step) {
        u64 start = index * group + place_in_group(), end = min((index + 1) * group, numel);
        if (on_words && (index + 1) * group <= numel) unpack_group<true>(index, start, end, groups, runs, stride, sources, factor, out);
        else unpack_group<false>(index, start, end, groups, runs, stride, sources, factor, out);
    }
#endif
}
