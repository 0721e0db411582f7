// Activations into panels. Reference: llamagraph/kernels/panels.py.
#include "panels.cuh"

// Four numbers of a row a thread.
extern "C" __global__ void __launch_bounds__(256)
to_panels(const float* x, const int* n_rows, __half* out, int n_in, int rows) {
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.y, column = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (row >= *n_rows || column >= n_in) return;
    store_in_panels(out, rows, row, column,
                    load_activations(x + static_cast<size_t>(row) * n_in + column));
}
