// A weight times one row (decode): the plain product, added to the residual stream, behind a norm,
// as gate and up of a feed-forward block, or as q, k and v. References: llamagraph/kernels/gemv.py.
//
// An instance has one entry, chosen by ADD, NORM, ACT, N_Q and BIAS. TYPE, UNIT and RW say how the
// weight is stored (quants.cuh), N_OUT how many rows it has.
#ifdef ACT
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
#include "gemv.cuh"

extern __shared__ uint4 dynamic_shared[];

// One product: `before(row)` and `after(row, sums, factor, requested)` as in for_groups, by the
// result's row; the second weight is for the second part.
template <bool Norm, class Before, class After>
__device__ __forceinline__ void product(const u8* weight, const u8* second, int n_out,
                                        const float* x, const float* norm, float eps,
                                        Before before, After after) {
    using Type = TYPE<UNIT>;
    char* row = reinterpret_cast<char*>(dynamic_shared);
    pdl_launch_dependents();
    for_groups<Type, UNIT, RW>(
        ceil_div(n_out, RW), 0, gridDim.x, row,
        [&](int g, int part) { return group_at<Type, UNIT, RW>(part ? second : weight, g); },
        [&] {
            Row<Type, Norm> in;
            in.request(norm);
            pdl_wait();
            return in.store(row, x, norm, eps);
        },
        [&](int g, int lane) { return g * RW + lane < n_out ? before(g * RW + lane) : 0.f; },
        [&](int g, int lane, const float* sums, float factor, float requested) {
            if (g * RW + lane < n_out) after(g * RW + lane, sums, factor, requested);
        });
}

#if defined(ACT)

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv_norm_gated(const float* hidden, const float* ffn_norm, const u8* ffn_gate, const u8* ffn_up,
                float* out, float eps) {
    product<true>(
        ffn_gate, ffn_up, N_OUT, hidden, ffn_norm, eps, [](int) { return 0.f; },
        [&](int row, const float* sums, float factor, float) {
            out[row] = ACT(sums[0] * factor) * (sums[1] * factor);
        });
}

#elif defined(N_Q)

struct Heads {
    const u8* weight;
    float* out;
    const float* bias;  // or none
    int n_out;
};

// q, k and v in one launch, in up to two types: the last OTHER_BLOCKS blocks do what is stored as
// OTHER_TYPE, which is k with K_OTHER and v with V_OTHER.
template <bool Other, class Type, int UnitWeights, int TileRows>
__device__ __forceinline__ void some_heads(Heads q, Heads k, Heads v, const float* x,
                                           const float* norm, float eps) {
    constexpr int Q = Other ? 0 : (N_Q + TileRows - 1) / TileRows;
    constexpr int K = Other == K_OTHER ? (N_K + TileRows - 1) / TileRows : 0;
    constexpr int V = Other == V_OTHER ? (N_V + TileRows - 1) / TileRows : 0;
    char* row = reinterpret_cast<char*>(dynamic_shared);
    const int first_block = Other ? gridDim.x - OTHER_BLOCKS : 0;
    const int n_blocks = Other ? OTHER_BLOCKS : gridDim.x - OTHER_BLOCKS;
    auto heads_of = [&](int g) { return g < Q ? q : g < Q + K ? k : v; };
    auto group_of = [&](int g) { return g < Q ? g : g < Q + K ? g - Q : g - Q - K; };
    for_groups<Type, UnitWeights, TileRows>(
        Q + K + V, first_block, n_blocks, row,
        [&](int g, int) {
            return group_at<Type, UnitWeights, TileRows>(heads_of(g).weight, group_of(g));
        },
        [&] {
            Row<Type, true> in;
            in.request(norm);
            pdl_wait_and_begin<NARROW<N_IN>>();
            return in.store(row, x, norm, eps);
        },
        [&](int g, int lane) {
            const Heads h = heads_of(g);
            const int at = group_of(g) * TileRows + lane;
            return h.bias && at < h.n_out ? h.bias[at] : 0.f;
        },
        [&](int g, int lane, const float* sums, float factor, float bias) {
            const Heads h = heads_of(g);
            const int at = group_of(g) * TileRows + lane;
            if (at < h.n_out) h.out[at] = sums[0] * factor + bias;
        });
}

__device__ __forceinline__ void all_heads(const float* x, const float* norm, float eps, Heads q,
                                          Heads k, Heads v) {
    pdl_begin<NARROW<N_IN>>();
#if OTHER_BLOCKS
    if (blockIdx.x >= gridDim.x - OTHER_BLOCKS) {
        some_heads<true, OTHER_TYPE<OTHER_UNIT>, OTHER_UNIT, OTHER_RW>(q, k, v, x, norm, eps);
        return;
    }
#endif
    some_heads<false, TYPE<UNIT>, UNIT, RW>(q, k, v, x, norm, eps);
}

#ifdef BIAS
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv_norm_qkv_bias(const float* hidden, const float* attn_norm, const u8* attn_q, const u8* attn_k,
                   const u8* attn_v, const float* q_bias, const float* k_bias,
                   const float* v_bias, float* q, float* k, float* v, float eps) {
    all_heads(hidden, attn_norm, eps, {attn_q, q, q_bias, N_Q}, {attn_k, k, k_bias, N_K},
              {attn_v, v, v_bias, N_V});
}
#else
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv_norm_qkv(const float* hidden, const float* attn_norm, const u8* attn_q, const u8* attn_k,
              const u8* attn_v, float* q, float* k, float* v, float eps) {
    all_heads(hidden, attn_norm, eps, {attn_q, q, nullptr, N_Q}, {attn_k, k, nullptr, N_K},
              {attn_v, v, nullptr, N_V});
}
#endif

#elif defined(ADD)

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv_add(const u8* weight, const float* x, float* hidden) {
    product<false>(
        weight, nullptr, N_OUT, x, nullptr, 0, [&](int row) { return __ldcg(hidden + row); },
        [&](int row, const float* sums, float, float residual) {
            hidden[row] = residual + sums[0];
        });
}

#elif defined(NORM)

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv_norm(const u8* weight, const float* hidden, const float* norm, float* out, float eps) {
    product<true>(
        weight, nullptr, N_OUT, hidden, norm, eps, [](int) { return 0.f; },
        [&](int row, const float* sums, float factor, float) { out[row] = sums[0] * factor; });
}

#elif defined(TYPE)

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
gemv(const u8* weight, const float* x, float* out) {
    product<false>(
        weight, nullptr, N_OUT, x, nullptr, 0, [](int) { return 0.f; },
        [&](int row, const float* sums, float, float) { out[row] = sums[0]; });
}

#endif
