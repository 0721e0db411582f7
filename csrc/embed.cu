// Rows of the embedding matrix, chosen by the step's tokens. N_EMBD is the length of a row; TYPE,
// UNIT and RW say how the matrix is stored (quants.cuh). Reference: llamagraph/kernels/embed.py.
#include "quants.cuh"

#ifdef TYPE

// A thread brings 32 numbers of a row. As a step's first kernel it lets the others start only when
// the last step has ended: they find the position and the KV cache as that step left them.
extern "C" __global__ void __launch_bounds__(64)
embed_rows(const int* tokens, const int* pos, const int* n_rows, const u8* token_embd, float* out,
           float scale) {
    pdl_wait();
    pdl_launch_dependents();
    const int row = blockIdx.x, block = blockIdx.y * 64 + threadIdx.x;
    if (row >= *n_rows || block >= N_EMBD / 32) return;
    constexpr int PER_UNIT = UNIT / 32;
    const auto unit = unit_at<TYPE<UNIT>, RW>(token_embd, N_EMBD / UNIT, tokens[*pos + row],
                                              block / PER_UNIT);
    float w[32];
    values<TYPE<UNIT>>(unit, block % PER_UNIT, w);
    float4* to = reinterpret_cast<float4*>(out + static_cast<size_t>(row) * N_EMBD + block * 32);
#pragma unroll
    for (int i = 0; i < 8; i++)
        to[i] = make_float4(w[4 * i] * scale, w[4 * i + 1] * scale, w[4 * i + 2] * scale,
                            w[4 * i + 3] * scale);
}

#endif
