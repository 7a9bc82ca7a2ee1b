// Elementwise kernels: unary functions, activations and gates, sums, dropout, broadcasting.

__device__ __forceinline__ float derivative(int op, float x, float p) {
    switch (op) {
        case GELU_ERF: return 0.5f * (1.0f + erff(x * 0.70710678f)) + x * 0.3989423f * __expf(-0.5f * x * x);
        case GELU_TANH: {
            float t = quick_tanh(0.7978846f * (x + 0.044715f * x * x * x));
            float inner = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
            return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
        }
        case QUICK_GELU: {
            float s = sigmoid(1.702f * x);
            return s + 1.702f * x * s * (1.0f - s);
        }
        case SILU: {
            float s = sigmoid(x);
            return s + x * s * (1.0f - s);
        }
        case RELU: return x <= 0.0f ? 0.0f : 1.0f;
        case TANH: {
            float t = tanhf(x);
            return 1.0f - t * t;
        }
        case SIGMOID: {
            float s = sigmoid(x);
            return s * (1.0f - s);
        }
        case NEG: return -1.0f;
        case EXP: return expf(x);
        case LOG: return 1.0f / x;
        case SQRT: return 0.5f / sqrtf(x);
        case SQUARE: return 2.0f * x;
        case ABS: return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f);
        case RECIPROCAL: return -1.0f / (x * x);
        case AFFINE: return p;
        default: return p * powf(x, p - 1.0f);
    }
}

// Value and slope together: what they share is computed once.
__device__ __forceinline__ void apply_both(int op, float x, float* value, float* slope) {
    if (op == GELU_TANH) {
        float t = quick_tanh(0.7978846f * (x + 0.044715f * x * x * x)), half = 0.5f * (1.0f + t);
        *value = x * half;
        *slope = half + 0.5f * x * (1.0f - t * t) * (0.7978846f + 0.1070322f * x * x);
        return;
    }
    *value = apply(op, x, 0, 0);
    *slope = derivative(op, x, 0);
}

template <int OP> __device__ __forceinline__ void unary_by(u64 count, const REAL* x, REAL* y, int op, float p, float q) {
    spread(count, aligned16(x, y),
        [&](u64 i) {
            Pack<REAL> a = load8(x + i);
            float v[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) v[j] = apply(OP < 0 ? op : OP, widen(a.v[j]), p, q);
            store8(y + i, narrow8<REAL>(v));
        },
        [&](u64 i) { y[i] = narrow<REAL>(apply(OP < 0 ? op : OP, widen(x[i]), p, q)); });
}
extern "C" __global__ void unary(u64 count, const REAL* x, REAL* y, int op, float p, float q) {
    let_next_start();
    wait_for_earlier();
    // The one that training is full of has a loop of its own, in which nothing branches.
    if (op == GELU_TANH) unary_by<GELU_TANH>(count, x, y, op, p, q);
    else unary_by<-1>(count, x, y, op, p, q);
}

extern "C" __global__ void unary_backward(u64 count, const REAL* x, const REAL* dy, REAL* dx, int op, float p) {
    spread(count, aligned16(x, dy, dx),
        [&](u64 i) {
            Pack<REAL> a = load8(x + i), d = load8(dy + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) d.v[j] = narrow<REAL>(widen(d.v[j]) * derivative(op, widen(a.v[j]), p));
            store8(dx + i, d);
        },
        [&](u64 i) { dx[i] = narrow<REAL>(widen(dy[i]) * derivative(op, widen(x[i]), p)); });
}

extern "C" __global__ void gated(u64 count, const REAL* gate, const REAL* up, REAL* y, int op) {
    spread(count, aligned16(gate, up, y),
        [&](u64 i) {
            Pack<REAL> g = load8(gate + i), u = load8(up + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) g.v[j] = narrow<REAL>(apply(op, widen(g.v[j]), 0, 0) * widen(u.v[j]));
            store8(y + i, g);
        },
        [&](u64 i) { y[i] = narrow<REAL>(apply(op, widen(gate[i]), 0, 0) * widen(up[i])); });
}

extern "C" __global__ void gated_backward(u64 count, const REAL* gate, const REAL* up, const REAL* dy, REAL* dgate, REAL* dup, int op) {
    spread(count, aligned16(gate, up, dy) && aligned16(dgate, dup),
        [&](u64 i) {
            Pack<REAL> g = load8(gate + i), u = load8(up + i), d = load8(dy + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float gj = widen(g.v[j]), uj = widen(u.v[j]), dj = widen(d.v[j]);
                g.v[j] = narrow<REAL>(dj * uj * derivative(op, gj, 0));
                u.v[j] = narrow<REAL>(dj * apply(op, gj, 0, 0));
            }
            store8(dgate + i, g);
            store8(dup + i, u);
        },
        [&](u64 i) {
            float g = widen(gate[i]), u = widen(up[i]), d = widen(dy[i]);
            dgate[i] = narrow<REAL>(d * u * derivative(op, g, 0));
            dup[i] = narrow<REAL>(d * apply(op, g, 0, 0));
        });
}

// The gradients of gate and what it gates take their places, and the gated value, where it is rebuilt, that of its gradient.
extern "C" __global__ void gated_backward_in_place(u64 count, REAL* gate, REAL* up, REAL* dy, int op, int rebuilds) {
    spread(count, aligned16(gate, up, dy),
        [&](u64 i) {
            Pack<REAL> g = load8(gate + i), u = load8(up + i), d = load8(dy + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float value, slope, uj = widen(u.v[j]), dj = widen(d.v[j]);
                apply_both(op, widen(g.v[j]), &value, &slope);
                g.v[j] = narrow<REAL>(dj * uj * slope);
                u.v[j] = narrow<REAL>(dj * value);
                d.v[j] = narrow<REAL>(value * uj);
            }
            store8(gate + i, g);
            store8(up + i, u);
            if (rebuilds) store8(dy + i, d);
        },
        [&](u64 i) {
            float value, slope, u = widen(up[i]), d = widen(dy[i]);
            apply_both(op, widen(gate[i]), &value, &slope);
            gate[i] = narrow<REAL>(d * u * slope);
            up[i] = narrow<REAL>(d * value);
            if (rebuilds) dy[i] = narrow<REAL>(value * u);
        });
}

// The same where each row counts with a weight, that of its slot: the gradient of the weight is the sum of the row's gated values
// times their gradients, and the gated values become weighted ones. A block per row; those without a slot are zero already.
extern "C" __global__ void weighted_gated_backward(u64 width, const i64* order, const float* weights, REAL* gates, REAL* ups, REAL* dys,
                                                   float* dweights, int op) {
    i64 slot = order[blockIdx.x];
    if (slot < 0) return;
    REAL *gate = gates + blockIdx.x * width, *up = ups + blockIdx.x * width, *dy = dys + blockIdx.x * width;
    float weight = weights[slot], sum = 0.0f;
    auto turn = [&](REAL& g, REAL& u, REAL& d) {
        float value, slope, uj = widen(u), dj = widen(d);
        apply_both(op, widen(g), &value, &slope);
        float gated = value * uj;
        sum += gated * dj;
        g = narrow<REAL>(weight * dj * uj * slope);
        u = narrow<REAL>(weight * dj * value);
        d = narrow<REAL>(weight * gated);
    };
    u64 packs = width % 8 == 0 && aligned16(gate, up, dy) ? width / 8 : 0;
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack<REAL> g = load8(gate + p * 8), u = load8(up + p * 8), d = load8(dy + p * 8);
        #pragma unroll
        for (int j = 0; j < 8; j++) turn(g.v[j], u.v[j], d.v[j]);
        store8(gate + p * 8, g);
        store8(up + p * 8, u);
        store8(dy + p * 8, d);
    }
    for (u64 i = packs * 8 + threadIdx.x; i < width; i += blockDim.x) turn(gate[i], up[i], dy[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) dweights[slot] = sum;
}

// The value after an activation takes the place of the value before it, and its gradient that of the gradient.
extern "C" __global__ void activation_backward_in_place(u64 count, REAL* before, REAL* gradient, int op) {
    spread(count, aligned16(before, gradient),
        [&](u64 i) {
            Pack<REAL> a = load8(before + i), d = load8(gradient + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float value, slope;
                apply_both(op, widen(a.v[j]), &value, &slope);
                d.v[j] = narrow<REAL>(widen(d.v[j]) * slope);
                a.v[j] = narrow<REAL>(value);
            }
            store8(before + i, a);
            store8(gradient + i, d);
        },
        [&](u64 i) {
            float value, slope;
            apply_both(op, widen(before[i]), &value, &slope);
            gradient[i] = narrow<REAL>(widen(gradient[i]) * slope);
            before[i] = narrow<REAL>(value);
        });
}

// The same over whole packs, and the sums of the gradient's columns as `sum_rows_partial` leaves them. With `rebuilds`
// the value after the activation takes the place of the value before it; else it was kept, and `before` is only read.
// OP is the activation where it is known, so that nothing branches within.
template <int OP>
__device__ __forceinline__ void backward_slice(u64 first, u64 last, u64 width, u64 column, REAL* before, REAL* gradient, int op,
                                               int rebuilds, float* sums) {
    for (u64 r = first + threadIdx.y; r < last; r += 16) {
        // Two rows under way at a time.
        Pack<REAL> a[2], d[2];
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            if (r + 8 * k >= last) continue;
            a[k] = load8(before + (r + 8 * k) * width + column);
            d[k] = load8(gradient + (r + 8 * k) * width + column);
        }
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            if (r + 8 * k >= last) continue;
            u64 at = (r + 8 * k) * width + column;
            float value[8], through[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float slope;
                apply_both(OP < 0 ? op : OP, widen(a[k].v[j]), &value[j], &slope);
                through[j] = widen(d[k].v[j]) * slope;
            }
            d[k] = narrow8<REAL>(through);
            #pragma unroll
            for (int j = 0; j < 8; j++) sums[j] += widen(d[k].v[j]);
            store8(gradient + at, d[k]);
            if (rebuilds) store8(before + at, narrow8<REAL>(value));
        }
    }
}
extern "C" __global__ void __launch_bounds__(256, sizeof(REAL) == 2 ? 4 : 2) activation_backward_sums(u64 rows, u64 width, u64 slice_rows, REAL* before,
                                                                               REAL* gradient, int op, int rebuilds, float* partial) {
    let_next_start();
    wait_for_earlier();
    u64 column = (blockIdx.x * 32ull + threadIdx.x) * 8;
    u64 first = blockIdx.y * slice_rows, last = first + slice_rows < rows ? first + slice_rows : rows;
    float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (column < width) {
        if (op == GELU_TANH) backward_slice<GELU_TANH>(first, last, width, column, before, gradient, op, rebuilds, sums);
        else backward_slice<-1>(first, last, width, column, before, gradient, op, rebuilds, sums);
    }
    leave_columns(sums, width, partial);
}

extern "C" __global__ void add_assign(u64 count, REAL* target, const SOURCE* source) {
    spread(count, aligned16(target, source),
        [&](u64 i) {
            Pack<REAL> t = load8(target + i);
            Pack<SOURCE> s = load8(source + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) t.v[j] = narrow<REAL>(widen(t.v[j]) + widen(s.v[j]));
            store8(target + i, t);
        },
        [&](u64 i) { target[i] = narrow<REAL>(widen(target[i]) + widen(source[i])); });
}

extern "C" __global__ void dropout(u64 count, const REAL* x, REAL* y, u32 threshold, float scale, RandomKey key) {
    u64 blocks = (count + 3) / 4;
    for (u64 b = blockIdx.x * (u64)blockDim.x + threadIdx.x; b < blocks; b += gridDim.x * (u64)blockDim.x) {
        Words words = random_block(key, b);
        for (int lane = 0; lane < 4; lane++) {
            u64 i = b * 4 + lane;
            if (i < count) y[i] = narrow<REAL>(words.w[lane] >= threshold ? widen(x[i]) * scale : 0.0f);
        }
    }
}

// The same for rows of a larger tensor, each of which begins at an element of its own there.
extern "C" __global__ void dropout_rows(u64 count, u64 width, const i64* starts, const REAL* x, REAL* y, u32 threshold, float scale, RandomKey key) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        bool stays = random_word(key, u64(starts[i / width]) + i % width) >= threshold;
        y[i] = narrow<REAL>(stays ? widen(x[i]) * scale : 0.0f);
    }
}

__device__ __forceinline__ float combine(int op, float a, float b) {
    switch (op) {
        case 0: return a + b;
        case 1: return a - b;
        case 2: return a * b;
        case 3: return a / b;
        case 4: return a > b ? a : b;
        default: return a < b ? a : b;
    }
}

extern "C" __global__ void binary_same(u64 count, const REAL* a, const REAL* b, REAL* y, int op) {
    spread(count, aligned16(a, b, y),
        [&](u64 i) {
            Pack<REAL> l = load8(a + i), r = load8(b + i);
            #pragma unroll
            for (int j = 0; j < 8; j++) l.v[j] = narrow<REAL>(combine(op, widen(l.v[j]), widen(r.v[j])));
            store8(y + i, l);
        },
        [&](u64 i) { y[i] = narrow<REAL>(combine(op, widen(a[i]), widen(b[i]))); });
}

// `b` repeats with a period of its own length.
extern "C" __global__ void binary_repeat(u64 count, u64 period, const REAL* a, const REAL* b, REAL* y, int op) {
    spread(count, aligned16(a, b, y) && period % 8 == 0,
        [&](u64 i) {
            Pack<REAL> l = load8(a + i), r = load8(b + i % period);
            #pragma unroll
            for (int j = 0; j < 8; j++) l.v[j] = narrow<REAL>(combine(op, widen(l.v[j]), widen(r.v[j])));
            store8(y + i, l);
        },
        [&](u64 i) { y[i] = narrow<REAL>(combine(op, widen(a[i]), widen(b[i % period]))); });
}

extern "C" __global__ void binary_broadcast(u64 count, const REAL* a, const REAL* b, REAL* y, int op, Broadcast shape) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x)
        y[i] = narrow<REAL>(combine(op, widen(a[place(shape, 0, i)]), widen(b[place(shape, 1, i)])));
}

extern "C" __global__ void select_broadcast(u64 count, const u8* condition, const REAL* a, const REAL* b, REAL* y, Broadcast shape) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x)
        y[i] = condition[place(shape, 0, i)] ? a[place(shape, 1, i)] : b[place(shape, 2, i)];
}

// Sums x down to y: thread i owns y[i] and walks, in order, the elements of x that were broadcast from it. `own` are the
// dimensions of x that y keeps, `summed` those it lost.
extern "C" __global__ void sum_to(u64 count, u64 repeats, const REAL* x, REAL* y, Broadcast own, Broadcast summed) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        const REAL* start = x + place(own, 0, i);
        float sum = 0.0f;
        for (u64 r = 0; r < repeats; r++) sum += widen(start[place(summed, 0, r)]);
        y[i] = narrow<REAL>(sum);
    }
}
