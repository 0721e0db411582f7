// The activation between the products of a feed-forward block, where they are separate launches.
// Reference: llamagraph/kernels/mlp.py. ACT is silu or gelu, WIDTH the length
// of a row.
#include "panels.cuh"

#ifdef WIDTH

// out = act(gate) * up, all (rows, WIDTH): four numbers a thread, and the last few where 4 does not
// divide a row.
extern "C" __global__ void __launch_bounds__(256)
gate_act(const float* gate, const float* up, const int* n_rows, float* out) {
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.y >= *n_rows) return;
    const size_t row = static_cast<size_t>(blockIdx.y) * WIDTH;
    const int first = (blockIdx.x * 256 + threadIdx.x) * 4;
    for (int i = first; i < min(first + 4, WIDTH); i++) {
        out[row + i] = ACT(__ldcg(gate + row + i)) * __ldcg(up + row + i);
    }
}

// The same into panels; 64 divides a row.
extern "C" __global__ void __launch_bounds__(256)
gate_act_panels(const float* gate, const float* up, const int* n_rows, __half* out) {
    pdl_launch_dependents();
    pdl_wait();
    const int column = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (blockIdx.y >= *n_rows || column >= WIDTH) return;
    const size_t at = static_cast<size_t>(blockIdx.y) * WIDTH + column;
    const float4 g = load_activations(gate + at), u = load_activations(up + at);
    store_in_panels(out, gridDim.y, blockIdx.y, column,
                    make_float4(ACT(g.x) * u.x, ACT(g.y) * u.y, ACT(g.z) * u.z, ACT(g.w) * u.w));
}

#endif
