// Strided copies. REAL is a word of the size that all addresses and distances allow, which are counted in words.

// Along an axis: how many places, how far apart in source and target, and a division by their number as a product.
struct Axis { u64 size, from, to; u32 multiplier, shift; };
// The one that changes fastest comes first.
struct Axes { u64 count; Axis axis[MAX_DIMS]; };

#ifdef FAR
typedef u64 Index;
__device__ __forceinline__ Index divided(Index index, const Axis& axis) { return index / axis.size; }
#else
typedef u32 Index;
// Exact for an index below 2³¹ (Granlund and Montgomery: "Division by invariant integers using multiplication", 1994).
__device__ __forceinline__ Index divided(Index index, const Axis& axis) {
    return (__umulhi(index, axis.multiplier) + index) >> axis.shift;
}
#endif

extern "C" __global__ void move_words(u64 count, const REAL* x, REAL* y, const __grid_constant__ Axes axes) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (u64)blockDim.x) {
        Index rest = Index(i);
        u64 from = 0, to = 0;
        #pragma unroll
        for (int a = 0; a < 8; a++) {
            if (a == int(axes.count)) break;
            Index above = divided(rest, axes.axis[a]);
            u64 at = rest - above * Index(axes.axis[a].size);
            from += at * axes.axis[a].from;
            to += at * axes.axis[a].to;
            rest = above;
        }
        y[to] = x[from];
    }
}

// Where neighbours along `a` are next to each other in the source, and along `b` in the target: tiles that are read along one
// and written along the other.
extern "C" __global__ void turn_tiles(const REAL* x, REAL* y, u64 a_size, u64 a_to, u64 b_size, u64 b_from,
                                      const __grid_constant__ Axes others) {
    __shared__ REAL tile[TILE][TILE + 1];
    u64 tiles_a = (a_size + TILE - 1) / TILE, tiles_b = (b_size + TILE - 1) / TILE, rest = blockIdx.x;
    u64 b_first = rest % tiles_b * TILE;
    rest /= tiles_b;
    u64 a_first = rest % tiles_a * TILE;
    rest /= tiles_a;
    for (u64 o = 0; o < others.count; o++) {
        u64 at = rest % others.axis[o].size;
        rest /= others.axis[o].size;
        x += at * others.axis[o].from;
        y += at * others.axis[o].to;
    }
    #pragma unroll
    for (int line = threadIdx.y; line < TILE; line += 8) {
        u64 a = a_first + threadIdx.x, b = b_first + line;
        if (a < a_size && b < b_size) tile[line][threadIdx.x] = x[b * b_from + a];
    }
    __syncthreads();
    #pragma unroll
    for (int line = threadIdx.y; line < TILE; line += 8) {
        u64 a = a_first + line, b = b_first + threadIdx.x;
        if (a < a_size && b < b_size) y[a * a_to + b] = tile[threadIdx.x][line];
    }
}
