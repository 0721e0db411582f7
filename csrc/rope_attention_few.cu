// Attention of up to 8 query rows over a short cache of halves, with all that their positions need
// first: the rotation of q and k, and the write of k and v. A block has 16 queries of one KV head
// and uses the new keys and values from shared memory, so that no load waits for the write. Its
// warps make weights of 16 positions each, and then add up the values of all positions, each some
// of their numbers.
//
// Only q, k and v come from this step: where its rows are and what the cache has of earlier
// positions is known before it begins, and a step's first kernel lets nothing start before the last
// step has ended (embed.cu). So the first keys and values are on their way before this one waits.
#include "attention_rows.cuh"
#include "panels.cuh"
#include "rope.cuh"

static_assert(QUERIES == 16, "the rows of a product");
constexpr int WARPS = 8, THREADS = 32 * WARPS, STAGES = 2;
constexpr int TILE = 16 * WARPS;                       // positions
constexpr int STRIDE = DIM + 8;                        // eight rows lie in different banks
constexpr int SPANS = DIM / 32;                        // of a key: 8 for each lane of a quad
constexpr int PARTS = (DIM / 16 + WARPS - 1) / WARPS;  // 16 numbers of the values: of a warp
constexpr int ROTATED = N_ROT / 2;                     // pairs
constexpr int MIN_BLOCKS = DIM > 128 ? 1 : 2;          // room for a product's beside one
constexpr size_t SLOT = kv::F16::SLOT;

struct Shared {
    __half v[STAGES][TILE][STRIDE];
    __half q[QUERIES][STRIDE], new_k[ROWS][STRIDE], new_v[ROWS][STRIDE];
    __half weight[QUERIES][TILE + 8];
    float2 turn[ROWS][ROTATED];  // cosines and sines of the new positions
    float m[WARPS][QUERIES], l[WARPS][QUERIES];
};

__device__ __forceinline__ int quad() { return threadIdx.x % 32 / 4; }  // g
__device__ __forceinline__ int in_quad() { return threadIdx.x % 4; }    // t

__device__ __forceinline__ uint4& eight(__half* p) { return *reinterpret_cast<uint4*>(p); }

// The positions that the block reads, and those of them that are new.
struct Range {
    int low, position, end;
    Ring ring;  // of those in the cache

    __device__ Range(int low, int position, int end, int n_slots)
        : low(low), position(position), end(end), ring(low, position, n_slots) {}
};

// ---- The new positions --------------------------------------------------------------------------

// What they bring. inv_freq is (N_ROT / 2,).
struct New {
    const float *q, *k, *v, *inv_freq;
    float scale, mscale;
};

// Two pairs of a head, which are neighbours, or with NEOX in the halves of the rotated part: where
// they are, two numbers each.
struct Pairs {
    bool rotated;
    int a, b;

    __device__ __forceinline__ explicit Pairs(int i)
        : rotated(2 * i < ROTATED), a(NEOX && rotated ? 2 * i : 4 * i),
          b(a + (NEOX && rotated ? ROTATED : 2)) {}
};

__device__ __forceinline__ void rotate(float2& a, float2& b, const float2* turn) {
    const float4 two = *reinterpret_cast<const float4*>(turn);
    const float2 first = {two.x, two.y}, second = {two.z, two.w};
    if (NEOX) {
        const float2 s = rotate_pair(a.x, b.x, first), t = rotate_pair(a.y, b.y, second);
        a = {s.x, t.x}, b = {s.y, t.y};
    } else {
        a = rotate_pair(a.x, a.y, first), b = rotate_pair(b.x, b.y, second);
    }
}

// The block's queries times scale, and the new keys and values, into shared memory; one block of a
// KV head writes the latter into the cache. All loads are on their way before the first is used.
__device__ __forceinline__ void bring(Shared& shared, const Block& block, const New& from,
                                      int n_rows, u8* cache_k, u8* cache_v, int n_slots) {
    constexpr int FOURS = DIM / 4, HEADS = QUERIES + 2 * ROWS;
    constexpr int EACH = (HEADS * FOURS + THREADS - 1) / THREADS;
    float2 x[EACH][2];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = e * THREADS + threadIdx.x, head = i / FOURS, other = head - QUERIES;
        const Pairs at(i % FOURS);
        const float* p = from.q + block.index(head) * DIM;
        if (other >= 0)
            p = (other < ROWS ? from.k : from.v) + (other % ROWS * N_HEAD_KV + blockIdx.x) * DIM;
        if (other < 0 ? head >= block.n : other % ROWS >= n_rows || other >= 2 * ROWS) continue;
        x[e][0] = __ldcg(reinterpret_cast<const float2*>(p + at.a));
        x[e][1] = __ldcg(reinterpret_cast<const float2*>(p + at.b));
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const int i = e * THREADS + threadIdx.x, head = i / FOURS, other = head - QUERIES;
        const Pairs at(i % FOURS);
        if (other < 0 ? head >= block.n : other % ROWS >= n_rows || other >= 2 * ROWS) continue;
        const int row = other < 0 ? (block.first + head) / GROUP : other % ROWS;
        if (other < ROWS && at.rotated) rotate(x[e][0], x[e][1], &shared.turn[row][i % FOURS * 2]);
        const float scale = other < 0 ? from.scale : 1;
        const u32 a = pack(x[e][0].x * scale, x[e][0].y * scale);
        const u32 b = pack(x[e][1].x * scale, x[e][1].y * scale);
        __half* to = other < 0 ? shared.q[head] : (other < ROWS ? shared.new_k : shared.new_v)[row];
        *reinterpret_cast<u32*>(to + at.a) = a, *reinterpret_cast<u32*>(to + at.b) = b;
        if (other < 0 || block.first > 0) continue;
        u8* slot = (other < ROWS ? cache_k : cache_v) + (block.position + row) % n_slots * SLOT;
        __half* kept = reinterpret_cast<__half*>(slot) + blockIdx.x * DIM;
        *reinterpret_cast<u32*>(kept + at.a) = a, *reinterpret_cast<u32*>(kept + at.b) = b;
    }
}

// ---- Keys and values ----------------------------------------------------------------------------

// 16 positions' keys as the operands of products, which may sum in any order: of positions g and
// g + 8 the numbers 32s + 8t .. 32s + 8t + 7.
struct Keys {
    uint4 of[2][SPANS];

    __device__ __forceinline__ void load(const u8* cache_k, const Range& range, int tile) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int position = tile + 8 * n + quad();
            const u8* from = cache_k + range.ring.slot_of(position) * SLOT +
                             (blockIdx.x * DIM + 8 * in_quad()) * 2;
#pragma unroll
            for (int s = 0; s < SPANS; s++)
                of[n][s] = load_if(range.ring.has(position), from + 64 * s);
        }
    }
    __device__ __forceinline__ void replace(Shared& shared, const Range& range, int tile) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int position = tile + 8 * n + quad();
            if (position < range.position || position >= range.end) continue;
#pragma unroll
            for (int s = 0; s < SPANS; s++)
                of[n][s] = eight(&shared.new_k[position - range.position][32 * s + 8 * in_quad()]);
        }
    }
    // s[n][2r + i]: query g + 8r, position 8n + 2t + i.
    __device__ __forceinline__ void score(Shared& shared, float (&s)[2][4]) const {
#pragma unroll
        for (int d = 0; d < SPANS; d++) {
            const uint4 a = eight(&shared.q[quad()][32 * d + 8 * in_quad()]);
            const uint4 b = eight(&shared.q[quad() + 8][32 * d + 8 * in_quad()]);
            const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                multiply(s[n], low, of[n][d].x, of[n][d].y);
                multiply(s[n], high, of[n][d].z, of[n][d].w);
            }
        }
    }
};

// Starts to bring in a tile's values: whole sixteens of positions, those not read as zeros.
__device__ __forceinline__ void copy_values(__half (*to)[STRIDE], const u8* cache_v,
                                            const Range& range, int tile) {
    const int n = min(TILE, (range.end - tile + 15) / 16 * 16);
    for (int i = threadIdx.x; i < n * (DIM / 8); i += THREADS) {
        const int row = i / (DIM / 8), d = i % (DIM / 8) * 8, position = tile + row;
        if (range.ring.has(position))
            copy_if<16>(true, &to[row][d], cache_v + range.ring.slot_of(position) * SLOT +
                                               (blockIdx.x * DIM + d) * 2);
        else if (position < range.low || position >= range.end)
            eight(&to[row][d]) = {0, 0, 0, 0};
    }
}

__device__ __forceinline__ void put_new_values(__half (*to)[STRIDE], Shared& shared,
                                               const Range& range, int tile) {
    for (int i = threadIdx.x; i < ROWS * (DIM / 8); i += THREADS) {
        const int row = i / (DIM / 8), d = i % (DIM / 8) * 8, at = range.position + row - tile;
        if (at >= 0 && at < TILE && at + tile < range.end)
            eight(&to[at][d]) = eight(&shared.new_v[row][d]);
    }
}

// The weighted values of queries g and g + 8, for the warp's numbers; their maxima, and the sums
// of their weights.
struct Sums {
    float m[2] = {NOTHING, NOTHING}, l[2], acc[PARTS][2][4] = {};

    // Adds a tile of which 16 * n positions are read.
    __device__ __forceinline__ void add(Shared& shared, const __half (*v)[STRIDE], int n) {
        const int lane = threadIdx.x % 32;
        float factor[WARPS][2], keep[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = NOTHING;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                top = fmaxf(top, factor[w][r] = shared.m[w][quad() + 8 * r]);
            keep[r] = power_of_2(m[r] - top), m[r] = top, l[r] = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factor[w][r] = power_of_2(factor[w][r] - top);
                l[r] += factor[w][r] * shared.l[w][quad() + 8 * r];
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
                const int d = 16 * (part * WARPS + threadIdx.x / 32);
                if (DIM % (16 * WARPS) && d >= DIM) continue;
                u32 b[4];
                load_transposed(b, &v[16 * w + lane % 16][d + lane / 16 * 8]);
                multiply(acc[part][0], p, b[0], b[1]);
                multiply(acc[part][1], p, b[2], b[3]);
            }
        }
    }
};

// ---- The block ----------------------------------------------------------------------------------

// put(row and head, number, pair) gets the answers.
template <class Put>
__device__ __forceinline__ void rope_attend(const New& fresh, const int* pos, const int* n_rows,
                                            u8* cache_k, u8* cache_v, float softcap, int window,
                                            int n_slots, Put put) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    pdl_launch_dependents();
    const int position = __ldcg(pos), n = __ldcg(n_rows), warp = threadIdx.x / 32;
    const Block block(&position, &n);
    if (block.n <= 0) return;
    const Range range(block.low(window), position, position + n, n_slots);
    const int first = range.low / TILE * TILE, n_tiles = ceil_div(range.end - first, TILE);
    const auto copy = [&](int i) {
        if (i < n_tiles) copy_values(shared.v[i % STAGES], cache_v, range, first + i * TILE);
        commit_copies();
    };
    Keys keys;
    keys.load(cache_k, range, first + 16 * warp);
    copy(0), copy(1);
    for (int i = threadIdx.x; i < n * ROTATED; i += THREADS)
        shared.turn[i / ROTATED][i % ROTATED] =
            turn_of(position + i / ROTATED, fresh.inv_freq[i % ROTATED], fresh.mscale);
    __syncthreads();
    pdl_wait();
    bring(shared, block, fresh, n, cache_k, cache_v, n_slots);
    __syncthreads();

    Softmax softmax;
    Sums sums;
    for (int r = 0; r < 2; r++)
        softmax.last[r] = block.last(min(quad() + 8 * r, block.n - 1));
    for (int i = 0; i < n_tiles; i++) {
        const int tile = first + i * TILE, mine = tile + 16 * warp;
        __half (*v)[STRIDE] = shared.v[i % STAGES];
        wait_for_copies<STAGES - 1>();
        put_new_values(v, shared, range, tile);
        if (mine < range.end) {
            float s[2][4] = {}, keep[2];
            keys.replace(shared, range, mine);
            keys.score(shared, s);
            if (i + 1 < n_tiles) keys.load(cache_k, range, mine + TILE);
            cap(s, softcap);
            softmax.mask(s, mine, window);
            softmax.weigh(s, keep);
#pragma unroll
            for (int j = 0; j < 4; j++)  // j / 2: positions from 8 on; j % 2: queries
                *reinterpret_cast<u32*>(
                    &shared.weight[quad() + j % 2 * 8][16 * warp + j / 2 * 8 + 2 * in_quad()]) =
                    pack(s[j / 2][j % 2 * 2], s[j / 2][j % 2 * 2 + 1]);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float l = row_sum(softmax.l[r]);
            if (in_quad() > 0) continue;
            shared.m[warp][quad() + 8 * r] = softmax.m[r];
            shared.l[warp][quad() + 8 * r] = l;
        }
        __syncthreads();
        sums.add(shared, v, ceil_div(range.end - tile, 16));
        if (i + 1 < n_tiles) __syncthreads();
        copy(i + STAGES);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float factor = __fdividef(1, sums.l[r]);
        const int query = quad() + 8 * r;
#pragma unroll
        for (int j = 0; j < 2 * PARTS; j++) {
            const int d = 16 * (j / 2 * WARPS + warp) + j % 2 * 8 + 2 * in_quad();
            const float* x = &sums.acc[j / 2][j % 2][2 * r];
            if (query < block.n && d < DIM)
                put(block.index(query), d, make_float2(x[0] * factor, x[1] * factor));
        }
    }
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
