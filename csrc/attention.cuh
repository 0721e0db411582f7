// What the attention kernels share: what a row sees of the KV cache and how that is cut into
// chunks, where positions are, the types of the cache, and the weights of scores.
// llamagraph/kernels/attend.py says the same in numpy. Knows no launch.
#pragma once
#include "mma.cuh"

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

// ---- Types of the cache -------------------------------------------------------------------------

// What a half loses of x; together the two have 22 bits.
__device__ inline float lost(float x) { return x - __half2float(__float2half_rn(x)); }

// 16 bytes that another kernel wrote, or zeros where there is nothing.
__device__ __forceinline__ uint4 load_if(bool there, const void* p) {
    uint4 v;
    asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0;"
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 "@there ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "r"(static_cast<u32>(there)));
    return v;
}

// A type loads eight numbers of a head at a time (`fetch` from shared memory) and gives them as the
// sum of PARTS operands, each of eight halves.
namespace kv {

struct F16 {
    using Item = __half;
    using Eight = uint4;
    static constexpr int PARTS = 1;
    static __device__ Eight load_if(bool there, const Item* p) { return ::load_if(there, p); }
    static __device__ Eight fetch(const Item* p) { return *reinterpret_cast<const uint4*>(p); }
    static __device__ uint4 part(const Eight& e, int) { return e; }
    static __device__ Item item(float x) { return __float2half_rn(x); }
};

struct F32 {
    using Item = float;
    struct Eight {
        uint4 a, b;
    };
    static constexpr int PARTS = 2;
    static __device__ Eight load_if(bool there, const Item* p) {
        return {::load_if(there, p), ::load_if(there, p + 4)};
    }
    static __device__ Eight fetch(const Item* p) {
        const uint4* q = reinterpret_cast<const uint4*>(p);
        return {q[0], q[1]};
    }
    static __device__ u32 pair(u32 low, u32 high, int part) {
        const float a = __uint_as_float(low), b = __uint_as_float(high);
        return part ? pack(lost(a), lost(b)) : pack(a, b);
    }
    static __device__ uint4 part(const Eight& e, int part) {
        return {pair(e.a.x, e.a.y, part), pair(e.a.z, e.a.w, part), pair(e.b.x, e.b.y, part),
                pair(e.b.z, e.b.w, part)};
    }
    static __device__ Item item(float x) { return x; }
};

}  // namespace kv

// ---- Scores -------------------------------------------------------------------------------------

// 2^x for x <= 0; what would be below 2^-126 is 0.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// e^x for x <= 0.
__device__ __forceinline__ float weight_of(float x) { return power_of_2(x * LOG2_E); }

// Scores become softcap * tanh(score / softcap), where there is a cap.
template <int N>
__device__ __forceinline__ void cap(float (&s)[N][4], float softcap) {
    if (softcap == 0) return;
#pragma unroll
    for (int i = 0; i < 4 * N; i++) s[i / 4][i % 4] = softcap * tanhf(s[i / 4][i % 4] / softcap);
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
