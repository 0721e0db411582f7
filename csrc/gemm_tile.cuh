// A product of many rows: a block has TILE_OUT x TILE_ROWS results and 64 columns a step. Stored
// units are copied ahead into shared memory, two stages of them; what a step multiplies is unpacked
// to halves while the step before is multiplied.
//
// Operands lie in rows of 64 halves, eight pieces of 16 bytes. Piece c of row r is at c ^ (r % 8):
// eight rows meet different banks.
#pragma once
#include "gemm.cuh"

constexpr int THREADS = 32 * WARPS, BLOCKS = 1;
constexpr int STEP = 64;  // columns
constexpr int STAGE_UNITS = UNIT < STEP ? STEP / UNIT : 1, STAGE_STEPS = UNIT * STAGE_UNITS / STEP;
constexpr int COLUMN_BYTES = TILE_OUT * Type::BYTES, STAGE_BYTES = STAGE_UNITS * COLUMN_BYTES;
constexpr int X_ROWS = THREADS / 16, X_LOADS = TILE_ROWS / X_ROWS;
constexpr int ROW_WARPS = THREADS / TILE_OUT;  // that share 32 outputs
constexpr int WARP_ROWS = TILE_ROWS / ROW_WARPS;

struct Product {
    const u8* weight;
    const float* x;
    int n, n_in, n_out, first_row, first_out;  // n: true rows
    u8* stages;
    uint4 *weights, *rows;  // two operands each
    float4 ahead[X_LOADS];  // the next step's rows
    float sums[2][WARP_ROWS / 8][4];

    static __device__ __forceinline__ int piece_at(int row, int c) {
        return row * 8 + (c ^ (row & 7));
    }

    __device__ __forceinline__ void copy_stage(int stage) {
        u8* to = stages + stage % 2 * STAGE_BYTES;
        for (int i = 0; i < STAGE_UNITS; i++) {
            const int unit = min(stage * STAGE_UNITS + i, n_in / UNIT - 1);
            copy_unit(to + i * COLUMN_BYTES, weight, n_in / UNIT, n_out, first_out, unit,
                      threadIdx.x, THREADS);
        }
    }

    // A thread unpacks 32 weights of one output.
    __device__ __forceinline__ void unpack(int step) {
        const int row = threadIdx.x % TILE_OUT, half = threadIdx.x / TILE_OUT;
        const int block = 2 * step + half;
        if (half >= 2) return;
        u32 w[16] = {};
        if (32 * block < n_in) {
            const u8* stage = stages + step / STAGE_STEPS % 2 * STAGE_BYTES;
            const u8* column = stage + block / UNIT_BLOCKS % STAGE_UNITS * COLUMN_BYTES;
            halves<Type>(copied_unit(column, row), block % UNIT_BLOCKS, w);
        }
        uint4* operand = weights + step % 2 * (TILE_OUT * 8);
#pragma unroll
        for (int c = 0; c < 4; c++)
            operand[piece_at(row, 4 * half + c)] =
                make_uint4(w[4 * c], w[4 * c + 1], w[4 * c + 2], w[4 * c + 3]);
    }

    // A thread has four columns of every X_ROWS-th row.
    __device__ __forceinline__ void load_rows(int step) {
        const int row = first_row + threadIdx.x / 16, column = step * STEP + threadIdx.x % 16 * 4;
        const float* from = x + static_cast<size_t>(row) * n_in + column;
#pragma unroll
        for (int j = 0; j < X_LOADS; j++, from += X_ROWS * n_in) {
            ahead[j] = make_float4(0, 0, 0, 0);
            if (row + j * X_ROWS < n && column < n_in) ahead[j] = load_activations(from);
        }
    }

    __device__ __forceinline__ void store_rows(int step) {
        const int row = threadIdx.x / 16, c = threadIdx.x % 16;
        uint2* to = reinterpret_cast<uint2*>(rows + step % 2 * (TILE_ROWS * 8) +
                                             piece_at(row, c / 2)) + c % 2;
#pragma unroll
        for (int j = 0; j < X_LOADS; j++)
            to[j * X_ROWS * 16] = make_uint2(pack_limited(ahead[j].x, ahead[j].y),
                                             pack_limited(ahead[j].z, ahead[j].w));
    }

    __device__ __forceinline__ void multiply_step(int step) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int out = warp / ROW_WARPS * 32 + lane % 16;
        const int row = warp % ROW_WARPS * WARP_ROWS + lane / 16 * 8 + lane % 8;
        const int w = step % 2 * (TILE_OUT * 8) + piece_at(out, lane / 16);
        const int r = step % 2 * (TILE_ROWS * 8) + piece_at(row, lane / 8 % 2);
#pragma unroll
        for (int k = 0; k < STEP / 16; k++) {  // the pieces 2 * k on: a bit changes in their place
            u32 a[2][4];
            load_matrices(a[0], weights + (w ^ 2 * k));
            load_matrices(a[1], weights + (w ^ 2 * k) + 16 * 8);
#pragma unroll
            for (int j = 0; j < WARP_ROWS / 16; j++) {
                u32 b[4];
                load_matrices(b, rows + (r ^ 2 * k) + j * (16 * 8));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply(sums[m][2 * j], a[m], b[0], b[1]);
                    multiply(sums[m][2 * j + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    template <bool ADD>
    __device__ __forceinline__ void write(float* out) {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < WARP_ROWS / 8; j++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const int row = first_row + warp % ROW_WARPS * WARP_ROWS + 8 * j + 2 * t + e % 2;
                const int o = first_out + warp / ROW_WARPS * 32 + g + 8 * (e / 2);
                if (row < n && o < n_out)
                    put<ADD>(out + static_cast<size_t>(row) * n_out + o, sums[e / 4][j][e % 4]);
            }
    }
};

template <bool ADD>
__device__ __forceinline__ void product(const u8* weight, const float* x, const int* n_rows,
                                        float* out, int n_in, int n_out) {
    extern __shared__ uint4 shared[];
    uint4* weights = shared + 2 * STAGE_BYTES / 16;
    Product p = {weight, x, 0, n_in, n_out, static_cast<int>(blockIdx.x) * TILE_ROWS,
                 static_cast<int>(blockIdx.y) * TILE_OUT, reinterpret_cast<u8*>(shared), weights,
                 weights + 2 * TILE_OUT * 8};
    pdl_launch_dependents();
    p.copy_stage(0);
    pdl_wait();
    p.n = *n_rows;
    if (p.first_row >= p.n) return wait_for_copies();
    const int n_steps = ceil_div(n_in, STEP), n_stages = ceil_div(n_in, UNIT * STAGE_UNITS);
    // Warps that share a scheduler do the two parts of a step in different order, so that one
    // unpacks while the other multiplies.
    const bool unpack_first = threadIdx.x < 128;
    for (int next = 0; next <= n_steps; next++) {
        const bool more = next < n_steps, new_stage = next % STAGE_STEPS == 0;
        if (new_stage) wait_for_copies();
        __syncthreads();
        if (new_stage && next / STAGE_STEPS + 1 < n_stages) p.copy_stage(next / STAGE_STEPS + 1);
        if (more) p.load_rows(next);
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            if ((part == 0) != unpack_first) {
                if (next > 0) p.multiply_step(next - 1);
            } else if (more) {
                p.unpack(next);
            }
        }
        if (more) p.store_rows(next);
    }
    p.write<ADD>(out);
}
