// Caps the logits. See llamagraph/kernels/head.py. Blocks: 1024 logits (x) of a row (y).

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
cap_logits(const int* n_rows, float* logits, float cap, int n_vocab) {
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.y >= *n_rows) return;
    float* row = logits + static_cast<size_t>(blockIdx.y) * n_vocab;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int i = blockIdx.x * 1024 + j * 256 + threadIdx.x;
        if (i < n_vocab) row[i] = cap * tanhf(row[i] / cap);
    }
}
