// Attention of many query rows: a warp has 16 queries, and the block walks over the cache in tiles
// that all its warps share (Dao, arXiv:2307.08691). Keys of the next tile and values of this one
// are copied into shared memory while products run.
#include "attention_rows.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int SHARES = 16 * WARPS / QUERIES;  // warps with the same queries, each a part of v
constexpr int PART = DIM / SHARES;
constexpr int TILE = DIM > 128 ? 32 : 64;  // positions
constexpr int STRIDE = DIM + 8;            // halves: eight rows lie in different banks
constexpr int MIN_BLOCKS = DIM <= 64 ? 3 : 2;

using Tile = __half[TILE][STRIDE];

// Calls work(row, number) for each eight numbers of a tile that are the thread's.
template <class Work>
__device__ __forceinline__ void for_eights(Work work) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * DIM / 8; i += THREADS)
        work(i / (DIM / 8), i % (DIM / 8) * 8);
}

// Starts to bring in a tile of the block's KV head.
template <class Type>
__device__ void copy_tile(Tile& to, const u8* cache, const Ring& ring, int tile) {
    for_eights([&](int row, int d) {
        Type::copy(ring.has(tile + row), &to[row][d],
                   cache + ring.slot_of(tile + row) * Type::SLOT, blockIdx.x * DIM + d);
    });
}

// It has come, and is halves.
template <class Type>
__device__ void take_tile(Tile& tile) {
    wait_for_copies();
    if (Type::CONVERTS)
        for_eights([&](int row, int d) { Type::convert(&tile[row][d], blockIdx.x * DIM + d); });
    __syncthreads();
}

// A warp's queries. The lane has numbers of those at g and g + 8.
struct Attend {
    Softmax softmax;
    u32 q[DIM / 16][4];
    float acc[PART / 8][4] = {};

    // q: (rows, N_HEAD, DIM); row: the lane's first query of the block.
    __device__ __forceinline__ void load(const float* from, const Block& block, int row,
                                         float scale) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = row + 8 * r;
            softmax.last[r] = block.last(min(i, block.n - 1));
            const float* numbers = from + block.index(min(i, block.n - 1)) * DIM;
#pragma unroll
            for (int j = 0; j < DIM / 8; j++) {
                const float2 x = __ldcg(
                    reinterpret_cast<const float2*>(numbers + 8 * j + threadIdx.x % 4 * 2));
                q[j / 2][j % 2 * 2 + r] = pack(x.x * scale, x.y * scale);
            }
        }
    }

    // s[n][2r + i]: query g + 8r, position 8n + 2t + i of the tile.
    __device__ __forceinline__ void score(const Tile& k, float (&s)[TILE / 8][4]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
#pragma unroll
            for (int i = 0; i < 8; i++) s[n + i / 4][i % 4] = 0;
#pragma unroll
            for (int d = 0; d < DIM; d += 16) {
                u32 b[4];
                load_matrices(b, &k[8 * n + lane / 16 * 8 + lane % 8][d + lane / 8 % 2 * 8]);
                multiply(s[n], q[d / 16], b[0], b[1]);
                multiply(s[n + 1], q[d / 16], b[2], b[3]);
            }
        }
    }

    // Values from number `part` on.
    __device__ __forceinline__ void add(const float (&s)[TILE / 8][4], const Tile& v, int part) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
            u32 p[4];
            operand(p, s, n);
#pragma unroll
            for (int d = 0; d < PART; d += 16) {
                u32 b[4];
                load_transposed(b, &v[16 * n + lane % 16][part + d + lane / 16 * 8]);
                multiply(acc[d / 8], p, b[0], b[1]);
                multiply(acc[d / 8 + 1], p, b[2], b[3]);
            }
        }
    }
};

__device__ __forceinline__ void attend_rows(const float* q, const u8* cache_k,
                                            const u8* cache_v, const int* pos,
                                            const int* n_rows, float* out, float scale,
                                            float softcap, int window, int n_slots) {
    __shared__ __align__(16) Tile k, v;
    pdl_launch_dependents();
    pdl_wait();
    const Block block(pos, n_rows);
    int low, end;
    if (!find_range(block, n_rows, window, out, low, end)) return;
    const Ring ring(low, end, n_slots);
    int tile = low / TILE * TILE;
    copy_tile<kv::TYPE_K>(k, cache_k, ring, tile);

    Attend a;
    const int row = threadIdx.x / 32 / SHARES * 16 + threadIdx.x % 32 / 4;  // g
    const int part = threadIdx.x / 32 % SHARES * PART;
    a.load(q, block, row, scale);
    for (; tile < end; tile += TILE) {
        float s[TILE / 8][4], keep[2];
        take_tile<kv::TYPE_K>(k);  // the last values are used now
        copy_tile<kv::TYPE_V>(v, cache_v, ring, tile);
        a.score(k, s);
        take_tile<kv::TYPE_V>(v);  // the keys are used now
        if (tile + TILE < end) copy_tile<kv::TYPE_K>(k, cache_k, ring, tile + TILE);
        cap(s, softcap);
        a.softmax.mask(s, tile, window);
        a.softmax.weigh(s, keep);
        shrink(a.acc, keep);
        a.add(s, v, part);
    }
    write(a.softmax, a.acc, block, row, part, out);
}

#ifdef MAX_CHUNKS
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_rows_split(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
                     const int* n_rows, float* chunks, float scale, float softcap, int window,
                     int n_slots) {
    attend_rows(q, cache_k, cache_v, pos, n_rows, chunks, scale, softcap, window, n_slots);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_rows(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
               const int* n_rows, float* out, float scale, float softcap, int window,
               int n_slots) {
    attend_rows(q, cache_k, cache_v, pos, n_rows, out, scale, softcap, window, n_slots);
}
#endif
