// What the attention kernels share: what a row sees of the KV cache and how that is cut into
// chunks, where positions are, and the weights of scores.
// llamagraph/kernels/attend.py says the same in numpy. Knows no launch.
#pragma once
#include "kv.cuh"

constexpr float NOTHING = -3e38f;  // below every score, and finite: NOTHING - NOTHING is 0
constexpr float LOG2_E = 1.44269504f;

// ---- Positions ----------------------------------------------------------------------------------

#ifdef MAX_CHUNKS
// What the row at a position sees, cut into chunks; they count from the first it sees of.
struct Span {
    int low, last;  // the first and the last position
    int chunk, first_chunk, n_chunks;

    __device__ Span(int position, int window) : last(position) {
        const int n_visible = window ? min(position + 1, window) : position + 1;
        int doublings = 0;
        while ((CHUNK << doublings) * (MAX_CHUNKS - 1) < n_visible) doublings++;
        low = position + 1 - n_visible;
        chunk = CHUNK << doublings;
        first_chunk = low / CHUNK >> doublings;
        n_chunks = (position / CHUNK >> doublings) - first_chunk + 1;
    }
    __device__ int start(int c) const { return (first_chunk + c) * chunk; }
    __device__ int stop(int c) const { return min(start(c) + chunk, last + 1); }
};
#endif

// Slots of the positions first .. end - 1, which are in the cache: the position modulo n_slots.
struct Ring {
    int first, end, slot, n_slots;

    __device__ Ring(int first, int end, int n_slots)
        : first(first), end(end), slot(first % n_slots), n_slots(n_slots) {}

    __device__ bool has(int position) const { return position >= first && position < end; }
    __device__ size_t slot_of(int position) const {
        const int s = slot + position - first;
        return s < n_slots ? s : s - n_slots;
    }
};

// ---- Scores -------------------------------------------------------------------------------------

// 2^x; what would be below 2^-126 is 0.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x for x <= 0.
__device__ __forceinline__ float weight_of(float x) { return power_of_2(x * LOG2_E); }

// tanh, within 2e-7: x is a score over a cap, and what is lost is multiplied by the cap alone.
__device__ __forceinline__ float soft_tanh(float x) {
    return 1 - __fdividef(2, 1 + power_of_2(fminf(x, 20) * (2 * LOG2_E)));
}

// Scores become softcap * tanh(score / softcap), where there is a cap.
template <int N>
__device__ __forceinline__ void cap(float (&s)[N][4], float softcap) {
    if (softcap == 0) return;
    const float part = 1 / softcap;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = softcap * soft_tanh(s[i / 4][i % 4] * part);
}

// The largest, and the sum, over the four lanes that share a row of a product.
__device__ __forceinline__ float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ float row_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
