// Where the bytes of a stored weight are.
//
// A lane owns a *unit*: so many consecutive weights of one row, the bytes of their GGUF blocks with
// the quants first and the scales last. RW rows and 32 / RW units are a *tile*, stored as pieces:
// the first 16 bytes of every lane, the next 16, .., then what is left in pieces of 8, 4 and 2.
// The tiles of RW rows follow each other along the row; the last may have fewer units.
// llamagraph/kernels/layouts.py says the same in numpy. Knows no type and no kernel.
#pragma once
#include "common.cuh"

// In memory (global or shared): reads what is asked for, so `i` of `block` may be a variable.
template <int Bytes>
struct MemoryUnit {
    static constexpr int PLANES = Bytes / 16, REST = Bytes % 16;
    const u8* tile;
    int lanes, lane;  // of the tile, and the own

    __device__ __forceinline__ uint4 plane(int p) const {
        return *reinterpret_cast<const uint4*>(tile + (p * lanes + lane) * 16);
    }
    __device__ __forceinline__ u32 word(int j) const {
        if (j < PLANES * 4)
            return *reinterpret_cast<const u32*>(tile + (j / 4 * lanes + lane) * 16 + j % 4 * 4);
        const u8* rest = tile + PLANES * 16 * lanes;
        const int at = j * 4 - PLANES * 16;
        if (at < (REST & 8)) return *reinterpret_cast<const u32*>(rest + lane * 8 + at);
        if (at < (REST & 12))
            return *reinterpret_cast<const u32*>(rest + (REST & 8) * lanes + lane * 4);
        return *reinterpret_cast<const u16*>(rest + (REST & 12) * lanes + lane * 2);
    }
};

// In registers: `i` of `block` must be known when compiling, so loops over it are unrolled.
template <int Bytes>
struct RegisterUnit {
    static constexpr int PLANES = Bytes / 16, REST = Bytes % 16;
    u32 words[(Bytes + 3) / 4];

    __device__ __forceinline__ uint4 plane(int p) const {
        return make_uint4(words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]);
    }
    __device__ __forceinline__ u32 word(int j) const { return words[j]; }

    // Requests all of a lane's bytes; nothing waits for them yet.
    __device__ __forceinline__ void load(const u8* tile, int lanes, int lane) {
        const u8* own = tile + lane * 16;
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            const uint4 v = load_weights16(own + p * lanes * 16);
            words[4 * p] = v.x, words[4 * p + 1] = v.y;
            words[4 * p + 2] = v.z, words[4 * p + 3] = v.w;
        }
        const u8* rest = tile + PLANES * 16 * lanes;
        if constexpr ((REST & 8) != 0) {
            const uint2 v = load_weights8(rest + lane * 8);
            words[4 * PLANES] = v.x, words[4 * PLANES + 1] = v.y;
        }
        if constexpr ((REST & 4) != 0)
            words[4 * PLANES + (REST & 8) / 4] =
                load_weights4(rest + (REST & 8) * lanes + lane * 4);
        if constexpr ((REST & 2) != 0)
            words[4 * PLANES + (REST & 12) / 4] =
                load_weights2(rest + (REST & 12) * lanes + lane * 2);
    }
};

// The unit of a row in a stored weight whose rows have n_units units.
template <class Type, int TileRows>
__device__ __forceinline__ MemoryUnit<Type::BYTES> unit_at(const u8* weight, int n_units, int row,
                                                           int unit) {
    constexpr int UNITS = 32 / TileRows;  // of a whole tile
    const int first = unit / UNITS * UNITS;  // of the tile
    const int here = min(UNITS, n_units - first);
    const size_t group = static_cast<size_t>(row / TileRows) * n_units;
    return {weight + (group + first) * (TileRows * Type::BYTES), here * TileRows,
            (unit - first) * TileRows + row % TileRows};
}
