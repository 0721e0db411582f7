// The end of a step that chooses no token. See llamagraph/kernels/step.py.

#include "common.cuh"

extern "C" __global__ void advance(int* pos, int* n_rows) {
    pdl_launch_dependents();
    pdl_wait();
    if (threadIdx.x == 0) {
        *pos += *n_rows;
        *n_rows = 1;
    }
}
