// Attention of one query row, with all that its position needs first: the norms of q and k, their
// rotation, and the write of k and v into the cache by the block that has the position's chunk.
// That block uses them from shared memory, so that no load waits for the write.
//
// Only q, k and v come from this step: the position and what the cache has of earlier ones are as
// the last step left them, and a step's first kernel lets nothing start before that has ended
// (embed.cu). So the first keys and values are on their way before this kernel waits.
#include "attention_block.cuh"
#include "rope.cuh"

// What the new position brings. Norms, if the layer has any, are (HEAD_DIM,); inv_freq is
// (N_ROT / 2,).
struct New {
    const float *q, *k, *v, *q_norm, *k_norm, *inv_freq;
    float scale, mscale, eps;
};

__device__ void normalise(float* x, const float* weight, float eps) {
    float square = 0;
    for (int d = threadIdx.x % 32; d < DIM; d += 32) square += x[d] * x[d];
    const float factor = 1.0f / sqrtf(warp_sum(square) / DIM + eps);
    for (int d = threadIdx.x % 32; d < DIM; d += 32) x[d] = x[d] * factor * weight[d];
    __syncwarp();
}

__device__ void rotate_head(float* x, const float2* turn) {
    for (int i = threadIdx.x % 32; i < N_ROT / 2; i += 32) {
        if (NEOX) {
            const float2 r = rotate_pair(x[i], x[i + N_ROT / 2], turn[i]);
            x[i] = r.x, x[i + N_ROT / 2] = r.y;
        } else {
            float2& pair = reinterpret_cast<float2*>(x)[i];
            pair = rotate_pair(pair.x, pair.y, turn[i]);
        }
    }
    __syncwarp();
}

// What needs no q, k or v. Ends with a barrier.
__device__ void prepare(Shared& shared, const New& fresh, int position) {
    for (int i = threadIdx.x; i < N_ROT / 2; i += THREADS)
        shared.turn[i] = turn_of(position, fresh.inv_freq[i], fresh.mscale);
    for (int d = threadIdx.x; QK_NORM && d < DIM; d += THREADS)
        shared.norm[0][d] = fresh.q_norm[d], shared.norm[1][d] = fresh.k_norm[d];
    for (int h = n_heads() + warp_index(); h < 8; h += WARPS) stage_query(shared, h, nullptr, 0);
    __syncthreads();
}

// A head of q, k or v, from memory to where it is used, for one warp: normed and rotated, as the
// queries of products, or into the cache and for this block. Slots are the position's.
__device__ void bring(Shared& shared, const New& fresh, int head, u8* slot_k, u8* slot_v) {
    const int n_q = n_heads(), of = kv_head() * DIM;
    const float* from = head < n_q ? fresh.q + (first_head() + head) * DIM
                                   : (head == n_q ? fresh.k : fresh.v) + of;
    float* x = shared.heads[head];
    for (int d = threadIdx.x % 32 * 4; d < DIM; d += 128)
        *reinterpret_cast<float4*>(x + d) = load_activations(from + d);
    __syncwarp();
    if (head <= n_q) {
        if (QK_NORM) normalise(x, shared.norm[head == n_q], fresh.eps);
        rotate_head(x, shared.turn);
    }
    const bool first = blockIdx.y % SHARES == 0;  // of the group's blocks
    if (head < n_q) {
        stage_query(shared, head, x, fresh.scale);
    } else if (head == n_q) {
        kv::keep_head<TypeK>(shared.k, x);
        if (first) kv::store_head<TypeK>(slot_k, kv_head(), x);
    } else {
        kv::keep_head<TypeV>(shared.v, x);
        if (first) kv::store_head<TypeV>(slot_v, kv_head(), x);
    }
}

__device__ __forceinline__ void rope_attend(const New& fresh, const int* pos, u8* cache_k,
                                            u8* cache_v, float* partials, unsigned* counters,
                                            float* out, float softcap, int window, int n_slots) {
    __shared__ Shared shared;
    pdl_begin<NARROW<N_HEAD * HEAD_DIM>>();
    const int position = __ldcg(pos);
    const Span span(position, window);
    if (blockIdx.x >= span.n_chunks) return;
    const bool has_last = (span.n_chunks - 1) % gridDim.x == blockIdx.x;  // of the chunks
    const Head head = {cache_k, cache_v, Ring(span.low, position, n_slots)};
    attend(shared, span, head, 0, partials, out, softcap, [&] {
        prepare(shared, fresh, position);
        pdl_wait_and_begin<NARROW<N_HEAD * HEAD_DIM>>();
        const size_t slot = position % n_slots;
        for (int h = warp_index(); h < n_heads() + 2 * has_last; h += WARPS)
            bring(shared, fresh, h, cache_k + slot * TypeK::SLOT, cache_v + slot * TypeV::SLOT);
        __syncthreads();
    });
    if (out) combine_heads(shared, 0, partials, counters, out);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_decode(const float* q, const float* k, const float* v, const float* q_norm,
                      const float* k_norm, const float* inv_freq, const int* pos, u8* cache_k,
                      u8* cache_v, float* partials, unsigned* counters, float* out, float scale,
                      float softcap, float mscale, float eps, int window, int n_slots) {
    rope_attend({q, k, v, q_norm, k_norm, inv_freq, scale, mscale, eps}, pos, cache_k, cache_v,
                partials, counters, out, softcap, window, n_slots);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_split(const float* q, const float* k, const float* v, const float* q_norm,
                     const float* k_norm, const float* inv_freq, const int* pos, u8* cache_k,
                     u8* cache_v, float* chunks, float scale, float softcap, float mscale,
                     float eps, int window, int n_slots) {
    rope_attend({q, k, v, q_norm, k_norm, inv_freq, scale, mscale, eps}, pos, cache_k, cache_v,
                chunks, nullptr, nullptr, softcap, window, n_slots);
}
