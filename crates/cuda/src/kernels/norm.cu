// Layer norm and RMS norm, forward and backward. One block per row in forward; in backward each block walks many rows,
// TEAMS at a time, and keeps its share of the weight's gradient in registers.
//
// A row of up to 8·PACKS·threads elements stays in registers between the passes over it.

enum { LAYER, RMS };

extern "C" __global__ void norm_forward(u64 width, int kind, float eps, const REAL* x, const REAL* residual, REAL* sum,
                                        const REAL* weight, const REAL* bias, REAL* y, float* mean, float* rstd) {
    let_next_start();
    wait_for_earlier();
    u64 start = blockIdx.x * width;
    float held[PACKS][8];
    float total = 0.0f;
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        u64 c = (p * (u64)blockDim.x + threadIdx.x) * 8;
        if (c >= width) continue;
        Pack<REAL> a = load8(x + start + c);
        if (residual) {
            Pack<REAL> b = load8(residual + start + c);
            #pragma unroll
            for (int j = 0; j < 8; j++) a.v[j] = narrow<REAL>(widen(a.v[j]) + widen(b.v[j]));
            store8(sum + start + c, a);
        }
        #pragma unroll
        for (int j = 0; j < 8; j++) total += held[p][j] = widen(a.v[j]);
    }
    float average = kind == LAYER ? block_sum(total) / width : 0.0f;
    float squares = 0.0f;
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if ((p * (u64)blockDim.x + threadIdx.x) * 8 >= width) continue;
        #pragma unroll
        for (int j = 0; j < 8; j++) squares += (held[p][j] - average) * (held[p][j] - average);
    }
    float scale = rsqrtf(block_sum(squares) / width + eps);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = average;
        rstd[blockIdx.x] = scale;
    }
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        u64 c = (p * (u64)blockDim.x + threadIdx.x) * 8;
        if (c >= width) continue;
        Pack<REAL> w, b, out;
        if (weight) w = load8(weight + c);
        if (bias) b = load8(bias + c);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            float v = (held[p][j] - average) * scale;
            // As the host does: RMS norm rounds before it multiplies by the weight.
            if (kind == RMS && weight) v = widen(narrow<REAL>(v));
            if (weight) v *= widen(w.v[j]);
            if (bias) v += widen(b.v[j]);
            out.v[j] = narrow<REAL>(v);
        }
        store8(y + start + c, out);
    }
}

// For widths that packs do not divide, or rows too long for registers.
extern "C" __global__ void norm_forward_any(u64 width, int kind, float eps, const REAL* x, const REAL* residual, REAL* sum,
                                            const REAL* weight, const REAL* bias, REAL* y, float* mean, float* rstd) {
    u64 start = blockIdx.x * width;
    const REAL* row = residual ? sum + start : x + start;
    float total = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        if (residual) sum[start + i] = narrow<REAL>(widen(x[start + i]) + widen(residual[start + i]));
        total += widen(row[i]);
    }
    float average = kind == LAYER ? block_sum(total) / width : 0.0f;
    float squares = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float v = widen(row[i]) - average;
        squares += v * v;
    }
    float scale = rsqrtf(block_sum(squares) / width + eps);
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = average;
        rstd[blockIdx.x] = scale;
    }
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float v = (widen(row[i]) - average) * scale;
        if (kind == RMS && weight) v = widen(narrow<REAL>(v));
        if (weight) v *= widen(weight[i]);
        if (bias) v += widen(bias[i]);
        y[start + i] = narrow<REAL>(v);
    }
}

// Keeps the compiler from holding on to what it made of a pack: making it again costs less than the registers.
template <class T> __device__ __forceinline__ void forget(Pack<T>& pack) {
    u32* words = (u32*)&pack;
    #pragma unroll
    for (int k = 0; k < int(sizeof(pack) / 4); k++) asm volatile("" : "+r"(words[k]));
}

// The sums of one block: those of its teams are added in order.
__device__ __forceinline__ void leave_sums(const float (*own)[8], u64 width, float* sums) {
    extern __shared__ float of_teams[];
    if (TEAMS > 1) __syncthreads();
    float* target = TEAMS > 1 ? of_teams + threadIdx.y * width : sums + blockIdx.x * width;
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        u32 c = (p * blockDim.x + threadIdx.x) * 8;
        if (c >= width) continue;
        #pragma unroll
        for (int j = 0; j < 8; j++) target[c + j] = own[p][j];
    }
    if (TEAMS == 1) return;
    __syncthreads();
    for (u32 c = threadIdx.y * blockDim.x + threadIdx.x; c < width; c += blockDim.x * TEAMS) {
        float sum = 0.0f;
        for (int team = 0; team < TEAMS; team++) sum += of_teams[team * width + c];
        sums[blockIdx.x * width + c] = sum;
    }
}

// A team of threads has a row: a warp each where TEAMS share a block, else the block. What counts is how many rows are under
// way, so registers hold rows as they were read.
#if TEAMS > 1
#define BOUNDS __launch_bounds__(32 * TEAMS, PACKS > 3 ? 3 : 4)
#else
#define BOUNDS __launch_bounds__(512)
#endif
extern "C" __global__ void BOUNDS norm_backward(u64 rows, u64 width, int kind, const REAL* x, const REAL* weight, const float* mean,
                                                const float* rstd, const REAL* dy, const REAL* dsum, REAL* dx, float* dweight, float* dbias) {
    let_next_start();
    wait_for_earlier();
    float dw[PACKS][8], db[PACKS][8];
    Pack<REAL> w[PACKS];
    #pragma unroll
    for (int p = 0; p < PACKS; p++) {
        u32 c = (p * blockDim.x + threadIdx.x) * 8;
        if (weight && c < width) w[p] = load8(weight + c);
        #pragma unroll
        for (int j = 0; j < 8; j++) dw[p][j] = db[p][j] = 0.0f;
    }
    for (u64 r = blockIdx.x * (u64)TEAMS + threadIdx.y; r < rows; r += gridDim.x * (u64)TEAMS) {
        u64 start = r * width;
        Pack<REAL> a[PACKS], d[PACKS], more[PACKS];
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            u32 c = (p * blockDim.x + threadIdx.x) * 8;
            if (c >= width) continue;
            a[p] = load8(x + start + c);
            d[p] = load8(dy + start + c);
            if (dsum) more[p] = load8(dsum + start + c);
        }
        float average = mean[r], scale = rstd[r], along = 0.0f, shift = 0.0f;
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if ((p * blockDim.x + threadIdx.x) * 8 >= width) continue;
            forget(w[p]);
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float v = (widen(a[p].v[j]) - average) * scale, g = widen(d[p].v[j]);
                dw[p][j] += g * v;
                db[p][j] += g;
                if (weight) g *= widen(w[p].v[j]);
                along += g * v;
                shift += g;
            }
            forget(a[p]);
            forget(d[p]);
        }
        if (TEAMS > 1) {
            along = warp_sum(along);
            shift = warp_sum(shift);
        } else {
            block_sum2(along, shift);
        }
        along /= width;
        shift = kind == LAYER ? shift / width : 0.0f;
        #pragma unroll
        for (int p = 0; p < PACKS; p++) {
            u32 c = (p * blockDim.x + threadIdx.x) * 8;
            if (c >= width) continue;
            float out[8];
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                float v = (widen(a[p].v[j]) - average) * scale, g = widen(d[p].v[j]);
                if (weight) g *= widen(w[p].v[j]);
                out[j] = scale * (g - shift - v * along);
                if (dsum) out[j] += widen(more[p].v[j]);
            }
            store8(dx + start + c, narrow8<REAL>(out));
        }
    }
    if (dweight) leave_sums(dw, width, dweight);
    if (dbias) leave_sums(db, width, dbias);
}

extern "C" __global__ void norm_backward_any(u64 rows, u64 width, int kind, const REAL* x, const REAL* weight, const float* mean,
                                             const float* rstd, const REAL* dy, const REAL* dsum, REAL* dx, float* dweight, float* dbias) {
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        if (dweight) dweight[blockIdx.x * width + i] = 0.0f;
        if (dbias) dbias[blockIdx.x * width + i] = 0.0f;
    }
    for (u64 r = blockIdx.x; r < rows; r += gridDim.x) {
        u64 start = r * width;
        float average = mean[r], scale = rstd[r], along = 0.0f, shift = 0.0f;
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            float v = (widen(x[start + i]) - average) * scale, d = widen(dy[start + i]);
            // A thread always meets the same columns: no one else touches these sums.
            if (dweight) dweight[blockIdx.x * width + i] += d * v;
            if (dbias) dbias[blockIdx.x * width + i] += d;
            float g = d * (weight ? widen(weight[i]) : 1.0f);
            along += g * v;
            shift += g;
        }
        block_sum2(along, shift);
        along /= width;
        shift = kind == LAYER ? shift / width : 0.0f;
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            float v = (widen(x[start + i]) - average) * scale;
            float g = widen(dy[start + i]) * (weight ? widen(weight[i]) : 1.0f);
            float d = scale * (g - shift - v * along);
            dx[start + i] = narrow<REAL>(dsum ? d + widen(dsum[start + i]) : d);
        }
    }
}
