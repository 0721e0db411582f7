// Rows of activations as the products of warp groups want them: see llamagraph/kernels/panels.py.
#pragma once
#include "mma.cuh"

// Puts two numbers of a row, from `column` on (a multiple of 2), into panels of `rows` rows.
__device__ __forceinline__ void store_pair_in_panels(__half* panels, int rows, int row, int column,
                                                     float2 v) {
    const size_t at = static_cast<size_t>(column / 64) * rows + row;
    const int piece = column % 64 / 16 * 2 + column % 4 / 2;
    reinterpret_cast<u32*>(panels)[at * 32 + (piece ^ row % 8) * 4 + column % 16 / 4] =
        pack_limited(v.x, v.y);
}

// Puts four numbers of a row, from `column` on (a multiple of 4), into panels of `rows` rows.
__device__ __forceinline__ void store_in_panels(__half* panels, int rows, int row, int column,
                                                float4 v) {
    const size_t at = static_cast<size_t>(column / 64) * rows + row;
    u32* pairs = reinterpret_cast<u32*>(panels) + at * 32 + column % 16 / 4;
    const int piece = column % 64 / 16 * 2, swap = row % 8;
    pairs[(piece ^ swap) * 4] = pack_limited(v.x, v.y);
    pairs[((piece + 1) ^ swap) * 4] = pack_limited(v.z, v.w);
}

// The same with one number.
__device__ __forceinline__ void store_in_panels(__half* panels, int rows, int row, int column,
                                                float v) {
    const size_t at = static_cast<size_t>(column / 64) * rows + row;
    const int piece = column % 64 / 16 * 2 + column / 2 % 2, place = column % 16 / 4 * 2 + column % 2;
    panels[at * 64 + (piece ^ row % 8) * 8 + place] = __ushort_as_half(pack_limited(v, v));
}
