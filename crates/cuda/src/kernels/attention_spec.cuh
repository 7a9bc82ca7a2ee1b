// A case of attention, and what a query and a key may know of each other in it. Kernels of `attention.cu` and `attention_any.cu` begin
// with this.
//
// Legend: b batch, h query head, t query, s key.

struct Heads { u64 batch, token, head; };
struct Spec {
    u64 batch, queries, keys, heads, kv_heads, dim;
    float scale;
    int causal;
    i64 window;  // 0: none
    const u8* key_mask;
    const float* slopes;
    const float* positions;
    u32 drop_threshold;
    float keep_scale;
    RandomKey key;
    int dropout;
    int unused;
    const i64* documents;  // [batch, tokens, 2]: where each token's document begins and ends; the queries are the keys
    i64 shift;             // where the first query stands among the keys
    u64 drawn[3];          // heads, queries and keys that dropout is drawn for together,
    u64 drawn_first[3];    // and which of them are the first here
};

__device__ __forceinline__ bool visible(const Spec& p, u64 b, u64 t, u64 s) {
    i64 position = i64(t) + p.shift;
    if (p.causal && i64(s) > position) return false;
    if (p.window && i64(s) <= position - p.window) return false;
    return !p.key_mask || p.key_mask[b * p.keys + s];
}
__device__ __forceinline__ float score(const Spec& p, u64 b, u64 h, u64 s, float product) {
    float v = product * p.scale;
    if (p.slopes) {
        u64 at = b * p.keys + s, first = p.documents ? p.documents[2 * at] : 0;
        v += p.slopes[h] * (p.positions ? p.positions[at] : float(s - first));
    }
    return v;
}
// What a probability is multiplied by.
__device__ __forceinline__ float kept(const Spec& p, u64 b, u64 h, u64 t, u64 s) {
    if (!p.dropout) return 1.0f;
    u64 head = b * p.drawn[0] + p.drawn_first[0] + h, query = head * p.drawn[1] + p.drawn_first[1] + t;
    u64 at = query * p.drawn[2] + p.drawn_first[2] + s;
    return random_word(p.key, at) >= p.drop_threshold ? p.keep_scale : 0.0f;
}
// What of `first..last` lies in the document of a token.
__device__ __forceinline__ void within_document(const Spec& p, u64 b, u64 token, i64& first, i64& last) {
    if (!p.documents) return;
    const i64* document = p.documents + 2 * (b * p.keys + token);
    first = first < document[0] ? document[0] : first;
    last = last > document[1] ? document[1] : last;
}
__device__ __forceinline__ void key_range(const Spec& p, u64 b, u64 t, u64& first, u64& last) {
    i64 position = i64(t) + p.shift;
    i64 end = p.causal ? position + 1 : i64(p.keys);
    end = end < 0 ? 0 : end > i64(p.keys) ? i64(p.keys) : end;
    i64 start = p.window ? position + 1 - p.window : 0;
    start = start < 0 ? 0 : start > end ? end : start;
    within_document(p, b, t, start, end);
    first = start;
    last = end;
}

