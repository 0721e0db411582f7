// Products of many rows with a weight, in two designs. See llamagraph/kernels/gemm.py. Blocks are
// tiles of rows (x), which share weights, and of outputs (y).

#ifdef TILE_ROWS
#if TILE_ROWS <= 32
#include "gemm_few.cuh"
#else
#include "gemm_tile.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_rows(const u8* weight, const float* x, const int* n_rows, float* out, int n_in, int n_out) {
    product<false>(weight, x, n_rows, out, n_in, n_out);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gemm_add(const u8* weight, const float* x, const int* n_rows, float* hidden, int n_in, int n_out) {
    product<true>(weight, x, n_rows, hidden, n_in, n_out);
}

#endif
