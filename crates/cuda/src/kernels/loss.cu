// Cross-entropy over rows of logits; the gradient takes the place of the logits.

struct LossSpec { i64 ignore_index; float smoothing; float z_loss; };

// What a pack holds of a row's classes; of those that there are not, what adds nothing.
__device__ __forceinline__ Pack<REAL> classes_of(const REAL* at, u64 first, u64 classes) {
    Pack<REAL> pack = load8(at);
    if (first + 8 > classes) {
        #pragma unroll
        for (int j = 0; j < 8; j++) if (first + j >= classes) pack.v[j] = narrow<REAL>(-INFINITY);
    }
    return pack;
}

// Rows are `columns` long, of which the first `classes` count.
extern "C" __global__ void cross_entropy(u64 classes, u64 columns, REAL* logits, const i64* targets, float* losses, LossSpec spec,
                                         int with_gradient, u64 op, Fault* fault) {
    REAL* row = logits + blockIdx.x * columns;
    i64 target = targets[blockIdx.x];
    bool wide = aligned16(row) && columns % 8 == 0;
    u64 packs = wide ? (classes + 7) / 8 : 0;
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
        Pack<REAL> a = classes_of(row + p * 8, p * 8, classes);
        float v[8], most = -INFINITY;
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = widen(a.v[j]);
            most = fmaxf(most, v[j]);
            if (p * 8 + j < classes) plain += v[j];
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
        Pack<REAL> a = classes_of(row + p * 8, p * 8, classes);
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

// Copies into shared memory that go on behind the thread's back.
__device__ __forceinline__ void fetch16(void* shared, const void* from) {
    u32 at = u32(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void await_fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same where a row stays in the registers of 1,024 threads: one read, one write. Each block walks many rows, and the
// next one comes into shared memory meanwhile; a thread only ever meets its own packs there, so it waits for no other.
#define HELD 7
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_held(u64 rows, u64 classes, u64 columns, REAL* logits, const i64* targets,
                                                                      float* losses, LossSpec spec, int with_gradient, u64 op, Fault* fault) {
    extern __shared__ uint4 next[];
    // Maximum, sum of exponentials, sum: of each warp. A warp may be a row ahead of another, never two.
    __shared__ float parts[2][3][32];
    static_assert(sizeof(parts) == HELD_PARTS_BYTES, "so much less is left for rows");
    int packs = int(columns / 8), lane = threadIdx.x & 31, warp = threadIdx.x >> 5, turn = 0;
    auto fetch = [&](u64 r) {
        if (r >= rows) return;
        #pragma unroll
        for (int h = 0; h < HELD; h++) {
            int p = h * 1024 + threadIdx.x;
            if (p < packs) fetch16(next + p, logits + r * columns + p * 8);
        }
    };
    fetch(blockIdx.x);
    for (u64 r = blockIdx.x; r < rows; r += gridDim.x) {
        REAL* row = logits + r * columns;
        i64 target = targets[r];
        bool counts = target != spec.ignore_index;
        u64 chosen = counts ? checked(target, r, classes, op, fault) : 0;
        // Whoever has the target's pack reads it before, and writes its gradient after the others of the pack.
        bool owner = int(chosen / 8) % 1024 == int(threadIdx.x);
        float target_logit = owner ? widen(row[chosen]) : 0.0f;
        Pack<REAL> held[HELD];
        // Finite, so that a difference to it is a number; what lies below adds nothing to a sum of exponentials.
        float largest = -1e38f, total = 0.0f, plain = 0.0f;
        await_fetched();
        #pragma unroll
        for (int h = 0; h < HELD; h++) {
            int p = h * 1024 + threadIdx.x;
            if (p < packs) held[h] = classes_of((const REAL*)(next + p), p * 8, classes);
        }
        #pragma unroll
        for (int h = 0; h < HELD; h++) {
            if (h * 1024 + int(threadIdx.x) >= packs) continue;
            #pragma unroll
            for (int j = 0; j < 8; j++) largest = fmaxf(largest, widen(held[h].v[j]));
        }
        fetch(r + gridDim.x);
        if (!counts) {
            if (threadIdx.x == 0) losses[r] = 0.0f;
            if (with_gradient) for (int p = threadIdx.x; p < packs; p += 1024) *(uint4*)(row + p * 8) = uint4{0, 0, 0, 0};
            continue;
        }
        #pragma unroll
        for (int h = 0; h < HELD; h++) {
            if (h * 1024 + int(threadIdx.x) >= packs) continue;
            #pragma unroll
            for (int j = 0; j < 8; j++) total += quick_exp(widen(held[h].v[j]) - largest);
        }
        if (spec.smoothing > 0.0f) {
            #pragma unroll
            for (int h = 0; h < HELD; h++) {
                if (h * 1024 + int(threadIdx.x) >= packs) continue;
                #pragma unroll
                for (int j = 0; j < 8; j++) if ((h * 1024 + threadIdx.x) * 8 + j < classes) plain += widen(held[h].v[j]);
            }
        }
        float most = warp_max(largest);
        total = warp_sum(total * quick_exp(largest - most));
        plain = warp_sum(plain);
        if (lane == 0) {
            parts[turn][0][warp] = most;
            parts[turn][1][warp] = total;
            parts[turn][2][warp] = plain;
        }
        __syncthreads();
        largest = parts[turn][0][lane];
        most = warp_max(largest);
        total = warp_sum(parts[turn][1][lane] * quick_exp(largest - most));
        float mean_logit = warp_sum(parts[turn][2][lane]) / classes, log_total = most + logf(total);
        turn ^= 1;
        if (owner)
            losses[r] = log_total - (1.0f - spec.smoothing) * target_logit - spec.smoothing * mean_logit + spec.z_loss * log_total * log_total;
        if (!with_gradient) continue;
        float scale = (1.0f + 2.0f * spec.z_loss * log_total) / total;
        float uniform = spec.smoothing / classes, hit = 1.0f - spec.smoothing;
        #pragma unroll
        for (int h = 0; h < HELD; h++) {
            int p = h * 1024 + threadIdx.x;
            if (p >= packs) continue;
            float g[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) g[j] = quick_exp(widen(held[h].v[j]) - most) * scale - uniform;
            store8(row + p * 8, narrow8<REAL>(g));
        }
        if (owner) row[chosen] = narrow<REAL>(quick_exp(target_logit - most) * scale - uniform - hit);
    }
}

// The loss over parts of the classes, each on another device: what a part tells the others of a row, and what it makes of
// all that was told.
struct PartSpec { i64 ignore_index; u64 first; u64 all; };
// The largest logit, the sum of exponentials of the distances to it, the target's logit (zero where another part has it).
struct Told { float largest, total, target; };
#define LEAST -3.4028235e38f

// Runs `eight(first element)` and `one(element)` over a row that may begin anywhere, as wide as its address allows.
template <class Eight, class One>
__device__ __forceinline__ void over_row(const REAL* row, u32 count, Eight eight, One one) {
    u32 before = u32((16 - ((u64)row & 15)) % 16 / sizeof(REAL));
    if (before > count) before = count;
    u32 packs = (count - before) / 8;
    if (threadIdx.x < before) one(threadIdx.x);
    for (u32 p = threadIdx.x; p < packs; p += blockDim.x) eight(before + p * 8);
    for (u32 i = before + packs * 8 + threadIdx.x; i < count; i += blockDim.x) one(i);
}

extern "C" __global__ void __launch_bounds__(1024) cross_entropy_part(u64 classes, const REAL* logits, const i64* targets,
                                                                      Told* told, PartSpec part, u64 op, Fault* fault) {
    const REAL* row = logits + blockIdx.x * classes;
    i64 target = targets[blockIdx.x];
    if (target == part.ignore_index) {
        if (threadIdx.x == 0) told[blockIdx.x] = Told{0.0f, 0.0f, 0.0f};
        return;
    }
    // Finite, so that a difference to it is a number: a part without any finite logit adds nothing.
    float largest = LEAST, total = 0.0f;
    auto raise = [&](float most) {
        if (most > largest) {
            total *= quick_exp(largest - most);
            largest = most;
        }
    };
    over_row(row, u32(classes), [&](u32 i) {
        Pack<REAL> a = load8(row + i);
        float most = LEAST;
        #pragma unroll
        for (int j = 0; j < 8; j++) most = fmaxf(most, widen(a.v[j]));
        raise(most);
        #pragma unroll
        for (int j = 0; j < 8; j++) total += quick_exp(widen(a.v[j]) - largest);
    }, [&](u32 i) {
        raise(widen(row[i]));
        total += quick_exp(widen(row[i]) - largest);
    });
    float most = block_max(largest);
    total = block_sum(total * quick_exp(largest - most));
    if (threadIdx.x > 0) return;
    u64 chosen = checked(target, blockIdx.x, part.all, op, fault) - part.first;
    told[blockIdx.x] = Told{most, total, chosen < classes ? widen(row[chosen]) : 0.0f};
}

extern "C" __global__ void __launch_bounds__(1024) cross_entropy_of_parts(u64 classes, u64 parts, REAL* logits, const i64* targets,
                                                                          const Told* told, float* losses, PartSpec part, int with_gradient) {
    REAL* row = logits + blockIdx.x * classes;
    i64 target = targets[blockIdx.x];
    bool counts = target != part.ignore_index;
    // In the order of parts, so that all get the same bits.
    float most = LEAST, total = 0.0f, target_logit = 0.0f;
    for (u64 p = 0; p < parts; p++) most = fmaxf(most, told[p * gridDim.x + blockIdx.x].largest);
    for (u64 p = 0; p < parts; p++) {
        Told of = told[p * gridDim.x + blockIdx.x];
        total += of.total * quick_exp(of.largest - most);
        target_logit += of.target;
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = counts ? most + logf(total) - target_logit : 0.0f;
    if (!with_gradient) return;
    float scale = 1.0f / total;
    u64 chosen = u64(target) - part.first;
    u32 hit = counts && chosen < classes ? u32(chosen) : ~0u;
    auto gradient = [&](float logit, u32 i) {
        float g = counts ? quick_exp(logit - most) * scale : 0.0f;
        return i == hit ? g - 1.0f : g;
    };
    over_row(row, u32(classes), [&](u32 i) {
        Pack<REAL> a = load8(row + i);
        float g[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) g[j] = gradient(widen(a.v[j]), i + j);
        store8(row + i, narrow8<REAL>(g));
    }, [&](u32 i) { row[i] = narrow<REAL>(gradient(widen(row[i]), i)); });
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
