// What every kernel file starts with: element types, vector accesses, reductions over a block, random numbers.
//
// No header of the CUDA toolkit is used, so that the run-time compiler alone is enough. A file is compiled once per
// element type, which it calls REAL.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY __int_as_float(0x7f800000)

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
__device__ __forceinline__ float widen(f16 v) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
    return wide;
}
__device__ __forceinline__ float widen(i64 v) { return float(v); }
__device__ __forceinline__ float widen(int v) { return float(v); }
__device__ __forceinline__ float widen(u8 v) { return float(v); }

template <class T> struct Narrow;
template <> struct Narrow<float> { __device__ static float from(float v) { return v; } };
template <> struct Narrow<bf16> {
    __device__ static bf16 from(float v) {
        bf16 r;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
        return r;
    }
};
template <> struct Narrow<f16> {
    __device__ static f16 from(float v) {
        f16 r;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
        return r;
    }
};
template <> struct Narrow<i64> { __device__ static i64 from(float v) { return i64(v); } };
template <> struct Narrow<int> { __device__ static int from(float v) { return int(v); } };
template <> struct Narrow<u8> { __device__ static u8 from(float v) { return u8(v); } };
template <class T> __device__ __forceinline__ T narrow(float v) { return Narrow<T>::from(v); }

// Eight neighbours, moved by as few instructions as their size allows.
template <class T> struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Pack { T v[8]; };
template <class T> __device__ __forceinline__ Pack<T> load8(const T* at) { return *(const Pack<T>*)at; }
template <class T> __device__ __forceinline__ void store8(T* at, const Pack<T>& pack) { *(Pack<T>*)at = pack; }

// Eight rounded at once: two 16-bit values take one instruction.
template <class T> struct Narrow8 {
    __device__ static Pack<T> from(const float* v) {
        Pack<T> pack;
        #pragma unroll
        for (int j = 0; j < 8; j++) pack.v[j] = narrow<T>(v[j]);
        return pack;
    }
};
template <> struct Narrow8<bf16> {
    __device__ static Pack<bf16> from(const float* v) {
        uint4 words;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words.x) : "f"(v[1]), "f"(v[0]));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words.y) : "f"(v[3]), "f"(v[2]));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words.z) : "f"(v[5]), "f"(v[4]));
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words.w) : "f"(v[7]), "f"(v[6]));
        return *(Pack<bf16>*)&words;
    }
};
template <> struct Narrow8<f16> {
    __device__ static Pack<f16> from(const float* v) {
        uint4 words;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words.x) : "f"(v[1]), "f"(v[0]));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words.y) : "f"(v[3]), "f"(v[2]));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words.z) : "f"(v[5]), "f"(v[4]));
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words.w) : "f"(v[7]), "f"(v[6]));
        return *(Pack<f16>*)&words;
    }
};
template <class T> __device__ __forceinline__ Pack<T> narrow8(const float* v) { return Narrow8<T>::from(v); }

__device__ __forceinline__ bool aligned16(const void* a) { return ((u64)a & 15) == 0; }
__device__ __forceinline__ bool aligned16(const void* a, const void* b) { return (((u64)a | (u64)b) & 15) == 0; }
__device__ __forceinline__ bool aligned16(const void* a, const void* b, const void* c) {
    return (((u64)a | (u64)b | (u64)c) & 15) == 0;
}

// Runs `eight(first element)` over whole packs where `wide`, `one(element)` over the rest, across the whole grid.
template <class Eight, class One>
__device__ __forceinline__ void spread(u64 count, bool wide, Eight eight, One one) {
    u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = gridDim.x * (u64)blockDim.x;
    u64 packs = wide ? count / 8 : 0;
    for (u64 p = thread; p < packs; p += threads) eight(p * 8);
    for (u64 i = packs * 8 + thread; i < count; i += threads) one(i);
}

// Of kernels that are launched to overlap: the next may be placed on the device while this one runs, and waits until all
// before it have ended. What it reads or writes before it waits must be nobody else's.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// Barriers in shared memory, at which threads and what is being copied there arrive; `turn` alternates with every use.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void open_barrier(u32 at, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(at), "r"(count) : "memory"); }
__device__ __forceinline__ void arrive(u32 at) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(at) : "memory"); }
__device__ __forceinline__ void expect(u32 at, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at), "r"(bytes) : "memory"); }
__device__ __forceinline__ void wait(u32 at, u32 turn) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" :: "r"(at), "r"(turn) : "memory");
}
#endif

__device__ __forceinline__ float warp_sum(float v) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// Reductions over all threads of a block (a multiple of 32, at most 1024); every thread gets the result. The order is
// fixed, so the same input gives the same bits.
template <class Op> __device__ __forceinline__ float block_reduce(float v, float neutral, Op op) {
    __shared__ float parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int step = 16; step > 0; step >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, step));
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    v = lane < warps ? parts[lane] : neutral;
    for (int step = 16; step > 0; step >>= 1) v = op(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}
__device__ __forceinline__ float block_sum(float v) {
    return block_reduce(v, 0.0f, [](float a, float b) { return a + b; });
}
__device__ __forceinline__ float block_max(float v) {
    return block_reduce(v, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
}

// Two sums for the price of one.
__device__ __forceinline__ void block_sum2(float& a, float& b) {
    __shared__ float parts[2][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    a = warp_sum(a);
    b = warp_sum(b);
    __syncthreads();
    if (lane == 0) {
        parts[0][warp] = a;
        parts[1][warp] = b;
    }
    __syncthreads();
    a = warp_sum(lane < warps ? parts[0][lane] : 0.0f);
    b = warp_sum(lane < warps ? parts[1][lane] : 0.0f);
}

// The same of doubles.
__device__ __forceinline__ double block_sum(double v) {
    __shared__ double parts[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    __syncthreads();
    if (lane == 0) parts[warp] = v;
    __syncthreads();
    v = 0.0;
    for (int w = 0; w < warps; w++) v += parts[w];
    return v;
}

// Tensors of a table are cut into chunks, numbered through; `first` is a tensor's first, `count` its elements.
template <class Piece> __device__ __forceinline__ const Piece& piece_of(const Piece* pieces, u32 number, u64 chunk) {
    u32 low = 0, high = number;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (pieces[middle].first <= chunk) low = middle; else high = middle;
    }
    return pieces[low];
}

// Of a block of 32 × 8 threads, each with the sums of 8 neighbouring columns: leaves partial[blockIdx.y, column].
__device__ __forceinline__ void leave_columns(const float* sums, u64 width, float* partial) {
    __shared__ float parts[8][257];
    #pragma unroll
    for (int j = 0; j < 8; j++) parts[threadIdx.y][threadIdx.x * 8 + j] = sums[j];
    __syncthreads();
    int thread = threadIdx.y * 32 + threadIdx.x;
    u64 own = blockIdx.x * 256ull + thread;
    float sum = 0.0f;
    for (int r = 0; r < 8; r++) sum += parts[r][thread];
    if (own < width) partial[blockIdx.y * width + own] = sum;
}

// Philox 4x32-10, the same numbers as the host's.
struct RandomKey { u64 seed; u32 stream; u32 step; };
struct Words { u32 w[4]; };
__device__ __forceinline__ Words random_block(RandomKey key, u64 index) {
    u32 c0 = u32(index), c1 = u32(index >> 32), c2 = key.stream, c3 = key.step;
    u32 k0 = u32(key.seed), k1 = u32(key.seed >> 32);
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{c0, c1, c2, c3}};
}
__device__ __forceinline__ u32 random_word(RandomKey key, u64 position) {
    return random_block(key, position / 4).w[position % 4];
}

// What a kernel leaves when an index is out of range: the first one found, by position.
struct Fault { u64 position; i64 index; u64 limit; u64 op; };
__device__ __forceinline__ u64 checked(i64 index, u64 position, u64 limit, u64 op, Fault* fault) {
    if (index >= 0 && u64(index) < limit) return u64(index);
    if (atomicCAS(&fault->op, 0ull, op) == 0) {
        fault->position = position;
        fault->index = index;
        fault->limit = limit;
    }
    return 0;
}

// Functions of one element, by the numbers that the host gives them.
enum { GELU_ERF, GELU_TANH, QUICK_GELU, SILU, RELU, TANH, SIGMOID, NEG, EXP, LOG, SQRT, SQUARE, ABS, RECIPROCAL, AFFINE, POWER };

// The exponential without what denormal results cost.
__device__ __forceinline__ float quick_exp(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950f));
    return power;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
// Within 2e-7 of the hyperbolic tangent, in a quarter of its instructions.
__device__ __forceinline__ float quick_tanh(float x) { return 1.0f - __fdividef(2.0f, __expf(fminf(2.0f * x, 80.0f)) + 1.0f); }

__device__ __forceinline__ float apply(int op, float x, float p, float q) {
    switch (op) {
        case GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case GELU_TANH: return 0.5f * x * (1.0f + quick_tanh(0.7978846f * (x + 0.044715f * x * x * x)));
        case QUICK_GELU: return x * sigmoid(1.702f * x);
        case SILU: return x * sigmoid(x);
        case RELU: return x <= 0.0f ? 0.0f : x;
        case TANH: return tanhf(x);
        case SIGMOID: return sigmoid(x);
        case NEG: return -x;
        case EXP: return expf(x);
        case LOG: return logf(x);
        case SQRT: return sqrtf(x);
        case SQUARE: return x * x;
        case ABS: return fabsf(x);
        case RECIPROCAL: return 1.0f / x;
        case AFFINE: return p * x + q;
        default: return powf(x, p);
    }
}

// A broadcast: the result's sizes, and each operand's strides seen from the result (0 where it is repeated).
struct Broadcast { u32 dims; u32 unused; u64 size[8]; u64 stride[3][8]; };
__device__ __forceinline__ u64 place(const Broadcast& b, int operand, u64 index) {
    u64 at = 0;
    for (int dim = int(b.dims) - 1; dim >= 0; dim--) {
        at += index % b.size[dim] * b.stride[operand][dim];
        index /= b.size[dim];
    }
    return at;
}
