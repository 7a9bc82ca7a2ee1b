// Values as signs of one size, with what that loses fed back.
//
// A message holds the size as f32 and then the signs, eight to a byte, the first the highest. It begins at any byte.

struct Piece {
    u64 first, count;
    float* values;
    float* scale;
    // What is added: elements, of which there may be fewer, or the mean of what was received.
    const float* given;
    u64 given_count;
    const u8* received;
    // The first rank's message, and elements of a rank's stretch; whole bytes of signs.
    u8* messages;
    u64 stretch;
};

__device__ __forceinline__ float scale_of(const u8* message) {
    return __uint_as_float(u32(message[0]) | u32(message[1]) << 8 | u32(message[2]) << 16 | u32(message[3]) << 24);
}

// The value of sign `i` of a message with this size.
__device__ __forceinline__ float signed_by(const u8* message, u64 i, float scale) {
    return message[4 + i / 8] >> (7 - i % 8) & 1 ? scale : -scale;
}

// Adds what is given to what is left of the values, takes the signs of that, and leaves the sum of squares of each chunk. A
// lane has one value, so that a warp has four bytes of signs.
extern "C" __global__ void round_to_signs(const Piece* pieces, u32 number, u64 chunks, u32 senders, u64 from_stride, float factor, u64 to_stride, double* parts) {
    u32 lane = threadIdx.x & 31;
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece p = piece_of(pieces, number, chunk);
        u64 start = (chunk - p.first) * CHUNK, bytes = p.stretch / 8;
        u64 end = start + CHUNK < p.count ? start + CHUNK : p.count;
        float before = *p.scale;
        double squares = 0.0;
        for (u64 base = start; base < end; base += blockDim.x) {
            u64 i = base + threadIdx.x;
            bool inside = i < end;
            float value = -1.0f;
            if (inside) {
                float given = 0.0f;
                if (p.received) {
                    for (u32 sender = 0; sender < senders; sender++) {
                        const u8* message = p.received + sender * from_stride;
                        given += signed_by(message, i, __fmul_rn(scale_of(message), factor));
                    }
                } else if (i < p.given_count) {
                    given = p.given[i];
                }
                value = p.values[i];
                value = value - (value >= 0.0f ? before : -before) + given;
                p.values[i] = value;
                squares += double(value) * double(value);
            }
            u32 signs = __brev(__ballot_sync(0xffffffffu, value >= 0.0f));
            if (inside && lane % 8 == 0) {
                u64 byte = i / 8, rank = byte / bytes;
                p.messages[rank * to_stride + 4 + (byte - rank * bytes)] = u8(signs >> (24 - lane));
            }
        }
        squares = block_sum(squares);
        if (threadIdx.x == 0) parts[chunk] = squares;
    }
}

// The size of each tensor's signs, a block to a tensor: kept, and into the message to each rank.
extern "C" __global__ void settle_scales(const Piece* pieces, const double* parts, u32 receivers, u64 to_stride) {
    const Piece p = pieces[blockIdx.x];
    if (p.count == 0) return;
    u64 chunks = (p.count + CHUNK - 1) / CHUNK;
    double squares = 0.0;
    for (u64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) squares += parts[p.first + chunk];
    squares = block_sum(squares);
    float scale = float(sqrt(squares / double(p.count)));
    if (threadIdx.x == 0) *p.scale = scale;
    u32 bits = __float_as_uint(scale);
    for (u32 rank = threadIdx.x; rank < receivers; rank += blockDim.x) {
        for (int byte = 0; byte < 4; byte++) p.messages[rank * to_stride + byte] = u8(bits >> 8 * byte);
    }
}

// Values become the signs that were received of them, a stretch from each rank.
extern "C" __global__ void take_signs(const Piece* pieces, u32 number, u64 chunks, u64 from_stride) {
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const Piece p = piece_of(pieces, number, chunk);
        u64 start = (chunk - p.first) * CHUNK;
        u64 end = start + CHUNK < p.count ? start + CHUNK : p.count;
        for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) {
            u64 rank = i / p.stretch;
            const u8* message = p.received + rank * from_stride;
            p.values[i] = signed_by(message, i - rank * p.stretch, scale_of(message));
        }
    }
}
