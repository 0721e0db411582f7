// What a warp with columns of its own has at a time: a group's weights there, and the rows'
// numbers. See warp_columns.cuh.
#pragma once
#include "warp_blocks.cuh"
#include "warp_units.cuh"

constexpr int EACH = GROUPS * PARTS;  // groups of 16 outputs that meet a warp's columns
constexpr int GROUP_SUMS = 16 * TILE_ROWS;

// What a warp does at a time, of the weight S: units' columns of one group.
template <class S>
struct Share {
    static constexpr bool TWO =
        S::N_UNITS % 2 == 0 && 2 * S::UNIT_WEIGHTS <= 256 && 2 * S::BYTES <= 4096;
    static constexpr int UNITS = TWO ? 2 : 1;
    static constexpr int N_SHARES = S::N_UNITS / UNITS, PANELS = UNITS * S::PANELS;
    static constexpr int BYTES = UNITS * S::BYTES, ROWS_BYTES = PANELS * TILE_ROWS * 128;
    static constexpr bool ONE = SPLIT == N_SHARES;
    static constexpr int ROW_STAGES = ONE ? 1 : (STAGES + EACH - 1) / EACH;
    static constexpr int ROWS_AT = STAGES * BYTES;
    // Before there are sums a warp has all its columns, if those are but one share's.
    static constexpr int ALL_ROWS = ROW_STAGES * ROWS_BYTES, ALL_SUMS = EACH * GROUP_SUMS * 4;
    static constexpr int SUMS_AT = ONE ? ROWS_AT : ROWS_AT + ALL_ROWS;
    static constexpr int END = SUMS_AT + ALL_SUMS;
    static constexpr int WARP_BYTES = END > ROWS_AT + ALL_ROWS ? END : ROWS_AT + ALL_ROWS;
    static_assert(SPLIT <= N_SHARES && BLOCKS == 1, "every warp has columns");
};

// The rows' numbers in columns that are a warp's own: b[j] of 64 columns, two words for each 16.
template <class S>
struct Columns {
    using Operand = BlockOperand<typename S::Type>;
    u32 b[Share<S>::PANELS][8];
    u32 means[2], rest[2];  // of each 16 columns, as operands have them; what the means lose

    __device__ __forceinline__ void load(u32 rows) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < Share<S>::PANELS; j++)
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                u32 m[4];
                load_matrices(m, rows + (j * 8 + lane % 8) * 128 +
                                     ((half + lane / 8) ^ lane % 8) * 16);
#pragma unroll
                for (int i = 0; i < 4; i++) b[j][half + i] = m[i];
            }
        if constexpr (Operand::EXISTS) {
            find_means();
            spread();
        }
    }

  private:
    // All rows of a product with 1 / 16 are means; lane 4g + t keeps the g-th and the g + 8th.
    __device__ __forceinline__ void find_means() {
        constexpr u32 SHARE = 0x2c00 * BOTH;
        const u32 shares[4] = {SHARE, SHARE, SHARE, SHARE};
        float kept[2][2];
#pragma unroll
        for (int c = 0; c < 4 * S::PANELS; c++) {
            float mean[4] = {};
            multiply(mean, shares, b[c / 4][c % 4 * 2], b[c / 4][c % 4 * 2 + 1]);
            if (threadIdx.x % 32 / 4 == c % 8) kept[c / 8][0] = mean[0], kept[c / 8][1] = mean[1];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            means[i] = transposed(pack(kept[i][0], kept[i][1]));
            if constexpr (Operand::LARGE)
                rest[i] = transposed(pack(lost(kept[i][0]), lost(kept[i][1])));
        }
    }
    // From columns 4t and 4t + 1, 4t + 2 and 4t + 3 to 4t and 4t + 2, 4t + 1 and 4t + 3.
    __device__ __forceinline__ void spread() {
#pragma unroll
        for (int j = 0; j < Share<S>::PANELS; j++)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const u32 first = b[j][i], second = b[j][i + 1];
                b[j][i] = __byte_perm(first, second, 0x5410);
                b[j][i + 1] = __byte_perm(first, second, 0x7632);
            }
    }
    static __device__ __forceinline__ u32 transposed(u32 matrix) {
        u32 m;
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(m) : "r"(matrix));
        return m;
    }
};
