// Root mean square norms: y = x / sqrt(mean(x^2) + eps) * weight, over rows of WIDTH floats or
// heads of HEAD_DIM, both multiples of 4. References: llamagraph/kernels/norm.py. How many rows a
// step has is known before its first kernel lets others start.
#include "panels.cuh"

// A row that a block's `Threads` threads hold in registers, 16 bytes at a time.
template <int Width, int Threads>
struct Row {
    static constexpr int VECTORS = Width / 4, EACH = (VECTORS + Threads - 1) / Threads;
    float4 v[EACH];

    __device__ __forceinline__ static int at(int i) { return i * Threads + threadIdx.x; }

    __device__ __forceinline__ void load(const float* x) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            v[i] = at(i) < VECTORS ? load_activations(x + 4 * at(i)) : make_float4(0, 0, 0, 0);
    }

    __device__ __forceinline__ float factor(float eps) const {
        __shared__ float partial[Threads / 32];
        float squares = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        return rsqrtf(block_sum(squares, partial) / Width + eps);
    }
};

// The norm of x, four numbers at a time: `put(i, k, y)` gets those from 4k on, the thread's i-th.
// Waits for earlier kernels once the weights are on their way, and then does `start`.
template <int Width, int Threads, class Start, class Put>
__device__ __forceinline__ void norm_row(const float* x, const float* weight, float eps,
                                         Start start, Put put) {
    using Vectors = Row<Width, Threads>;
    Vectors weights, row;
    weights.load(weight);
    pdl_wait();
    row.load(x);
    start();
    const float factor = row.factor(eps);
#pragma unroll
    for (int i = 0; i < Vectors::EACH; i++) {
        if (row.at(i) >= Vectors::VECTORS) continue;
        const float4 v = row.v[i], w = weights.v[i];
        put(i, row.at(i), make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z,
                                      v.w * factor * w.w));
    }
}

// The norm of x into out, or added to it.
template <int Width, int Threads, bool Add>
__device__ __forceinline__ void write_norm(const float* x, const float* weight, float* out,
                                           float eps) {
    Row<Width, Threads> before;
    const auto start = [&] {
        if constexpr (Add) before.load(out);
    };
    norm_row<Width, Threads>(x, weight, eps, start, [&](int i, int k, float4 y) {
        if constexpr (Add)
            y.x += before.v[i].x, y.y += before.v[i].y, y.z += before.v[i].z, y.w += before.v[i].w;
        reinterpret_cast<float4*>(out)[k] = y;
    });
}

#ifdef WIDTH

extern "C" __global__ void __launch_bounds__(256)
rms_norm(const float* x, const float* weight, const int* n_rows, float* out, float eps) {
    pdl_launch_dependents();
    const size_t at = static_cast<size_t>(blockIdx.x) * WIDTH;
    if (blockIdx.x < __ldcg(n_rows)) write_norm<WIDTH, 256, false>(x + at, weight, out + at, eps);
}

#ifdef THREADS
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm_panels(const float* x, const float* weight, const int* n_rows, __half* out, float eps) {
    pdl_launch_dependents();
    if (blockIdx.x >= __ldcg(n_rows)) return;
    norm_row<WIDTH, THREADS>(x + static_cast<size_t>(blockIdx.x) * WIDTH, weight, eps, [] {},
                             [&](int, int k, float4 y) {
                                 store_in_panels(out, gridDim.x, blockIdx.x, 4 * k, y);
                             });
}
#endif

extern "C" __global__ void __launch_bounds__(256)
rms_norm_last(const float* x, const float* weight, const int* n_rows, float* out, float eps) {
    pdl_launch_dependents();
    const size_t at = static_cast<size_t>(__ldcg(n_rows) - 1) * WIDTH;
    write_norm<WIDTH, 256, false>(x + at, weight, out, eps);
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_add(const float* x, const float* weight, const int* n_rows, float* hidden, float eps) {
    pdl_launch_dependents();
    const size_t at = static_cast<size_t>(blockIdx.x) * WIDTH;
    if (blockIdx.x < __ldcg(n_rows)) write_norm<WIDTH, 256, true>(x + at, weight, hidden + at, eps);
}

#endif

#ifdef HEAD_DIM

// A warp a head, in place.
extern "C" __global__ void __launch_bounds__(32)
rms_norm_heads(const float* weight, const int* n_rows, float* x, float eps) {
    pdl_launch_dependents();
    float* head = x + (static_cast<size_t>(blockIdx.x) * gridDim.y + blockIdx.y) * HEAD_DIM;
    if (blockIdx.x < __ldcg(n_rows)) write_norm<HEAD_DIM, 32, false>(head, weight, head, eps);
}

#endif
