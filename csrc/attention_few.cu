// Attention of few query rows over the KV cache. Blocks share the chunks of positions; what a chunk
// gives does not depend on which block takes it, and chunks are combined in order, so bits never
// depend on the grid. A block has up to 8 query heads of one KV head and reads the cache once for
// them.
#include "attention_block.cuh"

__device__ __forceinline__ void attend_row(const float* q, const u8* cache_k, const u8* cache_v,
                                           const int* pos, const int* n_rows, float* partials,
                                           unsigned* counters, float* out, float scale,
                                           float softcap, int window, int n_slots) {
    __shared__ Shared shared;
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.z;
    if (row >= *n_rows) return;
    const Span span(*pos + row, window);
    if (blockIdx.x >= span.n_chunks) return;
    const Head head = {cache_k, cache_v, Ring(span.low, span.last + 1, n_slots)};
    attend(shared, span, head, row, partials, out, softcap, [&] {
        for (int h = warp_index(); h < 8; h += WARPS)
            stage_query(shared, h, q + (row * N_HEAD + first_head() + h) * DIM, scale);
        __syncthreads();
    });
    if (out) combine_heads(shared, row, partials, counters, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_decode(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
                 const int* n_rows, float* partials, unsigned* counters, float* out, float scale,
                 float softcap, int window, int n_slots) {
    attend_row(q, cache_k, cache_v, pos, n_rows, partials, counters, out, scale, softcap, window,
               n_slots);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_split(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
                const int* n_rows, float* chunks, float scale, float softcap, int window,
                int n_slots) {
    attend_row(q, cache_k, cache_v, pos, n_rows, chunks, nullptr, nullptr, scale, softcap, window,
               n_slots);
}

// A block a head (x) and row (y), a warp for 64 numbers of the head.
extern "C" __global__ void __launch_bounds__(32 * PIECES)
attention_combine(const float* chunks, const int* pos, const int* n_rows, float* out, int window) {
    __shared__ float weight[PIECES][MAX_CHUNKS];
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.y;
    if (row >= *n_rows) return;
    const size_t head = row * N_HEAD + blockIdx.x;
    combine(chunks + head * PARTIAL, Span(*pos + row, window).n_chunks, warp_index() * 64,
            weight[warp_index()], out + head * DIM);
}
