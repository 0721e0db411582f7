// A product of up to 32 rows: a block has 32 outputs, its warps take units in turn and add up their
// sums at the end, in order. A warp's next units are copied into shared memory while it works; a
// lane unpacks 32 weights of its output at a time, which become an operand by way of shared memory.
// Rows are read as operands straight away.
//
// The columns of each 32 are summed in another order, so that a lane's share of a row is eight in a
// run: place 16 * s + 8 * h + 2 * t + e of the sum has column 8 * t + 4 * s + 2 * h + e.
#pragma once
#include "gemm.cuh"

constexpr int THREADS = 32 * WARPS, BLOCKS = 2;  // of a multiprocessor at once
constexpr int ROW_TILES = TILE_ROWS / 8;
constexpr int UNITS_BYTES = TILE_OUT * Type::BYTES;  // of one unit of every output
constexpr int OPERAND_BYTES = TILE_OUT * 64;         // 32 columns
constexpr int STRIDE = TILE_OUT + 4;  // of a row of sums: a quad's lanes meet different banks
constexpr int SUMS_BYTES = TILE_ROWS * STRIDE * 4;
constexpr int WORK_BYTES = 2 * UNITS_BYTES + OPERAND_BYTES;
constexpr int WARP_BYTES = WORK_BYTES > SUMS_BYTES ? WORK_BYTES : SUMS_BYTES;

// Where piece c (8 halves) of a row of 32 is, so that eight rows meet different banks.
__device__ __forceinline__ int piece_at(int row, int c) { return row * 4 + (c ^ (row >> 1 & 3)); }

// sums += 32 columns of the outputs, in `operand`, times the lane's shares of those of the rows.
__device__ __forceinline__ void multiply_columns(float (&sums)[2][ROW_TILES][4],
                                                 const uint4* operand,
                                                 const float4 (&rows)[ROW_TILES][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 a[2][4];
        load_matrices(a[0], operand + piece_at(lane % 16, 2 * s + lane / 16));
        load_matrices(a[1], operand + piece_at(16 + lane % 16, 2 * s + lane / 16));
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const float4 b = rows[r][s];
            const u32 b0 = pack_limited(b.x, b.y), b1 = pack_limited(b.z, b.w);
            multiply(sums[0][r], a[0], b0, b1);
            multiply(sums[1][r], a[1], b0, b1);
        }
    }
}

template <bool ADD>
__device__ __forceinline__ void product(const u8* weight, const float* x, const int* n_rows,
                                        float* out, int n_in, int n_out) {
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_row = blockIdx.x * TILE_ROWS, first_out = blockIdx.y * TILE_OUT;
    const int n_units = n_in / UNIT;
    uint4* operand = shared + warp * (WARP_BYTES / 16);
    u8* units = reinterpret_cast<u8*>(operand) + OPERAND_BYTES;
    const auto copy = [&](int u) {
        if (u < n_units)
            copy_unit(units + u / WARPS % 2 * UNITS_BYTES, weight, n_units, n_out, first_out, u,
                      lane, 32);
    };

    pdl_launch_dependents();
    copy(warp);
    pdl_wait();
    const int n = *n_rows;
    if (first_row >= n) return wait_for_copies();
    float sums[2][ROW_TILES][4] = {};
    for (int u = warp; u < n_units; u += WARPS) {
        wait_for_copies();
        __syncwarp();
        copy(u + WARPS);
        const auto unit = copied_unit(units + u / WARPS % 2 * UNITS_BYTES, lane);
#pragma unroll 1
        for (int i = 0; i < UNIT_BLOCKS; i++) {
            float4 rows[ROW_TILES][2] = {};
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const int row = first_row + 8 * r + g;
                const float* p = x + static_cast<size_t>(row) * n_in + u * UNIT + 32 * i + 8 * t;
                if (row < n) rows[r][0] = load_activations(p), rows[r][1] = load_activations(p + 4);
            }
            u32 w[16];
            halves<Type>(unit, i, w);
#pragma unroll
            for (int c = 0; c < 4; c++)
                operand[piece_at(lane, c)] = make_uint4(w[c], w[4 + c], w[8 + c], w[12 + c]);
            __syncwarp();
            multiply_columns(sums, operand, rows);
            __syncwarp();
        }
    }

    float* own_sums = reinterpret_cast<float*>(operand);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int e = 0; e < 8; e++)
            own_sums[(8 * r + 2 * t + e % 2) * STRIDE + g + 8 * (e / 2)] = sums[e / 4][r][e % 4];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_OUT * TILE_ROWS; i += THREADS) {
        const int row = i / TILE_OUT, o = i % TILE_OUT;
        if (first_row + row >= n || first_out + o >= n_out) continue;
        float sum = 0;
        for (int k = 0; k < WARPS; k++)
            sum += reinterpret_cast<const float*>(shared + k * (WARP_BYTES / 16))[row * STRIDE + o];
        put<ADD>(out + static_cast<size_t>(first_row + row) * n_out + first_out + o, sum);
    }
}
