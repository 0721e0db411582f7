// Attention of up to 32 query rows over a short cache, with all that their positions need first: the
// rotation of q and k, and the write of k and v. Every block has the new keys and values in shared
// memory, so that no load waits for the write.
//
// Only q, k and v come from this step: where its rows are and what the cache has of earlier
// positions is known before it begins, and a step's first kernel lets nothing start before the last
// step has ended (embed.cu). So the first keys and values are on their way before this one waits.
#include "attention_few_rows.cuh"
#include "panels.cuh"
#include "rope.cuh"

// What they bring. inv_freq is (N_ROT / 2,).
struct New {
    const float *q, *k, *v, *inv_freq;
    float scale, mscale;
};

// Two pairs of a head that a thread brings, of the block's queries, then of the new keys and values
// of its KV head. A pair is neighbours, or with NEOX lies in the halves of the rotated part.
struct Pairs {
    static constexpr int FOURS = DIM / 4, HEADS = QUERIES + 2 * ROWS;
    static constexpr int EACH = (HEADS * FOURS + THREADS - 1) / THREADS;  // of a thread
    int head, four, row;
    bool there, rotated;

    __device__ __forceinline__ Pairs(const Block& block, int n_rows, int each)
        : head((each * THREADS + threadIdx.x) / FOURS),
          four((each * THREADS + threadIdx.x) % FOURS),
          row(is_q() ? (block.first + head) / GROUP : (head - QUERIES) % ROWS),
          there(is_q() ? head < block.n : head < HEADS && row < n_rows),
          rotated(2 * four < ROTATED && (is_q() || is_k())) {}

    __device__ bool is_q() const { return head < QUERIES; }
    __device__ bool is_k() const { return head < QUERIES + ROWS; }
    // Where two numbers of the head are, and the other two.
    __device__ int a() const { return NEOX && 2 * four < ROTATED ? 2 * four : 4 * four; }
    __device__ int b() const { return a() + (NEOX && 2 * four < ROTATED ? ROTATED : 2); }

    __device__ __forceinline__ const float* source(const Block& block, const New& from) const {
        if (is_q()) return from.q + block.index(head) * DIM;
        return (is_k() ? from.k : from.v) + (row * N_HEAD_KV + blockIdx.x) * DIM;
    }
    __device__ __forceinline__ void rotate(float2& a, float2& b, const float2* turn) const {
        const float4 two = *reinterpret_cast<const float4*>(turn + 2 * four);
        const float2 first = {two.x, two.y}, second = {two.z, two.w};
        if (NEOX) {
            const float2 s = rotate_pair(a.x, b.x, first), t = rotate_pair(a.y, b.y, second);
            a = {s.x, t.x}, b = {s.y, t.y};
        } else {
            a = rotate_pair(a.x, a.y, first), b = rotate_pair(b.x, b.y, second);
        }
    }
    __device__ __forceinline__ void put(__half* to, u32 two, u32 others) const {
        *reinterpret_cast<u32*>(to + a()) = two, *reinterpret_cast<u32*>(to + b()) = others;
    }
};

// Waits for q, k and v and brings them into shared memory; one block of a KV head writes the latter
// into the cache. All loads are on their way before the first is used.
__device__ __forceinline__ void bring(Shared& shared, const Block& block, const New& from,
                                      int n_rows, u8* cache_k, u8* cache_v, int n_slots) {
    const float* source[Pairs::EACH];
    float2 x[Pairs::EACH][2];
#pragma unroll
    for (int e = 0; e < Pairs::EACH; e++) source[e] = Pairs(block, n_rows, e).source(block, from);
    pdl_wait();
#pragma unroll
    for (int e = 0; e < Pairs::EACH; e++) {
        const Pairs pairs(block, n_rows, e);
        if (!pairs.there) continue;
        x[e][0] = __ldcg(reinterpret_cast<const float2*>(source[e] + pairs.a()));
        x[e][1] = __ldcg(reinterpret_cast<const float2*>(source[e] + pairs.b()));
    }
#pragma unroll
    for (int e = 0; e < Pairs::EACH; e++) {
        const Pairs pairs(block, n_rows, e);
        if (!pairs.there) continue;
        if (pairs.rotated) pairs.rotate(x[e][0], x[e][1], shared.turn[pairs.row]);
        const float scale = pairs.is_q() ? from.scale : 1;
        const u32 two = pack(x[e][0].x * scale, x[e][0].y * scale);
        const u32 others = pack(x[e][1].x * scale, x[e][1].y * scale);
        pairs.put(pairs.is_q()   ? shared.q[pairs.head]
                  : pairs.is_k() ? shared.new_k[pairs.row]
                                 : shared.v[0][pairs.row], two, others);
        if (pairs.is_q() || block.first > 0) continue;
        u8* slot = (pairs.is_k() ? cache_k : cache_v) +
                   (block.position + pairs.row) % n_slots * SLOT;
        pairs.put(reinterpret_cast<__half*>(slot) + blockIdx.x * DIM, two, others);
    }
}

template <class Put>
__device__ __forceinline__ void rope_attend(const New& from, const int* pos, const int* n_rows,
                                            u8* cache_k, u8* cache_v, float softcap, int window,
                                            int n_slots, Put put) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    pdl_launch_dependents();
    const int position = __ldcg(pos), n = __ldcg(n_rows);
    const Block block(&position, &n);
    if (block.n <= 0) return;
    const Groups groups(block.low(window), position, n_slots);
    const auto copy = [&](int round) {
        copy_values(shared.v[round % STAGES], cache_v, groups, round, n);
        commit_copies();
    };
    Keys keys;
    if (warp_index() >= Groups::NEW) keys.load(cache_k, groups, warp_index());
    for (int round = 0; round < STAGES; round++) copy(round);
    for (int i = threadIdx.x; i < n * ROTATED; i += THREADS)
        shared.turn[i / ROTATED][i % ROTATED] =
            turn_of(position + i / ROTATED, from.inv_freq[i % ROTATED], from.mscale);
    __syncthreads();
    bring(shared, block, from, n, cache_k, cache_v, n_slots);
    __syncthreads();

    Sums sums;
    if (warp_index() < Groups::NEW) keys.load_new(shared, warp_index());
    for (int round = 0; round * WARPS < groups.n; round++) {
        const int group = round * WARPS + warp_index();
        if (group < groups.n) {
            float s[2][4] = {};
            keys.score(shared, s);
            keys.load(cache_k, groups, group + WARPS);
            weigh(shared, s, block, groups, group, softcap, window);
        }
        wait_for_copies<STAGES - 1>();
        __syncthreads();
        sums.add(shared, shared.v[round % STAGES], min(WARPS, groups.n - round * WARPS));
        if ((round + 1) * WARPS < groups.n) __syncthreads();
        copy(round + STAGES);
    }
    sums.write(block, put);
}

#ifdef PANELS
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_few_panels(const float* q, const float* k, const float* v, const float* inv_freq,
                          const int* pos, const int* n_rows, u8* cache_k, u8* cache_v, __half* out,
                          float scale, float softcap, float mscale, int window, int n_slots) {
    rope_attend({q, k, v, inv_freq, scale, mscale}, pos, n_rows, cache_k, cache_v, softcap, window,
                n_slots, [&](size_t head, int d, float2 x) {
                    store_pair_in_panels(out, ROWS, head / N_HEAD, head % N_HEAD * DIM + d, x);
                });
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
rope_attention_few(const float* q, const float* k, const float* v, const float* inv_freq,
                   const int* pos, const int* n_rows, u8* cache_k, u8* cache_v, float* out,
                   float scale, float softcap, float mscale, int window, int n_slots) {
    rope_attend({q, k, v, inv_freq, scale, mscale}, pos, n_rows, cache_k, cache_v, softcap, window,
                n_slots, [&](size_t head, int d, float2 x) {
                    *reinterpret_cast<float2*>(out + head * DIM + d) = x;
                });
}
#endif
