// The second half of what an adapter adds to a product. TYPE, UNIT and RW say how its matrix is
// stored (quants.cuh), RANK is the length of its rows, a multiple of 32; a block has ROWS rows of the
// step. Reference: llamagraph/kernels/lora.py.
#include "quants.cuh"

#ifdef RANK

// out += scales[index] * factor * product @ b.T. A thread has an output of ROWS rows, in F32.
extern "C" __global__ void __launch_bounds__(128)
lora_add(const float* scales, const u8* b, const float* product, const int* n_rows, float* out,
         float factor, int index, int n_out) {
    constexpr int BLOCKS = RANK / 32, PER_UNIT = UNIT / 32;
    __shared__ float4 rows[ROWS][8];
    const int n = min(static_cast<int>(blockIdx.y) * 128 + static_cast<int>(threadIdx.x), n_out - 1);
    const int first = blockIdx.x * ROWS;
    float w[32], sums[ROWS] = {};
    pdl_launch_dependents();
    values<TYPE<UNIT>>(unit_at<TYPE<UNIT>, RW>(b, RANK / UNIT, n, 0), 0, w);
    pdl_wait();
    const int here = min(ROWS, *n_rows - first);
    if (here <= 0) return;
    for (int block = 0; block < BLOCKS; block++) {
        if (block > 0) {
            __syncthreads();
            values<TYPE<UNIT>>(unit_at<TYPE<UNIT>, RW>(b, RANK / UNIT, n, block / PER_UNIT),
                               block % PER_UNIT, w);
        }
        for (int i = threadIdx.x; i < here * 8; i += 128)
            rows[i / 8][i % 8] = load_activations(
                product + static_cast<size_t>(first + i / 8) * RANK + block * 32 + i % 8 * 4);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= here) break;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float4 x = rows[r][i];
                sums[r] += w[4 * i] * x.x + w[4 * i + 1] * x.y + w[4 * i + 2] * x.z +
                           w[4 * i + 3] * x.w;
            }
        }
    }
    if (blockIdx.y * 128 + threadIdx.x >= n_out) return;
    const float scale = scales[index] * factor;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= here) break;
        float* to = out + static_cast<size_t>(first + r) * n_out + n;
        *to = __ldcg(to) + scale * sums[r];
    }
}

#endif
