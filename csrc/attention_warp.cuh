// What one warp does with a tile of 16 positions, for up to 8 query heads of a KV head: lanes load
// keys and values straight from memory as the operands of products. The order in which a product
// sums is free, so a lane's share can be 16 bytes in a row. Queries and probabilities go as two
// halves each, in rows g and g + 8 of one product: the result has their 22 bits. Knows no chunk and
// no other warp.
#pragma once
#include "attention.cuh"

using TypeK = kv::TYPE_K;
using TypeV = kv::TYPE_V;

constexpr int DIM = HEAD_DIM, GROUP = N_HEAD / N_HEAD_KV;
constexpr int HEADS = GROUP < 8 ? GROUP : 8;  // of a block: a larger group has several blocks
constexpr int SHARES = (GROUP + 7) / 8;       // of a group
constexpr int THREADS = 32 * WARPS;
constexpr int TILE = 16, STEP = TILE * WARPS;  // positions of a warp, of a block
constexpr int K_SPANS = (DIM + 31) / 32;       // 32 numbers of a key: 8 for each lane of a quad
constexpr int V_SPANS = (DIM + 63) / 64;       // 64 numbers of a value: 8 for each quad
constexpr int Q_STRIDE = 8 * K_SPANS + 1;      // odd: eight lanes' loads are in different banks
constexpr int PARTIAL = MAX_CHUNKS * (DIM + 2);  // numbers of a head's partial results

// Spans of a tile that are loaded at a time: as many as there is room for in registers.
constexpr int K_AT_ONCE = (DIM > 128 ? 2 : 4) / TypeK::PARTS;
constexpr int V_AT_ONCE = (DIM > 128 ? 1 : 2 / TypeV::PARTS);
constexpr int K_PAIRS = ((K_AT_ONCE < K_SPANS ? K_AT_ONCE : K_SPANS) + 1) / 2;  // of scales: one
constexpr int V_PAIRS = V_AT_ONCE < V_SPANS ? V_AT_ONCE : V_SPANS;              // for 64 numbers
constexpr int MIN_BLOCKS = (DIM <= 64 && TypeK::PARTS * TypeV::PARTS == 1 ? 16 : 8) / WARPS;

// Slots for the sums of a block's warps: one for each, where there is room for so many.
constexpr int SLOTS = WARPS * HEADS * (DIM + 4) <= 9216 ? WARPS : WARPS / 2;

struct Shared {
    uint4 q[8][Q_STRIDE];             // scaled queries by fours: two, what they lost, two more, ..
    alignas(16) u8 k[TypeK::HEAD];    // of the new position
    alignas(16) u8 v[TypeV::HEAD];
    union {
        alignas(16) float heads[HEADS + 2][DIM];  // q, k and v of the new position
        alignas(16) float sums[SLOTS][HEADS][DIM + 4];
        float weight[WARPS][MAX_CHUNKS];  // of the chunks, once all have been added up
    };
    float m[WARPS][8], l[WARPS][8];
    float2 turn[DIM / 2];  // cosines and sines of the new position
    float norm[2][DIM];
    int n_chunks;
    bool last;
};

__device__ inline int warp_index() { return threadIdx.x / 32; }
__device__ inline int quad() { return threadIdx.x % 32 / 4; }  // g
__device__ inline int in_quad() { return threadIdx.x % 4; }    // t

// The block's KV head, its first query head, and how many it has.
__device__ inline int kv_head() { return blockIdx.y / SHARES; }
__device__ inline int first_head() { return kv_head() * GROUP + blockIdx.y % SHARES * 8; }
__device__ inline int n_heads() {
    return GROUP % 8 == 0 ? 8 : min(8, GROUP - static_cast<int>(blockIdx.y) % SHARES * 8);
}

// One head of the cache.
struct Head {
    const u8 *k, *v;
    Ring ring;

    __device__ const u8* keys_at(int position) const {
        return k + ring.slot_of(position) * TypeK::SLOT;
    }
    __device__ const u8* values_at(int position) const {
        return v + ring.slot_of(position) * TypeV::SLOT;
    }
};

// Are there numbers for lane `mine` of every `of` in a span? Known when compiling for whole spans.
__device__ inline bool exists(int span, int mine, int of) {
    return span * of + of <= DIM / 8 || span * of + mine < DIM / 8;
}

struct Keys {
    TypeK::Scales<K_PAIRS> scales[2];
    TypeK::Eight of[2][K_AT_ONCE];  // positions g and g + 8 of a tile, from a first span on

    __device__ __forceinline__ void load(const Head& head, int tile, int first) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int position = tile + 8 * n + quad();
            const bool there = head.ring.has(position);
            const u8* slot = head.keys_at(position);
            const int at = kv_head() * DIM + 32 * first + 8 * in_quad();
            scales[n].load_if(there, slot, kv_head() * DIM + 32 * first);
#pragma unroll
            for (int s = 0; s < K_AT_ONCE && first + s < K_SPANS; s++)
                of[n][s] = TypeK::load_if(there && exists(first + s, in_quad(), 4), slot,
                                          at + 32 * s);
        }
    }
    // The key of a position that the cache does not have yet.
    __device__ __forceinline__ void replace(int tile, int position, const u8* k, int first) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (tile + 8 * n + quad() != position) continue;
            scales[n].fetch(k, 32 * first);
#pragma unroll
            for (int s = 0; s < K_AT_ONCE && first + s < K_SPANS; s++)
                if (exists(first + s, in_quad(), 4))
                    of[n][s] = TypeK::fetch(k, 32 * (first + s) + 8 * in_quad());
        }
    }
};

struct Values {
    TypeV::Scales<V_PAIRS> scales[4];
    TypeV::Eight of[4][V_AT_ONCE];  // positions 2t, 2t + 1, 2t + 8 and 2t + 9, from a first span on

    static __device__ int offset(int i) { return 2 * in_quad() + i % 2 + i / 2 * 8; }

    __device__ __forceinline__ void load(const Head& head, int tile, int first) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int position = tile + offset(i);
            const bool there = head.ring.has(position);
            const u8* slot = head.values_at(position);
            const int at = kv_head() * DIM + 64 * first + 8 * quad();
            scales[i].load_if(there, slot, kv_head() * DIM + 64 * first);
#pragma unroll
            for (int s = 0; s < V_AT_ONCE && first + s < V_SPANS; s++)
                of[i][s] = TypeV::load_if(there && exists(first + s, quad(), 8), slot,
                                          at + 64 * s);
        }
    }
    __device__ __forceinline__ void replace(int tile, int position, const u8* v, int first) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (tile + offset(i) != position) continue;
            scales[i].fetch(v, 64 * first);
#pragma unroll
            for (int s = 0; s < V_AT_ONCE && first + s < V_SPANS; s++)
                if (exists(first + s, quad(), 8))
                    of[i][s] = TypeV::fetch(v, 64 * (first + s) + 8 * quad());
        }
    }
};

// Adds what spans bring to c[n]: head g, positions 8n + 2t and 8n + 2t + 1 of the tile, once with
// the queries and once with what they lost.
__device__ __forceinline__ void score(const Shared& shared, const Keys& keys, int first,
                                      float (&c)[2][4]) {
#pragma unroll
    for (int s = 0; s < K_AT_ONCE && first + s < K_SPANS; s++) {
        const uint4* q = &shared.q[quad()][(first + s) * 8 + in_quad() * 2];
        const u32 a[4] = {q[0].x, q[0].y, q[0].z, q[0].w};
        const u32 b[4] = {q[1].x, q[1].y, q[1].z, q[1].w};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int part = 0; part < TypeK::PARTS; part++) {
                const uint4 k = TypeK::part(keys.of[n][s], part, keys.scales[n].of(32 * s));
                multiply(c[n], a, k.x, k.y);
                multiply(c[n], b, k.z, k.w);
            }
    }
}

// The scores of products of a tile: of positions 2t, 2t + 1, 2t + 8 and 2t + 9 for head g. Below
// `low` and from `stop` on they count nothing.
__device__ __forceinline__ float4 scores(const float (&c)[2][4], int tile, int low, int stop,
                                         float softcap) {
    float s[1][4];
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] = c[i / 2][i % 2] + c[i / 2][i % 2 + 2];
    cap(s, softcap);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int position = tile + 2 * in_quad() + i % 2 + i / 2 * 8;
        if (position < low || position >= stop) s[0][i] = NOTHING;
    }
    return {s[0][0], s[0][1], s[0][2], s[0][3]};
}

__device__ inline u32 word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// What a warp has of a chunk for head g: maximum, sum of the lane's weights, weighted values.
// acc[s][j][i] is number 64s + 16t + 8i + j.
struct Sums {
    float m = NOTHING, l = 0, acc[V_SPANS][8][2] = {};

    // Scores become probabilities, with what they lose as halves in rows g + 8; earlier sums are to
    // shrink by the factor that is returned.
    __device__ __forceinline__ float weigh(const float4& s, u32 (&a)[4]) {
        const float top = fmaxf(m, row_max(fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w))));
        const float keep = weight_of(m - top);
        const float4 p = {weight_of(s.x - top), weight_of(s.y - top), weight_of(s.z - top),
                          weight_of(s.w - top)};
        a[0] = pack(p.x, p.y), a[1] = pack(lost(p.x), lost(p.y));
        a[2] = pack(p.z, p.w), a[3] = pack(lost(p.z), lost(p.w));
        m = top;
        l = l * keep + ((p.x + p.y) + (p.z + p.w));
        return keep;
    }

    // Adds the values of spans, weighted.
    __device__ __forceinline__ void add(const u32 (&p)[4], float keep, const Values& values,
                                        int first) {
#pragma unroll
        for (int s = 0; s < V_AT_ONCE && first + s < V_SPANS; s++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const u32 halves = j % 2 ? 0x7632 : 0x5410;
                float c[4] = {};
#pragma unroll
                for (int part = 0; part < TypeV::PARTS; part++) {
                    u32 v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        v[i] = word(TypeV::part(values.of[i][s], part,
                                                values.scales[i].of(64 * s + 8 * quad())),
                                    j / 2);
                    multiply(c, p, __byte_perm(v[0], v[1], halves),
                             __byte_perm(v[2], v[3], halves));
                }
                float (&sum)[2] = acc[first + s][j];
                sum[0] = sum[0] * keep + (c[0] + c[2]);
                sum[1] = sum[1] * keep + (c[1] + c[3]);
            }
    }

    // Writes the weighted values of the head, fours in such an order that eight lanes write to
    // different banks.
    __device__ __forceinline__ void put(float* to) const {
        const int swap = in_quad() / 2;
#pragma unroll
        for (int s = 0; s < V_SPANS; s++) {
            const int d = 64 * s + 16 * in_quad();
            if (d >= DIM) continue;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int i = n / 2, j = n % 2 * 4;
                float x[4];
#pragma unroll
                for (int e = 0; e < 4; e++) x[e] = swap ? acc[s][j + e][1 - i] : acc[s][j + e][i];
                *reinterpret_cast<float4*>(to + d + 4 * (n ^ 2 * swap)) = {x[0], x[1], x[2], x[3]};
            }
        }
    }
};
