// What the products of single warps share: the units of 16 outputs that they are cut into, and when
// the next launch may start. See warp_columns.cuh, of 8 rows, and gemm_warps.cuh, of more.
#pragma once
#include "panels.cuh"
#include "hopper_weights.cuh"

constexpr int WARPS = TEAMS * SPLIT, THREADS = 32 * WARPS;
#ifdef ACT
constexpr int PARTS = 2;  // weights that meet in a result
#else
constexpr int PARTS = 1;
#endif
constexpr int OUTPUTS = 16 * TEAMS * GROUPS;  // of a block

// Behind a sum comes a norm, which lets its own successor start at once.
#ifdef ADD
constexpr bool LATE = true;
#else
constexpr bool LATE = false;
#endif

// A weight and where its results go; `second` is multiplied beside it.
struct Part {
    const u8 *weight, *second;
    void* out;
    int n_out;

    __device__ __forceinline__ int blocks() const { return ceil_div(n_out, OUTPUTS); }
};

// How a weight is stored.
template <class T, int UnitWeights, int TileRows>
struct Stored {
    using Type = T;
    static constexpr int UNIT_WEIGHTS = UnitWeights, TILE_OUTPUTS = TileRows;
    static constexpr int N_UNITS = N_IN / UnitWeights, PANELS = UnitWeights / 64;
    static constexpr int BYTES = 16 * T::BYTES;  // of 16 outputs' unit
    static_assert(Operand<T>::EXISTS, "a type that can be unpacked in registers");
    static_assert(UnitWeights % 64 == 0 && TileRows <= 16, "whole panels, whole tiles");

    // Starts copying a unit of 16 outputs: tiles of TileRows lanes, one after the other. `weight` is
    // where the tiles of the lane's outputs begin: its part of the warp has half of two pieces.
    static __device__ __forceinline__ void copy_unit(u8* to, const u8* weight, int unit) {
        constexpr int UNITS = 32 / TileRows, PIECES = T::BYTES / 16;
        const int first = unit / UNITS * UNITS;
        const int lanes = N_UNITS % UNITS ? min(UNITS, N_UNITS - first) * TileRows : 32;
        const int lane = threadIdx.x % (2 * TileRows), high = lane / TileRows;
        const u8* tile = weight + first * (TileRows * T::BYTES);
        const u8* from = tile + (high * lanes + (unit - first) * TileRows + lane % TileRows) * 16;
        to += group() * TileRows * T::BYTES;
#pragma unroll
        for (int i = 0; i < PIECES; i += 2)
            if (i + 1 < PIECES || !high)
                copy16(to + (i * TileRows + lane) * 16, from + i * lanes * 16);
        copy_rest<8>(to, tile, lanes, unit - first, lane);
        copy_rest<4>(to, tile, lanes, unit - first, lane);
        copy_rest<2>(to, tile, lanes, unit - first, lane);
    }

    // The same of what is left of the lanes' bytes in pieces of `Size`.
    template <int Size>
    static __device__ __forceinline__ void copy_rest(u8* to, const u8* tile, int lanes, int unit,
                                                     int lane) {
        constexpr int START = T::BYTES / (2 * Size) * (2 * Size), END = TileRows * Size / 16;
        if constexpr (T::BYTES % 16 & Size)
            if (lane < END)
                copy16(to + START * TileRows + lane * 16,
                       tile + START * lanes + unit * TileRows * Size + lane * 16);
    }

    // Which TileRows of the 16 outputs the lane copies.
    static __device__ __forceinline__ int group() { return threadIdx.x % 32 / (2 * TileRows); }

    // What was copied, for the lane.
    static __device__ __forceinline__ WarpUnit<T::BYTES> copied(u32 at) {
        const int lane = threadIdx.x % 32;
        const auto output = [&](int o) {
            return SharedUnit<T::BYTES>{at + o / TileRows * TileRows * T::BYTES, TileRows,
                                        o % TileRows};
        };
        return {{output(lane / 4), output(lane / 4 + 8)}, output(lane % 16).piece(lane / 16)};
    }
};

using Usual = Stored<TYPE<UNIT>, UNIT, RW>;
#ifdef V_TYPE
using Other = Stored<V_TYPE<V_UNIT>, V_UNIT, V_RW>;  // of the last part
#else
using Other = Usual;
#endif
