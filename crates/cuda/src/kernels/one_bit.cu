// The passes of optimizers that exchange momentum at one bit per value, over whole parameters.
//
// REAL is the gradient's type, COPY that of the 16-bit copy. What a pass does is said where the host names it
// (`backend/one_bit.rs`).

struct Piece {
    u64 first, count;
    float* weights;
    const REAL* gradient;
    float* m;
    float* v;
    float* third;
    float* values;
    COPY* copy;
    float number;
    u32 unused;
};

struct Pass { float beta1, beta2, rest1, rest2, lr, decay, eps, factor; };

// Runs `each(piece, element)` over all elements.
template <class Each> __device__ __forceinline__ void over(const Piece* pieces, u32 number, u64 chunks, Each each) {
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece p = piece_of(pieces, number, chunk);
        u64 start = (chunk - p.first) * CHUNK;
        u64 end = start + CHUNK < p.count ? start + CHUNK : p.count;
        #pragma unroll 4
        for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) each(p, i);
    }
}

// What a pass measures: two sums of squares and a largest value.
struct Measures { double a, b, most; };

// The same with `each(piece, element, measures)`, which leaves the measures of each chunk.
template <class Each>
__device__ __forceinline__ void measured(const Piece* pieces, u32 number, u64 chunks, Measures* parts, Each each) {
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece p = piece_of(pieces, number, chunk);
        u64 start = (chunk - p.first) * CHUNK;
        u64 end = start + CHUNK < p.count ? start + CHUNK : p.count;
        Measures own = {0.0, 0.0, 0.0};
        for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) each(p, i, own);
        own.a = block_sum(own.a);
        own.b = block_sum(own.b);
        own.most = block_max(float(own.most));
        if (threadIdx.x == 0) parts[chunk] = own;
    }
}

// The measures of each piece, a block to a piece.
extern "C" __global__ void settle_measures(const Piece* pieces, const Measures* parts, Measures* all) {
    const Piece p = pieces[blockIdx.x];
    u64 chunks = (p.count + CHUNK - 1) / CHUNK;
    Measures own = {0.0, 0.0, 0.0};
    for (u64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
        const Measures part = parts[p.first + chunk];
        own.a += part.a;
        own.b += part.b;
        own.most = fmax(own.most, part.most);
    }
    own.a = block_sum(own.a);
    own.b = block_sum(own.b);
    own.most = block_max(float(own.most));
    if (threadIdx.x == 0) all[blockIdx.x] = own;
}

__device__ __forceinline__ double squared(float v) { return double(v) * double(v); }

// An averaged value, but nothing where a weight never had a gradient.
__device__ __forceinline__ float known(float averaged, float v) { return v == 0.0f ? 0.0f : averaged; }

// By how much a weight becomes less. Rounded once, so that what is subtracted in two places is the same.
__device__ __forceinline__ float step_of(const Pass& o, float w, float m, float v) {
    return __fmul_rn(o.lr, m / (sqrtf(v) + o.eps) + o.decay * w);
}

__device__ __forceinline__ void put(const Piece& p, u64 i, float w) {
    p.weights[i] = w;
    if (p.copy) p.copy[i] = narrow<COPY>(w);
}

extern "C" __global__ void give_momentum(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) {
        p.values[i] = (o.beta1 * p.m[i] + o.rest1 * (widen(p.gradient[i]) * o.factor)) * p.number;
    });
}

extern "C" __global__ void take(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) {
        float v = p.v[i], w = p.weights[i];
        float m = o.beta1 * p.m[i] + o.rest1 * known(p.values[i], v);
        p.m[i] = m;
        put(p, i, w - step_of(o, w, m, v));
    });
}

extern "C" __global__ void travel(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) {
        float w = p.weights[i];
        float m = o.beta1 * p.m[i] + o.rest1 * (widen(p.gradient[i]) * o.factor);
        float step = step_of(o, w, m, p.v[i]);
        p.m[i] = m;
        p.third[i] -= step;
        put(p, i, w - step);
    });
}

extern "C" __global__ void go_back(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) {
        float way = p.third[i];
        p.weights[i] -= way;
        p.values[i] = way * (sqrtf(p.v[i]) + o.eps);
    });
}

extern "C" __global__ void arrive(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) {
        float v = p.v[i], way = known(p.values[i], v);
        p.m[i] = -way / p.number;
        p.third[i] = 0.0f;
        put(p, i, p.weights[i] + way / (sqrtf(v) + o.eps));
    });
}

extern "C" __global__ void sizes(const Piece* pieces, u32 number, u64 chunks, Pass o, Measures* parts) {
    measured(pieces, number, chunks, parts, [&](const Piece& p, u64 i, Measures& own) { own.a += squared(p.m[i]); });
}

extern "C" __global__ void direct(const Piece* pieces, u32 number, u64 chunks, Pass o, Measures* parts) {
    measured(pieces, number, chunks, parts, [&](const Piece& p, u64 i, Measures& own) {
        float g = widen(p.gradient[i]) * o.factor, w = p.weights[i];
        float m = o.beta1 * p.m[i] + o.rest1 * g, v = o.beta2 * p.v[i] + o.rest2 * g * g;
        float direction = m / (sqrtf(v) + o.eps) + o.decay * w;
        p.m[i] = m;
        p.v[i] = v;
        if (p.third) p.third[i] = v;
        p.values[i] = direction;
        own.a += squared(w);
        own.b += squared(direction);
    });
}

extern "C" __global__ void correct(const Piece* pieces, u32 number, u64 chunks, Pass o, Measures* parts) {
    measured(pieces, number, chunks, parts, [&](const Piece& p, u64 i, Measures& own) {
        float v = p.v[i], m = known(p.values[i] / p.number, v), root = sqrtf(v) + o.eps;
        float g = (m - o.beta1 * p.m[i]) / o.rest1;
        float fresh = o.beta2 * p.third[i] + o.rest2 * g * g;
        float direction = m / root, all = direction + o.decay * p.weights[i];
        p.m[i] = m;
        p.third[i] = fresh;
        p.values[i] = all;
        own.a += squared(direction);
        own.b += squared(all);
        own.most = fmax(own.most, double(root / (sqrtf(fresh) + o.eps)));
    });
}

extern "C" __global__ void follow(const Piece* pieces, u32 number, u64 chunks, Pass o) {
    over(pieces, number, chunks, [&](const Piece& p, u64 i) { put(p, i, p.weights[i] - p.number * p.values[i]); });
}
