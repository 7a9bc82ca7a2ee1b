// Optimizer steps in one pass over memory, and the two halves of an exact norm.
//
// The norm: squares scaled by a power of two are added as integers, whose sum has no order.

struct Update { int kind; int flag; float a, b, c, d, e, f, g, h; };
enum { ADAM, ADAMW, SGD, ADAGRAD, LION, LAMB_DIRECTION, LAMB_APPLY };

// KIND is the update where it is known, so that nothing branches within. What Adam rounds is spelled out: a weight has the
// same bits whether it is one of a pack or not.
template <int KIND> __device__ __forceinline__ float step(const Update& u, float w, float g, float* s) {
    switch (KIND < 0 ? u.kind : KIND) {
        case ADAM:
        case ADAMW: {
            // a beta1, b beta2, c 1-beta1, d 1-beta2, e eps, f decay, g step size, h the inverse root of the correction.
            if ((KIND < 0 ? u.kind : KIND) == ADAMW) w = fmaf(-u.f, w, w); else g = fmaf(u.f, w, g);
            s[0] = fmaf(u.a, s[0], u.c * g);
            s[1] = fmaf(u.b, s[1], u.d * g * g);
            float denominator = fmaf(sqrtf(s[1]), u.h, u.e);
            return fmaf(-u.g, s[0] / denominator, w);
        }
        case SGD: {
            // a momentum, b the share of the gradient that enters it, c decay, d learning rate; flag: Nesterov.
            g += u.c * w;
            if (STATES > 0) {
                s[0] = u.a * s[0] + u.b * g;
                g = u.flag ? g + u.a * s[0] : s[0];
            }
            return w - u.d * g;
        }
        case ADAGRAD:
            // a decay, b learning rate, c eps
            g += u.a * w;
            s[0] += g * g;
            return w - u.b * g / (sqrtf(s[0]) + u.c);
        case LION: {
            // a beta1, b beta2, c 1-beta1, d 1-beta2, e learning rate, f what is left of a weight
            float direction = u.a * s[0] + u.c * g;
            s[0] = u.b * s[0] + u.d * g;
            float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : 0.0f;
            return w * u.f - u.e * sign;
        }
        case LAMB_DIRECTION: {
            // a beta1, b beta2, c 1-beta1, d 1-beta2, e eps, f decay; flag: eps under the root
            s[0] = u.a * s[0] + u.c * g;
            s[1] = u.b * s[1] + u.d * g * g;
            float denominator = u.flag ? sqrtf(s[1] + u.e) : sqrtf(s[1]) + u.e;
            s[2] = s[0] / denominator + u.f * w;
            return w;
        }
        default: return w - u.a * g;
    }
}

// REAL is the gradient's type, COPY that of the 16-bit copy, STATES how many states there are.

// A stretch of weights with what belongs to it. Measuring needs only the gradient.
struct Piece { u64 first; u64 count; float* weights; const REAL* gradient; float* states[3]; COPY* copy; };

// Runs `pack(piece, first element)` over whole packs of SIZE where `wide(piece)`, `one(piece, element)` over the rest.
template <int SIZE, class Wide, class Whole, class One>
__device__ __forceinline__ void over(const Piece* pieces, u32 number, u64 chunks, Wide wide, Whole pack, One one) {
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece piece = piece_of(pieces, number, chunk);
        u64 start = (chunk - piece.first) * CHUNK;
        u64 end = start + CHUNK < piece.count ? start + CHUNK : piece.count;
        u64 packs = wide(piece) ? (end - start) / SIZE : 0;
        for (u64 p = threadIdx.x; p < packs; p += blockDim.x) pack(piece, start + p * SIZE);
        for (u64 i = start + packs * SIZE + threadIdx.x; i < end; i += blockDim.x) one(piece, i);
    }
}

// What is known of all gradients before weights are updated: the largest magnitude, as bits, the sum of squares in two parts,
// what gradients are multiplied by, and whether one of them is no number.
struct Verdict { u32 largest; u32 is_bad; u64 parts[2]; float factor; u32 unused; };

// The power of two that brings the square of a magnitude to between 2^50 and 2^52.
__device__ __forceinline__ double grid_of(u32 largest) {
    if (largest == 0 || largest >= 0x7f800000u) return 1.0;
    i64 exponent = (__double_as_longlong(double(__uint_as_float(largest))) >> 52) - 1023;
    return __longlong_as_double((1023 + 50 - 2 * exponent) << 52);
}

// The clipping of `Clipping::factor` on the host, to the same bits. No limit is an infinite one.
extern "C" __global__ void judge(Verdict* verdict, double loss_scale, double limit) {
    // Below 2^53 elements the upper part is exact as a double, and so the sum is rounded once.
    u64 low = verdict->parts[0], high = verdict->parts[1] + (low >> 32);
    double sum = fma(double(high), 4294967296.0, double(low & 0xffffffffu));
    double norm = sqrt(sum / grid_of(verdict->largest)) / loss_scale;
    double clip = fmin(limit / (norm + 1e-6), 1.0);
    verdict->factor = float(clip / loss_scale);
    verdict->is_bad = verdict->largest >= 0x7f800000u;
}

// Four neighbours: a thread's sixteen bytes of f32 then lie beside the next thread's, which packs of eight, moved in two
// halves, would keep apart.
template <class T> struct alignas(sizeof(T) * 4) Quad { T v[4]; };
template <class T> __device__ __forceinline__ Quad<T> load4(const T* at) { return *(const Quad<T>*)at; }
template <class T> __device__ __forceinline__ void store4(T* at, const Quad<T>& quad) { *(Quad<T>*)at = quad; }

template <int KIND>
__device__ __forceinline__ void update_all(const Piece* pieces, u32 number, u64 chunks, const Update& update, float factor) {
    over<4>(pieces, number, chunks,
        [&](const Piece& p) {
            return aligned16(p.weights, p.gradient, p.copy) && (STATES < 1 || aligned16(p.states[0])) &&
                   (STATES < 2 || aligned16(p.states[1])) && (STATES < 3 || aligned16(p.states[2]));
        },
        [&](const Piece& p, u64 i) {
            Quad<float> w = load4(p.weights + i), s[STATES + 1];
            Quad<REAL> g = load4(p.gradient + i);
            #pragma unroll
            for (int k = 0; k < STATES; k++) s[k] = load4(p.states[k] + i);
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                float own[STATES + 1];
                #pragma unroll
                for (int k = 0; k < STATES; k++) own[k] = s[k].v[j];
                w.v[j] = step<KIND>(update, w.v[j], widen(g.v[j]) * factor, own);
                #pragma unroll
                for (int k = 0; k < STATES; k++) s[k].v[j] = own[k];
            }
            store4(p.weights + i, w);
            #pragma unroll
            for (int k = 0; k < STATES; k++) store4(p.states[k] + i, s[k]);
            if (p.copy) {
                Quad<COPY> rounded;
                #pragma unroll
                for (int j = 0; j < 4; j++) rounded.v[j] = narrow<COPY>(w.v[j]);
                store4(p.copy + i, rounded);
            }
        },
        [&](const Piece& p, u64 i) {
            float own[STATES + 1];
            #pragma unroll
            for (int k = 0; k < STATES; k++) own[k] = p.states[k][i];
            float w = step<KIND>(update, p.weights[i], widen(p.gradient[i]) * factor, own);
            p.weights[i] = w;
            #pragma unroll
            for (int k = 0; k < STATES; k++) p.states[k][i] = own[k];
            if (p.copy) p.copy[i] = narrow<COPY>(w);
        });
}

// The factor is that of `verdict` where there is one.
extern "C" __global__ void optimizer_step(const Piece* pieces, u32 number, u64 chunks, Update update, float factor, const Verdict* verdict) {
    if (verdict) {
        if (verdict->is_bad) return;
        factor = verdict->factor;
    }
    if (STATES == 2 && update.kind == ADAMW) update_all<ADAMW>(pieces, number, chunks, update, factor);
    else update_all<-1>(pieces, number, chunks, update, factor);
}

// The largest magnitude as bits: among non-negative floats the order is that of their bits, NaN and infinity on top.
extern "C" __global__ void largest_magnitude(const Piece* pieces, u32 number, u64 chunks, u32* most) {
    u32 own = 0;
    over<8>(pieces, number, chunks, [&](const Piece& p) { return aligned16(p.gradient); },
        [&](const Piece& p, u64 i) {
            Pack<REAL> a = load8(p.gradient + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) own = max(own, __float_as_uint(widen(a.v[j])) & 0x7fffffffu);
        },
        [&](const Piece& p, u64 i) { own = max(own, __float_as_uint(widen(p.gradient[i])) & 0x7fffffffu); });
    for (int step = 16; step > 0; step >>= 1) own = max(own, __shfl_xor_sync(0xffffffffu, own, step));
    if ((threadIdx.x & 31) == 0) atomicMax(most, own);
}

// Σ (x²·grid) as integers: parts[0] collects the low 32 bits, parts[1] what is above. Without a grid it is that of `largest`.
extern "C" __global__ void sum_squares(const Piece* pieces, u32 number, u64 chunks, double grid, const u32* largest, u64* parts) {
    u64 low = 0, high = 0;
    if (largest) grid = grid_of(*largest);
    // The product is exact and below 2^52: with 2^52 added it is rounded to an integer, to even in between, and that is the
    // mantissa. A conversion would take longer than reading the gradient.
    auto square = [&](float v) {
        double wide = v, base = 4503599627370496.0;
        return u64(__double_as_longlong(fma(wide * wide, grid, base)) - __double_as_longlong(base));
    };
    auto take = [&](u64 sum) {
        low += sum & 0xffffffffu;
        high += sum >> 32;
    };
    over<8>(pieces, number, chunks, [&](const Piece& p) { return aligned16(p.gradient); },
        [&](const Piece& p, u64 i) {
            Pack<REAL> a = load8(p.gradient + i);
            u64 sum = 0;
            #pragma unroll
            for (int j = 0; j < 8; j++) sum += square(widen(a.v[j]));
            take(sum);
        },
        [&](const Piece& p, u64 i) { take(square(widen(p.gradient[i]))); });
    for (int step = 16; step > 0; step >>= 1) {
        low += __shfl_xor_sync(0xffffffffu, low, step);
        high += __shfl_xor_sync(0xffffffffu, high, step);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(&parts[0], low);
        atomicAdd(&parts[1], high);
    }
}
