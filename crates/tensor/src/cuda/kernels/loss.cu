// Cross-entropy over rows of logits; the gradient takes the place of the logits.

struct LossSpec { i64 ignore_index; float smoothing; float z_loss; };

extern "C" __global__ void cross_entropy(u64 classes, REAL* logits, const i64* targets, float* losses, LossSpec spec,
                                         int with_gradient, u64 op, Fault* fault) {
    REAL* row = logits + blockIdx.x * classes;
    i64 target = targets[blockIdx.x];
    bool wide = aligned16(row) && classes % 8 == 0;
    u64 packs = wide ? classes / 8 : 0;
    if (target == spec.ignore_index) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        if (with_gradient) for (u64 i = threadIdx.x; i < classes; i += blockDim.x) row[i] = narrow<REAL>(0.0f);
        return;
    }
    u64 chosen = checked(target, blockIdx.x, classes, op, fault);
    float target_logit = widen(row[chosen]);
    // Maximum and sum in one pass: what was summed is rescaled when a larger value comes.
    float largest = -INFINITY, total = 0.0f, plain = 0.0f;
    auto take = [&](float v) {
        if (v > largest) {
            total *= __expf(largest - v);
            largest = v;
        }
        total += largest == -INFINITY ? 0.0f : __expf(v - largest);
        plain += v;
    };
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack<REAL> a = load8(row + p * 8);
        float v[8], most = -INFINITY;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = widen(a.v[j]);
            most = fmaxf(most, v[j]);
            plain += v[j];
        }
        if (most > largest) {
            total *= __expf(largest - most);
            largest = most;
        }
        if (largest > -INFINITY) {
            #pragma unroll
            for (int j = 0; j < 8; j++) total += __expf(v[j] - largest);
        }
    }
    for (u64 i = packs * 8 + threadIdx.x; i < classes; i += blockDim.x) take(widen(row[i]));
    float most = block_max(largest);
    total = block_sum(largest == -INFINITY ? 0.0f : total * __expf(largest - most));
    float mean_logit = spec.smoothing > 0.0f ? block_sum(plain) / classes : 0.0f;
    float log_total = most + logf(total);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = log_total - (1.0f - spec.smoothing) * target_logit - spec.smoothing * mean_logit + spec.z_loss * log_total * log_total;
    if (!with_gradient) return;
    // d loss / d logit = p·(1 + 2·z·logsumexp) - (1-s)·[target] - s/classes
    float scale = (1.0f + 2.0f * spec.z_loss * log_total) / total;
    float uniform = spec.smoothing / classes, hit = 1.0f - spec.smoothing;
    for (u64 p = threadIdx.x; p < packs; p += blockDim.x) {
        Pack<REAL> a = load8(row + p * 8);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float g = __expf(widen(a.v[j]) - most) * scale - uniform;
            a.v[j] = narrow<REAL>(p * 8 + j == chosen ? g - hit : g);
        }
        store8(row + p * 8, a);
    }
    for (u64 i = packs * 8 + threadIdx.x; i < classes; i += blockDim.x) {
        float g = __expf(widen(row[i]) - most) * scale - uniform;
        row[i] = narrow<REAL>(i == chosen ? g - hit : g);
    }
}

// The same where the whole row stays in the registers of 1,024 threads: one read, one write.
#define HELD 7
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_held(u64 classes, REAL* logits, const i64* targets, float* losses,
                                                                      LossSpec spec, int with_gradient, u64 op, Fault* fault) {
    REAL* row = logits + blockIdx.x * classes;
    i64 target = targets[blockIdx.x];
    int packs = int(classes / 8);
    Pack<REAL> held[HELD];
    if (target == spec.ignore_index) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        if (!with_gradient) return;
        #pragma unroll
        for (int j = 0; j < 8; j++) held[0].v[j] = narrow<REAL>(0.0f);
        for (int p = threadIdx.x; p < packs; p += 1024) store8(row + p * 8, held[0]);
        return;
    }
    u64 chosen = checked(target, blockIdx.x, classes, op, fault);
    float target_logit = widen(row[chosen]);
    float largest = -INFINITY, plain = 0.0f;
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        int p = h * 1024 + threadIdx.x;
        if (p < packs) held[h] = load8(row + p * 8);
    }
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        if (h * 1024 + int(threadIdx.x) >= packs) continue;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float v = widen(held[h].v[j]);
            largest = fmaxf(largest, v);
            plain += v;
        }
    }
    float most = block_max(largest), total = 0.0f;
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        if (h * 1024 + int(threadIdx.x) >= packs) continue;
        #pragma unroll
        for (int j = 0; j < 8; j++) total += __expf(widen(held[h].v[j]) - most);
    }
    total = block_sum(total);
    float mean_logit = spec.smoothing > 0.0f ? block_sum(plain) / classes : 0.0f;
    float log_total = most + logf(total);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = log_total - (1.0f - spec.smoothing) * target_logit - spec.smoothing * mean_logit + spec.z_loss * log_total * log_total;
    if (!with_gradient) return;
    float scale = (1.0f + 2.0f * spec.z_loss * log_total) / total;
    float uniform = spec.smoothing / classes, hit = 1.0f - spec.smoothing;
    #pragma unroll
    for (int h = 0; h < HELD; h++) {
        int p = h * 1024 + threadIdx.x;
        if (p >= packs) continue;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float g = __expf(widen(held[h].v[j]) - most) * scale - uniform;
            held[h].v[j] = narrow<REAL>(p * 8 + j == chosen ? g - hit : g);
        }
        store8(row + p * 8, held[h]);
    }
}

// How many targets count; one block.
extern "C" __global__ void count_targets(u64 count, const i64* targets, i64 ignore_index, i64* counted) {
    __shared__ u32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u32 own = 0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) own += targets[i] != ignore_index;
    atomicAdd(&total, own);
    __syncthreads();
    if (threadIdx.x == 0) *counted = total;
}

// The sum of the losses in f64, in a fixed order: one block.
extern "C" __global__ void sum_losses(u64 count, const float* losses, float* mean, const i64* counted) {
    __shared__ double parts[1024];
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += losses[i];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half >>= 1) {
        if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *mean = float(parts[0] / double(*counted > 0 ? *counted : 1));
}
