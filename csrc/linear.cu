// What follows a product with a weight. WIDTH is the length of a row. Reference:
// llamagraph/kernels/linear.py.
#include "common.cuh"

#ifdef WIDTH

// out += bias, a block a row.
extern "C" __global__ void __launch_bounds__(256)
add_bias(const float* bias, const int* n_rows, float* out) {
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.x >= *n_rows) return;
    float* row = out + static_cast<size_t>(blockIdx.x) * WIDTH;
    if constexpr (WIDTH % 4 == 0) {
        for (int i = threadIdx.x; i < WIDTH / 4; i += 256) {
            float4 y = load_activations(row + 4 * i);
            const float4 b = reinterpret_cast<const float4*>(bias)[i];
            y.x += b.x, y.y += b.y, y.z += b.z, y.w += b.w;
            reinterpret_cast<float4*>(row)[i] = y;
        }
    } else {
        for (int i = threadIdx.x; i < WIDTH; i += 256) row[i] += bias[i];
    }
}

#endif
