// Multiplies matrices that are at hand, again and again, to see how fast that can be: the ceiling
// over every kernel that is bound by products. llamagraph/kernels/matrix_probe.py has the meaning in
// numpy.
#include "warpgroup.cuh"

constexpr int OUTPUTS = 64, ROWS = 256, COLUMNS = 64;  // of a block's product

// A number of the matrices: hashes as multiples of 1/512, exact.
__device__ __forceinline__ float number(u32 i) {
    return static_cast<float>(i * 2654435761u >> 22) / 512.f - 1.f;
}

// A matrix from its first number on, in shared memory.
__device__ __forceinline__ void fill(u8* panel, u32 first, int n_rows) {
    for (int i = threadIdx.x * 2; i < n_rows * COLUMNS; i += 256) {
        const int column = i % COLUMNS;
        *reinterpret_cast<u32*>(panel + swizzled(i / COLUMNS, column / 8) + column % 8 * 2) =
            pack(number(first + i), number(first + i + 1));
    }
}

// 16 columns of 16 rows of a panel, of which this lane names one to `load_matrices`.
__device__ __forceinline__ const u8* matrices(const u8* panel, int first, int k, bool across) {
    const int lane = threadIdx.x % 32, half = lane / 8 % 2, other = lane / 16;
    return panel + swizzled(first + (across ? other : half) * 8 + lane % 8,
                            2 * k + (across ? half : other));
}

__device__ __forceinline__ void write(float* out, const float (&c)[ROWS / 8][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float* to = out + (static_cast<size_t>(blockIdx.x) * OUTPUTS + row) * ROWS + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        to[8 * j] = c[j][0], to[8 * j + 1] = c[j][1];
        to[8 * ROWS + 8 * j] = c[j][2], to[8 * ROWS + 8 * j + 1] = c[j][3];
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) multiply_all(float* out, int n_rounds) {
    __shared__ __align__(1024) u8 outputs[OUTPUTS * PANEL_ROW], rows[ROWS * PANEL_ROW];
    pdl_launch_dependents();
    pdl_wait();
    fill(outputs, 0, OUTPUTS);
    fill(rows, OUTPUTS * COLUMNS, ROWS);
    __syncthreads();
    const int own = threadIdx.x / 32 * 16;  // the warp's outputs
    float c[ROWS / 8][4] = {};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    u32 a[COLUMNS / 16][4];
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++) load_matrices(a[k], matrices(outputs, own, k, false));
    fence_for_products();
    for (int round = 0; round < n_rounds; round++) {
        products_begin();
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++)
            multiply_rows(c, a[k], tile_at(shared_address(rows)) + 2 * k);
        products_commit();
        products_wait<1>();
    }
    products_wait<0>();
#else
    for (int round = 0; round < n_rounds; round++)
#pragma unroll 1
        for (int k = 0; k < COLUMNS / 16; k++) {
            u32 a[4], b[4];
            load_matrices(a, matrices(outputs, own, k, false));
#pragma unroll
            for (int j = 0; j < ROWS / 8; j += 2) {
                load_matrices(b, matrices(rows, 8 * j, k, true));
                multiply(c[j], a, b[0], b[1]);
                multiply(c[j + 1], a, b[2], b[3]);
            }
        }
#endif
    write(out, c);
}
