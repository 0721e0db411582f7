// Combines the chunks of many rows, in order. Knows neither queries nor the cache.
#include "common.cuh"

constexpr int FOURS = HEAD_DIM / 4;
constexpr int AT_ONCE = 16;  // chunks that are on their way together

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A block has a row (x) and 32 of its heads (y) at most, a thread four numbers of a head at a time.
// chunks: of a row and head the weighted values of all chunks (MAX_CHUNKS, HEAD_DIM), their maxima
// in powers of two, the sums of their weights; zeros where there is nothing.
extern "C" __global__ void __launch_bounds__(256)
attention_rows_combine(const float* chunks, const int* n_rows, float* out) {
    pdl_launch_dependents();
    pdl_wait();
    if (blockIdx.x >= *n_rows) return;
    const int i = blockIdx.y * 256 + threadIdx.x, head = i / FOURS, d = i % FOURS * 4;
    if (head >= N_HEAD) return;
    const size_t index = static_cast<size_t>(blockIdx.x) * N_HEAD + head;
    const float* from = chunks + index * (MAX_CHUNKS * (HEAD_DIM + 2));
    const float* stats = from + MAX_CHUNKS * HEAD_DIM;
    float weight[MAX_CHUNKS], size[MAX_CHUNKS], top = -3e38f, total = 0;
    float4 part[AT_ONCE], sum = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++)
        weight[c] = __ldcg(stats + c), size[c] = __ldcg(stats + MAX_CHUNKS + c);
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; c++) top = fmaxf(top, weight[c]);
#pragma unroll
    for (int first = 0; first < MAX_CHUNKS; first += AT_ONCE) {
#pragma unroll
        for (int c = first; c < MAX_CHUNKS && c < first + AT_ONCE; c++)
            part[c - first] = load_activations(from + c * HEAD_DIM + d);
        __syncwarp();  // all are on their way before the first is used
#pragma unroll
        for (int c = first; c < MAX_CHUNKS && c < first + AT_ONCE; c++) {
            const float w = power_of_2(weight[c] - top);
            const float4 p = part[c - first];
            total += w * size[c];
            sum.x += w * p.x, sum.y += w * p.y, sum.z += w * p.z, sum.w += w * p.w;
        }
    }
    const float scale = 1 / total;
    *reinterpret_cast<float4*>(out + index * HEAD_DIM + d) = {sum.x * scale, sum.y * scale,
                                                             sum.z * scale, sum.w * scale};
}
