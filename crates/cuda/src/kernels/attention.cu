// Attention for every case: any element type, head width up to 256, masks, windows, documents, ALiBi, dropout, shared key
// heads.
//
// One block per query (forward, dq) or per key (dk, dv); its warps share the other side's tokens and join at the end in
// a fixed order. The tensor-core path for the usual cases is elsewhere; this one is the reference on the device.
//
// Legend: b batch, h query head, t query, s key, d channel. A lane owns LANES channels: lane, lane + 32, ….

#define AHEAD 4  // keys that a warp of the forward kernel has under way at once

extern __shared__ float joined[];  // warps × (dim + 2) in forward, warps × dim in backward

__device__ __forceinline__ void load_row(float* out, const REAL* row, u64 dim, int lane) {
    #pragma unroll
    for (int j = 0; j < LANES; j++) out[j] = lane + 32 * j < dim ? widen(row[lane + 32 * j]) : 0.0f;
}
__device__ __forceinline__ float dot(const float* a, const float* b) {
    float sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < LANES; j++) sum += a[j] * b[j];
    return warp_sum(sum);
}
// One query over its keys. `newest` and `newest_value` are the last key and value where they are not with the others yet.
__device__ __forceinline__ void attend(const Spec& p, u64 b, u64 h, u64 t, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs,
                                       const REAL* newest, const REAL* newest_value, REAL* out, Heads os, float* lse) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u64 kv = h / (p.heads / p.kv_heads), first, last;
    float row[LANES], sum[LANES] = {};
    load_row(row, q + b * qs.batch + t * qs.token + h * qs.head, p.dim, lane);
    key_range(p, b, t, first, last);
    float largest = -INFINITY, total = 0.0f;
    const REAL *keys = k + b * ks.batch + kv * ks.head, *values = v + b * vs.batch + kv * vs.head;
    for (u64 s = first + warp * AHEAD; s < last; s += warps * AHEAD) {
        float key[AHEAD][LANES], value[AHEAD][LANES], scores[AHEAD], most = largest;
        #pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            u64 at = s + u < last ? s + u : s;
            bool apart = newest && at + 1 == p.keys;
            load_row(key[u], apart ? newest : keys + at * ks.token, p.dim, lane);
            load_row(value[u], apart ? newest_value : values + at * vs.token, p.dim, lane);
        }
        #pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            float product = dot(row, key[u]);
            scores[u] = s + u < last && visible(p, b, t, s + u) ? score(p, b, h, s + u, product) : -INFINITY;
            most = fmaxf(most, scores[u]);
        }
        if (most == -INFINITY) continue;
        float shrink = expf(largest - most);
        total *= shrink;
        #pragma unroll
        for (int j = 0; j < LANES; j++) sum[j] *= shrink;
        largest = most;
        #pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            float weight = expf(scores[u] - most);
            total += weight;
            weight *= s + u < last ? kept(p, b, h, t, s + u) : 0.0f;
            #pragma unroll
            for (int j = 0; j < LANES; j++) sum[j] += weight * value[u][j];
        }
    }
    float* own = joined + warp * (p.dim + 2);
    if (lane == 0) {
        own[p.dim] = largest;
        own[p.dim + 1] = total;
    }
    #pragma unroll
    for (int j = 0; j < LANES; j++) if (lane + 32 * j < p.dim) own[lane + 32 * j] = sum[j];
    __syncthreads();
    float most = -INFINITY, all = 0.0f;
    for (int w = 0; w < warps; w++) most = fmaxf(most, joined[w * (p.dim + 2) + p.dim]);
    float shift = most == -INFINITY ? 0.0f : most;
    for (int w = 0; w < warps; w++) all += joined[w * (p.dim + 2) + p.dim + 1] * expf(joined[w * (p.dim + 2) + p.dim] - shift);
    float inverse = all > 0.0f ? 1.0f / all : 0.0f;
    REAL* target = out + b * os.batch + t * os.token + h * os.head;
    for (u64 d = threadIdx.x; d < p.dim; d += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < warps; w++) value += joined[w * (p.dim + 2) + d] * expf(joined[w * (p.dim + 2) + p.dim] - shift);
        target[d] = narrow<REAL>(value * inverse);
    }
    if (lse && threadIdx.x == 0) lse[blockIdx.x] = most + logf(all);
}

extern "C" __global__ void attention_forward(Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs,
                                             REAL* out, Heads os, float* lse) {
    u64 t = blockIdx.x % p.queries, h = blockIdx.x / p.queries % p.heads, b = blockIdx.x / (p.queries * p.heads);
    attend(p, b, h, t, q, qs, k, ks, v, vs, nullptr, nullptr, out, os, lse);
}

// One new token per sequence, appended to the caches at `place`. A block per query head; the first head of those that
// share a key head writes the cache, and all read the new key and value where they were computed.
extern "C" __global__ void attention_step(Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs,
                                          REAL* keys, Heads kcs, REAL* values, Heads vcs, const i64* place, REAL* out, Heads os) {
    let_next_start();
    wait_for_earlier();
    u64 h = blockIdx.x % p.heads, b = blockIdx.x / p.heads, group = p.heads / p.kv_heads, kv = h / group, past = *place;
    if (past >= p.keys) return;  // the host has checked that there is room
    p.keys = past + 1;
    p.shift = past;
    const REAL *key = k + b * ks.batch + kv * ks.head, *value = v + b * vs.batch + kv * vs.head;
    if (h % group == 0) {
        for (u64 d = threadIdx.x; d < p.dim; d += blockDim.x) {
            keys[b * kcs.batch + past * kcs.token + kv * kcs.head + d] = key[d];
            values[b * vcs.batch + past * vcs.token + kv * vcs.head + d] = value[d];
        }
    }
    attend(p, b, h, 0, q, qs, keys, kcs, values, vcs, key, value, out, os, nullptr);
}

// delta[b, h, t] = Σ dout·out. One warp each.
extern "C" __global__ void attention_delta(Spec p, const REAL* out, Heads os, const REAL* dout, Heads ds, float* delta) {
    int lane = threadIdx.x & 31;
    u64 index = blockIdx.x * (u64)(blockDim.x >> 5) + (threadIdx.x >> 5);
    if (index >= p.batch * p.heads * p.queries) return;
    u64 t = index % p.queries, h = index / p.queries % p.heads, b = index / (p.queries * p.heads);
    float a[LANES], c[LANES];
    load_row(a, out + b * os.batch + t * os.token + h * os.head, p.dim, lane);
    load_row(c, dout + b * ds.batch + t * ds.token + h * ds.head, p.dim, lane);
    float sum = dot(a, c);
    if (lane == 0) delta[index] = sum;
}

// Joins the warps' sums into a row.
__device__ __forceinline__ void join(const Spec& p, const float* sum, REAL* target, float scale) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < LANES; j++) if (lane + 32 * j < p.dim) joined[warp * p.dim + lane + 32 * j] = sum[j];
    __syncthreads();
    for (u64 d = threadIdx.x; d < p.dim; d += blockDim.x) {
        float value = 0.0f;
        for (int w = 0; w < warps; w++) value += joined[w * p.dim + d];
        target[d] = narrow<REAL>(value * scale);
    }
}

extern "C" __global__ void attention_dq(Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs,
                                        const REAL* dout, Heads ds, const float* lse, const float* delta, REAL* dq, Heads dqs) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u64 t = blockIdx.x % p.queries, h = blockIdx.x / p.queries % p.heads, b = blockIdx.x / (p.queries * p.heads);
    u64 kv = h / (p.heads / p.kv_heads), first, last;
    float row[LANES], grad[LANES], sum[LANES] = {}, key[LANES], value[LANES];
    load_row(row, q + b * qs.batch + t * qs.token + h * qs.head, p.dim, lane);
    load_row(grad, dout + b * ds.batch + t * ds.token + h * ds.head, p.dim, lane);
    float own_lse = lse[blockIdx.x], own_delta = delta[blockIdx.x];
    key_range(p, b, t, first, last);
    for (u64 s = first + warp; s < last && own_lse > -INFINITY; s += warps) {
        if (!visible(p, b, t, s)) continue;
        load_row(key, k + b * ks.batch + s * ks.token + kv * ks.head, p.dim, lane);
        load_row(value, v + b * vs.batch + s * vs.token + kv * vs.head, p.dim, lane);
        float probability = expf(score(p, b, h, s, dot(row, key)) - own_lse);
        float d = probability * (dot(grad, value) * kept(p, b, h, t, s) - own_delta);
        #pragma unroll
        for (int j = 0; j < LANES; j++) sum[j] += d * key[j];
    }
    join(p, sum, dq + b * dqs.batch + t * dqs.token + h * dqs.head, p.scale);
}

extern "C" __global__ void attention_dkv(Spec p, const REAL* q, Heads qs, const REAL* k, Heads ks, const REAL* v, Heads vs,
                                         const REAL* dout, Heads ds, const float* lse, const float* delta,
                                         REAL* dk, Heads dks, REAL* dv, Heads dvs) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u64 s = blockIdx.x % p.keys, kv = blockIdx.x / p.keys % p.kv_heads, b = blockIdx.x / (p.keys * p.kv_heads);
    u64 group = p.heads / p.kv_heads;
    float key[LANES], value[LANES], dkey[LANES] = {}, dvalue[LANES] = {}, row[LANES], grad[LANES];
    load_row(key, k + b * ks.batch + s * ks.token + kv * ks.head, p.dim, lane);
    load_row(value, v + b * vs.batch + s * vs.token + kv * vs.head, p.dim, lane);
    i64 first = p.causal ? i64(s) - p.shift : 0, last = p.window ? i64(s) - p.shift + p.window : i64(p.queries);
    first = first < 0 ? 0 : first;
    last = last > i64(p.queries) ? i64(p.queries) : last;
    within_document(p, b, s, first, last);
    for (u64 h = kv * group; h < (kv + 1) * group; h++) {
        for (i64 t = first + warp; t < last; t += warps) {
            if (!visible(p, b, t, s)) continue;
            u64 index = (b * p.heads + h) * p.queries + t;
            if (lse[index] == -INFINITY) continue;
            load_row(row, q + b * qs.batch + t * qs.token + h * qs.head, p.dim, lane);
            load_row(grad, dout + b * ds.batch + t * ds.token + h * ds.head, p.dim, lane);
            float probability = expf(score(p, b, h, s, dot(row, key)) - lse[index]);
            float factor = kept(p, b, h, t, s);
            float d = probability * (dot(grad, value) * factor - delta[index]);
            #pragma unroll
            for (int j = 0; j < LANES; j++) {
                dkey[j] += d * row[j];
                dvalue[j] += probability * factor * grad[j];
            }
        }
    }
    join(p, dkey, dk + b * dks.batch + s * dks.token + kv * dks.head, p.scale);
    join(p, dvalue, dv + b * dvs.batch + s * dvs.token + kv * dvs.head, 1.0f);
}

// Rotates pairs of channels in place; a sign of -1 rotates back.
extern "C" __global__ void rotary(u64 count, u64 tokens, u64 heads, u64 pairs, REAL* x, Heads xs, const float* cosine, const float* sine,
                                  int per_sequence, int interleaved, float sign) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 pair = i % pairs, h = i / pairs % heads, t = i / (pairs * heads) % tokens, b = i / (pairs * heads * tokens);
        u64 at = ((per_sequence ? b * tokens : 0) + t) * pairs + pair;
        REAL* row = x + b * xs.batch + t * xs.token + h * xs.head;
        u64 one = interleaved ? 2 * pair : pair, two = interleaved ? 2 * pair + 1 : pair + pairs;
        float a = widen(row[one]), c = widen(row[two]), cs = cosine[at], sn = sign * sine[at];
        row[one] = narrow<REAL>(a * cs - c * sn);
        row[two] = narrow<REAL>(c * cs + a * sn);
    }
}

// The same for pairs of halves, eight pairs at a time.
extern "C" __global__ void rotary_halves(u64 count, u64 tokens, u64 heads, u64 pairs, REAL* x, Heads xs, const float* cosine,
                                         const float* sine, int per_sequence, float sign) {
    u64 eights = pairs / 8;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        u64 pair = i % eights * 8, h = i / eights % heads, t = i / (eights * heads) % tokens, b = i / (eights * heads * tokens);
        u64 at = ((per_sequence ? b * tokens : 0) + t) * pairs + pair;
        REAL* row = x + b * xs.batch + t * xs.token + h * xs.head + pair;
        Pack<REAL> left = load8(row), right = load8(row + pairs);
        Pack<float> cs = load8(cosine + at), sn = load8(sine + at);
        float one[8], two[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float a = widen(left.v[j]), c = widen(right.v[j]), s = sign * sn.v[j];
            one[j] = a * cs.v[j] - c * s;
            two[j] = c * cs.v[j] + a * s;
        }
        store8(row, Narrow8<REAL>::from(one));
        store8(row + pairs, Narrow8<REAL>::from(two));
    }
}
