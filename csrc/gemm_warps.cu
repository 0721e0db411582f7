// Products of few rows with weights by single warps: the plain product, added to the residual
// stream, as q, k and v, or as gate and up of a feed-forward block. See
// llamagraph/kernels/gemm_warps.py.
//
// An instance has one entry, chosen by ADD, V_TYPE and ACT. TYPE, UNIT and RW say how the weight
// is stored (quants.cuh), those with V_ how that of v is.

#ifdef STAGES
#if TILE_ROWS == 8
#include "warp_columns.cuh"
#else
#include "gemm_warps.cuh"
#endif

#if BLOCKS > 1
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#else
#define CLUSTER
#endif

// b and c may be none, of 0 outputs.
template <bool Add>
__device__ __forceinline__ void product(const Part& a, const Part& b, const Part& c,
                                        const __half* x, const int* n_rows) {
    const int block = blockIdx.x / BLOCKS, after_a = a.blocks(), after_b = after_a + b.blocks();
    pdl_begin<LATE>();
    if (block < after_b) {
        const Part part = block < after_a ? a : b;
        product_of_part<Usual, Add>(part, block < after_a ? block : block - after_a, x, n_rows);
    } else {
        product_of_part<Other, Add>(c, block - after_b, x, n_rows);
    }
}

#if defined(ACT)
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER
warps_gated(const u8* ffn_gate, const u8* ffn_up, const __half* x, const int* n_rows, __half* out,
            int n_out) {
    product<false>({ffn_gate, ffn_up, out, n_out}, {}, {}, x, n_rows);
}
#elif defined(V_TYPE)
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER
warps_qkv(const u8* attn_q, const u8* attn_k, const u8* attn_v, const __half* x, const int* n_rows,
          float* q, float* k, float* v, int n_q, int n_k, int n_v) {
    product<false>({attn_q, nullptr, q, n_q}, {attn_k, nullptr, k, n_k}, {attn_v, nullptr, v, n_v},
                   x, n_rows);
}
#elif defined(ADD)
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER
warps_add(const u8* weight, const __half* x, const int* n_rows, float* hidden, int n_out) {
    product<true>({weight, nullptr, hidden, n_out}, {}, {}, x, n_rows);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER
warps_rows(const u8* weight, const __half* x, const int* n_rows, float* out, int n_out) {
    product<false>({weight, nullptr, out, n_out}, {}, {}, x, n_rows);
}
#endif

#endif
