// What both designs of a product of many rows share: weights as halves, where a row's units are,
// and the end of a product. Knows no tile.
#pragma once
#include "mma.cuh"
#include "quants.cuh"

using Type = TYPE<UNIT>;

constexpr int UNIT_BLOCKS = UNIT / 32;
constexpr int GROUP_BYTES = RW * Type::BYTES;  // a unit of each of RW rows

// The i-th 32 weights of a unit, rounded once: weights 2j and 2j + 1 in w[j].
template <class T, class Unit>
__device__ __forceinline__ void halves(const Unit& u, int i, u32 (&w)[16]) {
    if constexpr (T::FLOAT) {
        float f[32];
        T::values(u, i, f);
#pragma unroll
        for (int j = 0; j < 16; j++) w[j] = pack(f[2 * j], f[2 * j + 1]);
    } else {
        const Block b = T::block(u, i);
        const float2 scale = T::scale(u);
        const float d[2] = {scale.x * b.d * b.s0, scale.x * b.d * b.s1};
        const float m[2] = {scale.y * b.m0, scale.y * b.m1};
        // A byte below 0x4b0000 is 2^23 and the byte, as a float: cheaper than a conversion.
        constexpr float ZERO = 8388608 + T::OFFSET + (T::SIGNED ? 128 : 0);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const u32 word = b.q[j / 2] ^ (T::SIGNED ? 0x80808080 : 0);
            float f[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const u32 byte = __byte_perm(word, 0x4b000000, 0x7440 + j % 2 * 2 + e);
                const float q = __uint_as_float(byte) - ZERO;
                f[e] = T::MINS ? fmaf(d[j / 8], q, -m[j / 8]) : d[j / 8] * q;
            }
            w[j] = pack(f[0], f[1]);
        }
    }
}

// Where byte `at` of a unit of RW rows, stored as a tile of RW lanes, is in a tile of `lanes` lanes
// that has those from lane `first` on.
__device__ __forceinline__ int in_tile(int at, int lanes, int first) {
    constexpr int PLANES = Type::BYTES / 16 * 16, REST = Type::BYTES % 16;
    int start = at / (16 * RW) * 16, size = 16;  // the piece, in bytes of one lane
    if (at >= PLANES * RW) {
        const int left = at - PLANES * RW;
        const bool past8 = left >= (REST & 8) * RW, past4 = left >= (REST & 12) * RW;
        start = PLANES + (past4 ? REST & 12 : past8 ? REST & 8 : 0);
        size = past4 ? 2 : past8 ? 4 : 8;
    }
    return start * lanes + size * first + at - start * RW;
}

// Starts copying one unit of each of TILE_OUT outputs into shared memory, as tiles of RW lanes.
// `thread` of `n_threads` take part.
__device__ __forceinline__ void copy_unit(u8* to, const u8* weight, int n_units, int n_out,
                                          int first_out, int unit, int thread, int n_threads) {
    constexpr int UNITS = 32 / RW;  // of a stored tile
    const int first = unit / UNITS * UNITS, lanes = min(UNITS, n_units - first) * RW;
    for (int at = thread * 16; at < TILE_OUT * Type::BYTES; at += n_threads * 16) {
        const int group = min(first_out / RW + at / GROUP_BYTES, (n_out - 1) / RW);
        const u8* tile = weight + (static_cast<size_t>(group) * n_units + first) * GROUP_BYTES;
        copy16(to + at, tile + in_tile(at % GROUP_BYTES, lanes, (unit - first) * RW));
    }
}

// What was copied, of the output at `row` of the tile.
__device__ __forceinline__ MemoryUnit<Type::BYTES> copied_unit(const u8* units, int row) {
    return {units + row / RW * GROUP_BYTES, RW, row % RW};
}
