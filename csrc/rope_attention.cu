// Attention of one query row, with all that its position needs first: the norms of q and k, their
// rotation, and the write of k and v into the cache by the block that has the position's chunk.
// That block uses them from shared memory, so that no load waits for the write.
#include "attention_block.cuh"
#include "rope.cuh"

constexpr int MINE = ((HEADS + 2) * DIM / 4 + THREADS - 1) / THREADS;

// What the new position brings, for the block's heads.
struct New {
    float4 mine[MINE];  // the thread's share of q, k and v, head after head
    float eps, mscale, scale;
    bool needed;  // k and v, by the blocks that have the position's chunk

    // On their way before the position is known, which decides what is needed.
    __device__ New(const float* q, const float* k, const float* v, float scale, float mscale,
                   float eps)
        : eps(eps), mscale(mscale), scale(scale), needed(false) {
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int i = j * THREADS + threadIdx.x, head = i / (DIM / 4) - n_heads();
            const float* from = head < 0 ? q + first_head() * DIM + i * 4
                                         : (head ? v : k) + kv_head() * DIM + i % (DIM / 4) * 4;
            if (head < 2) mine[j] = load_activations(from);
        }
    }
    __device__ void put(Shared& shared) const {
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int i = j * THREADS + threadIdx.x;
            if (i < (n_heads() + 2) * DIM / 4)
                *reinterpret_cast<float4*>(&shared.heads[0][0] + i * 4) = mine[j];
        }
    }
};

__device__ void normalise(float* x, const float* weight, float eps) {
    float square = 0;
    for (int d = threadIdx.x % 32; d < DIM; d += 32) square += x[d] * x[d];
    const float factor = 1.0f / sqrtf(warp_sum(square) / DIM + eps);
    for (int d = threadIdx.x % 32; d < DIM; d += 32) x[d] = x[d] * factor * weight[d];
    __syncwarp();
}

__device__ void rotate_head(float* x, const float* inv_freq, int position, float mscale) {
    for (int i = threadIdx.x % 32; i < N_ROT / 2; i += 32) {
        float &a = x[NEOX ? i : 2 * i], &b = x[NEOX ? i + N_ROT / 2 : 2 * i + 1];
        const float2 r = rotate_pair(a, b, position, inv_freq[i], mscale);
        a = r.x, b = r.y;
    }
}

// q, k and v, normed and rotated a head a warp. Ends with a barrier.
__device__ void stage_heads(Shared& shared, const New& fresh, int position) {
    const int n_q = n_heads();
    fresh.put(shared);
    __syncthreads();
    for (int head = warp_index(); head < n_q + fresh.needed; head += WARPS) {
        if (QK_NORM) normalise(shared.heads[head], shared.norm[head == n_q], fresh.eps);
        rotate_head(shared.heads[head], shared.inv_freq, position, fresh.mscale);
    }
    __syncthreads();
}

// A warp stores k, another v: for this block, and the group's first block in the cache.
__device__ void store_new(Shared& shared, u8* k, u8* v) {
    const float* heads = shared.heads[n_heads()];
    if (warp_index() == 0) {
        kv::keep_head<TypeK>(shared.k, heads);
        if (blockIdx.y % SHARES == 0) kv::store_head<TypeK>(k, kv_head(), heads);
    } else if (warp_index() == 1) {
        kv::keep_head<TypeV>(shared.v, heads + DIM);
        if (blockIdx.y % SHARES == 0) kv::store_head<TypeV>(v, kv_head(), heads + DIM);
    }
}

// Norms, if the layer has any, are (HEAD_DIM,); inv_freq is (N_ROT / 2,).
__device__ void load_weights(Shared& shared, const float* q_norm, const float* k_norm,
                             const float* inv_freq) {
    for (int i = threadIdx.x; i < N_ROT / 2; i += THREADS) shared.inv_freq[i] = inv_freq[i];
    for (int d = threadIdx.x; QK_NORM && d < DIM; d += THREADS)
        shared.norm[0][d] = q_norm[d], shared.norm[1][d] = k_norm[d];
}

__device__ __forceinline__ void rope_attend(Shared& shared, New fresh, int position, u8* cache_k,
                                            u8* cache_v, float* partials, unsigned* counters,
                                            float* out, float softcap, int window, int n_slots) {
    const Span span(position, window);
    if (blockIdx.x >= span.n_chunks) return;
    fresh.needed = (span.n_chunks - 1) % gridDim.x == blockIdx.x;
    const Head head = {cache_k, cache_v, Ring(span.low, position, n_slots)};
    attend(shared, span, head, 0, partials, out, softcap, [&] {
        stage_heads(shared, fresh, position);
        const size_t slot = position % n_slots;
        if (fresh.needed)
            store_new(shared, cache_k + slot * TypeK::SLOT, cache_v + slot * TypeV::SLOT);
        stage_queries(shared, &shared.heads[0][0], fresh.scale);
        __syncthreads();
    });
    if (out) combine_heads(shared, 0, partials, counters, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_decode(const float* q, const float* k, const float* v, const float* q_norm,
                      const float* k_norm, const float* inv_freq, const int* pos, u8* cache_k,
                      u8* cache_v, float* partials, unsigned* counters, float* out, float scale,
                      float softcap, float mscale, float eps, int window, int n_slots) {
    __shared__ Shared shared;
    pdl_launch_dependents();
    load_weights(shared, q_norm, k_norm, inv_freq);
    pdl_wait();
    rope_attend(shared, New(q, k, v, scale, mscale, eps), *pos, cache_k, cache_v, partials,
                counters, out, softcap, window, n_slots);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_split(const float* q, const float* k, const float* v, const float* q_norm,
                     const float* k_norm, const float* inv_freq, const int* pos, u8* cache_k,
                     u8* cache_v, float* chunks, float scale, float softcap, float mscale,
                     float eps, int window, int n_slots) {
    __shared__ Shared shared;
    pdl_launch_dependents();
    load_weights(shared, q_norm, k_norm, inv_freq);
    pdl_wait();
    rope_attend(shared, New(q, k, v, scale, mscale, eps), *pos, cache_k, cache_v, chunks,
                nullptr, nullptr, softcap, window, n_slots);
}
