// Combines the chunks of many rows, in order. Knows neither queries nor the cache.
#include "panels.cuh"

static_assert(MAX_CHUNKS <= 32, "a lane has a chunk");

constexpr int THREADS = (HEAD_DIM / 4 + 31) / 32 * 32;
constexpr int AT_ONCE = MAX_CHUNKS < 16 ? MAX_CHUNKS : 16;  // chunks that are loaded together

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A block has a head (x) of a row (y), a thread four of its numbers, which `put(column, sums)` gets.
// chunks: of a row and head the weighted values of all chunks (MAX_CHUNKS, HEAD_DIM), their maxima in
// powers of two, the sums of their weights; zeros where there is nothing.
template <class Put>
__device__ __forceinline__ void combine(const float* chunks, const int* n_rows, Put put) {
    __shared__ float weight[THREADS / 32][32];
    pdl_launch_dependents();
    if (blockIdx.y >= __ldcg(n_rows)) return;  // known before the step begins
    pdl_wait();
    const size_t index = static_cast<size_t>(blockIdx.y) * N_HEAD + blockIdx.x;
    const float* from = chunks + index * (MAX_CHUNKS * (HEAD_DIM + 2));
    const float* stats = from + MAX_CHUNKS * HEAD_DIM;
    const int d = threadIdx.x * 4, lane = threadIdx.x % 32;
    from += min(d, HEAD_DIM - 4);
    float4 part[AT_ONCE], sum = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) part[c] = load_activations(from + c * HEAD_DIM);
    const float m = lane < MAX_CHUNKS ? __ldcg(stats + lane) : -3e38f;
    const float l = lane < MAX_CHUNKS ? __ldcg(stats + MAX_CHUNKS + lane) : 0;
    const float w = power_of_2(m - warp_max(m));
    weight[threadIdx.x / 32][lane] = w / warp_sum(w * l);
    __syncthreads();  // all are on their way before the first is used
#pragma unroll
    for (int first = 0; first < MAX_CHUNKS; first += AT_ONCE) {
#pragma unroll
        for (int c = 0; first && c < AT_ONCE && first + c < MAX_CHUNKS; c++)
            part[c] = load_activations(from + (first + c) * HEAD_DIM);
#pragma unroll
        for (int c = 0; c < AT_ONCE && first + c < MAX_CHUNKS; c++) {
            const float factor = weight[threadIdx.x / 32][first + c];
            sum.x += factor * part[c].x, sum.y += factor * part[c].y;
            sum.z += factor * part[c].z, sum.w += factor * part[c].w;
        }
    }
    if (d < HEAD_DIM) put(blockIdx.x * HEAD_DIM + d, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_rows_combine(const float* chunks, const int* n_rows, float* out) {
    combine(chunks, n_rows, [&](int column, float4 sum) {
        const size_t row = static_cast<size_t>(blockIdx.y) * (N_HEAD * HEAD_DIM);
        *reinterpret_cast<float4*>(out + row + column) = sum;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_rows_combine_panels(const float* chunks, const int* n_rows, __half* out) {
    combine(chunks, n_rows, [&](int column, float4 sum) {
        store_in_panels(out, gridDim.y, blockIdx.y, column, sum);
    });
}
