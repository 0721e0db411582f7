// How a block attends with 16 queries of a KV head over a short cache of halves: warps make weights
// of 16 positions each, the first of them of new ones, which are in shared memory; then they
// add up the values of all positions, each some of their numbers. Knows no rotation.
#pragma once
#include "attention_rows.cuh"

static_assert(QUERIES == 16, "the rows of a product");
constexpr int WARPS = 8, THREADS = 32 * WARPS, STAGES = ROWS > 8 ? 1 : 2;
constexpr int TILE = 16 * WARPS;                       // positions of a round: 16 a warp
constexpr int STRIDE = DIM + 8;                        // eight rows lie in different banks
constexpr int SPANS = DIM / 32;                        // of a key: 8 for each lane of a quad
constexpr int PARTS = (DIM / 16 + WARPS - 1) / WARPS;  // 16 numbers of the values: of a warp
constexpr int ROTATED = N_ROT / 2;                     // pairs
constexpr int MIN_BLOCKS = DIM > 128 ? 1 : 2;          // room for a product's beside one
constexpr size_t SLOT = kv::F16::SLOT;

struct Shared {
    __half v[STAGES][TILE][STRIDE];
    __half q[QUERIES][STRIDE], new_k[ROWS][STRIDE];
    __half weight[QUERIES][TILE + 8];
    float2 turn[ROWS][ROTATED];  // cosines and sines of the new positions
    float m[WARPS][QUERIES], l[WARPS][QUERIES];
};

__device__ __forceinline__ int warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ int quad() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int in_quad() { return threadIdx.x % 4; }    // t

__device__ __forceinline__ uint4& eight(__half* p) { return *reinterpret_cast<uint4*>(p); }

// The positions that the block reads, in groups of 16: the new ones, then those in the cache.
struct Groups {
    static constexpr int NEW = (ROWS + 15) / 16;
    int position, first, n;  // the first new one, the first of the others, how many groups
    Ring ring;

    __device__ Groups(int low, int position, int n_slots)
        : position(position), first(low / 16 * 16), n(NEW + ceil_div(max(0, position - first), 16)),
          ring(low, position, n_slots) {}

    __device__ int start(int group) const {
        return group < NEW ? position + 16 * group : first + 16 * (group - NEW);
    }
    __device__ int stop(int group) const { return group < NEW ? start(group) + 16 : position; }
};

// A group's keys as the operands of products, which may sum in any order: of positions g and g + 8
// the numbers 32s + 8t .. 32s + 8t + 7.
struct Keys {
    uint4 of[2][SPANS] = {};

    __device__ __forceinline__ void load(const u8* cache_k, const Groups& groups, int group) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int position = groups.start(group) + 8 * n + quad();
            const u8* from = cache_k + groups.ring.slot_of(position) * SLOT +
                             (blockIdx.x * DIM + 8 * in_quad()) * 2;
#pragma unroll
            for (int s = 0; s < SPANS; s++)
                of[n][s] = load_if(groups.ring.has(position), from + 64 * s);
        }
    }
    __device__ __forceinline__ void load_new(Shared& shared, int group) {
#pragma unroll
        for (int n = 0; n < 2 && 8 * n < ROWS; n++)
#pragma unroll
            for (int s = 0; s < SPANS; s++)
                of[n][s] = eight(&shared.new_k[min(16 * group + 8 * n + quad(), ROWS - 1)]
                                              [32 * s + 8 * in_quad()]);
    }
    // s[n][2r + i]: query g + 8r, position 8n + 2t + i.
    __device__ __forceinline__ void score(Shared& shared, float (&s)[2][4]) const {
        float odd[2][4] = {};
#pragma unroll
        for (int d = 0; d < SPANS; d++) {
            const uint4 a = eight(&shared.q[quad()][32 * d + 8 * in_quad()]);
            const uint4 b = eight(&shared.q[quad() + 8][32 * d + 8 * in_quad()]);
            const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                multiply(s[n], low, of[n][d].x, of[n][d].y);
                multiply(odd[n], high, of[n][d].z, of[n][d].w);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) s[i / 4][i % 4] += odd[i / 4][i % 4];
    }
};

// Starts to bring in the values of a round's groups that are in the cache; where there are none
// become zeros.
__device__ __forceinline__ void copy_values(__half (*to)[STRIDE], const u8* cache_v,
                                            const Groups& groups, int round, int n_rows) {
    const int n = min(WARPS, groups.n - round * WARPS) * 16;
    for (int i = threadIdx.x; i < n * (DIM / 8); i += THREADS) {
        const int row = i / (DIM / 8), d = i % (DIM / 8) * 8;
        const int position = groups.start(round * WARPS + row / 16) + row % 16;
        const u8* from = cache_v + groups.ring.slot_of(position) * SLOT;
        if (round > 0 || row >= 16 * Groups::NEW)
            copy_if<16>(groups.ring.has(position), &to[row][d], from + (blockIdx.x * DIM + d) * 2);
        else if (row >= n_rows)
            eight(&to[row][d]) = {0, 0, 0, 0};
    }
}

// Scores of a warp's group become weights of the queries: with their maxima and sums, for all.
__device__ __forceinline__ void weigh(Shared& shared, float (&s)[2][4], const Block& block,
                                      const Groups& groups, int group, float softcap, int window) {
    const int start = groups.start(group), warp = warp_index();
    const int stop = groups.stop(group);
    Softmax softmax;
    float keep[2];
    cap(s, softcap);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int position = start + i / 4 * 8 + 2 * in_quad() + i % 2;
        const int back = block.last(quad() + i % 4 / 2 * 8) - position;
        if (back < 0 || (window && back >= window) || position >= stop) s[i / 4][i % 4] = NOTHING;
    }
    softmax.weigh(s, keep);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = quad() + 8 * r;
        const float l = row_sum(softmax.l[r]);
        if (in_quad() == 0) shared.m[warp][query] = softmax.m[r], shared.l[warp][query] = l;
#pragma unroll
        for (int n = 0; n < 2; n++)
            *reinterpret_cast<u32*>(&shared.weight[query][16 * warp + 8 * n + 2 * in_quad()]) =
                pack(s[n][2 * r], s[n][2 * r + 1]);
    }
}

// The weighted values of queries g and g + 8, for the warp's numbers; their maxima, and the sums
// of their weights.
struct Sums {
    float m[2] = {NOTHING, NOTHING}, l[2] = {}, acc[PARTS][2][4] = {};

    // Adds n groups.
    __device__ __forceinline__ void add(Shared& shared, const __half (*v)[STRIDE], int n) {
        const int lane = threadIdx.x % 32;
        float factor[WARPS][2], keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = quad() + 8 * r;
            float top = m[r];
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                top = fmaxf(top, factor[w][r] = w < n ? shared.m[w][query] : NOTHING);
            keep[r] = power_of_2(m[r] - top), l[r] *= keep[r], m[r] = top;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factor[w][r] = power_of_2(factor[w][r] - top);
                if (w < n) l[r] += factor[w][r] * shared.l[w][query];
            }
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) shrink(acc[part], keep);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w >= n) break;
            u32 p[4];
            load_matrices(p, &shared.weight[lane % 16][16 * w + lane / 16 * 8]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                p[i] = half2_of(__hmul2(as_half2(p[i]), __float2half2_rn(factor[w][i % 2])));
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const int d = 16 * (part * WARPS + warp_index());
                if (DIM % (16 * WARPS) && d >= DIM) continue;
                u32 b[4];
                load_transposed(b, &v[16 * w + lane % 16][d + lane / 16 * 8]);
                multiply(acc[part][0], p, b[0], b[1]);
                multiply(acc[part][1], p, b[2], b[3]);
            }
        }
    }
    // put(row and head, number, pair) gets the answers.
    template <class Put>
    __device__ __forceinline__ void write(const Block& block, Put put) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float factor = __fdividef(1, l[r]);
            const int query = quad() + 8 * r;
#pragma unroll
            for (int j = 0; j < 2 * PARTS; j++) {
                const int d = 16 * (j / 2 * WARPS + warp_index()) + j % 2 * 8 + 2 * in_quad();
                const float* x = &acc[j / 2][j % 2][2 * r];
                if (query < block.n && d < DIM)
                    put(block.index(query), d, make_float2(x[0] * factor, x[1] * factor));
            }
        }
    }
};
