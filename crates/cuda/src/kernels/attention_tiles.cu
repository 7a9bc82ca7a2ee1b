// What lies between the graphs that compute the gradients of attention in parts.

// target[head][row] = source[head * stride + row], where a head has `rows` rows.
extern "C" __global__ void take_rows(u64 count, u64 rows, const float* source, u64 stride, float* target) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x)
        target[i] = source[i / rows * stride + i % rows];
}

// sum[head][i] += part[head][i], or = where it begins; eight values at a time, `per_head` eights to a head of the part and
// `stride` to one of the sum.
extern "C" __global__ void add_tile(
    u64 count, u64 per_head, const REAL* part, float* sum, u64 stride, int begins
) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        float* at = sum + 8 * (i / per_head * stride + i % per_head);
        Pack<REAL> values = load8(part + 8 * i);
        Pack<float> total;
        if (!begins) total = load8(at);
        #pragma unroll
        for (int j = 0; j < 8; j++) total.v[j] = begins ? widen(values.v[j]) : total.v[j] + widen(values.v[j]);
        store8(at, total);
    }
}

// target[batch][token][head] = sum[batch][head][token], each of `eights` times eight channels.
extern "C" __global__ void write_sum(
    u64 count, u64 heads, u64 tokens, u64 eights, const float* sum, REAL* target,
    u64 batch_stride, u64 head_stride, u64 token_stride
) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        u64 eight = i % eights, token = i / eights % tokens, head = i / (eights * tokens);
        u64 at = head / heads * batch_stride + head % heads * head_stride + token * token_stride + 8 * eight;
        store8(target + at, Narrow8<REAL>::from(load8(sum + 8 * i).v));
    }
}
