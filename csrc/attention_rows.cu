// Attention of many query rows: a block has up to 64 rows of one head, a warp 16 of them, and the
// block walks over the cache in tiles that all its warps share (Dao, arXiv:2307.08691). Keys of the
// next tile and values of this one are copied into shared memory while products run.
//
// Queries and probabilities are halves. Running maxima are whole powers of two above the scores, so
// that how a probability is rounded does not depend on the tile it comes in.
#include "attention.cuh"

static_assert(kv::KV::PARTS == 1, "the cache must be F16");

constexpr int DIM = HEAD_DIM, GROUP = N_HEAD / N_HEAD_KV;
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int SHARES = DIM > 128 ? 2 : 1;  // warps with the same rows, each for a part of v
constexpr int BLOCK_ROWS = 16 * WARPS / SHARES, PART = DIM / SHARES;
constexpr int TILE = DIM > 128 ? 32 : 64;  // positions
constexpr int STRIDE = DIM + 8;            // halves: eight rows lie in different banks
constexpr int MIN_BLOCKS = DIM <= 64 ? 3 : 2;

using Tile = __half[TILE][STRIDE];

// Starts a copy of 16 bytes that another kernel wrote; zeros where there is nothing.
__device__ __forceinline__ void copy_if(bool there, void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
#else
    *static_cast<uint4*>(to) = load_if(there, from);
#endif
}

// Four 8 x 8 matrices of halves, transposed; lanes name rows as for load_matrices.
__device__ __forceinline__ void load_transposed(u32 (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row))
                 : "memory");
}

__device__ void copy_tile(Tile& to, const __half* head, const Ring& ring, int tile) {
#pragma unroll 4
    for (int i = threadIdx.x; i < TILE * DIM / 8; i += THREADS) {
        const int row = i / (DIM / 8), d = i % (DIM / 8) * 8;
        copy_if(ring.has(tile + row), &to[row][d],
                head + ring.slot_of(tile + row) * (N_HEAD_KV * DIM) + d);
    }
}

// A warp's 16 rows of a head. The lane has rows g and g + 8; `at` is the position of row g.
struct Rows {
    u32 q[DIM / 16][4];
    float m[2] = {NOTHING, NOTHING}, l[2] = {}, acc[PART / 8][4] = {};
    int at;

    // q: the head's numbers of row g; n_rows: true rows from there on.
    __device__ __forceinline__ void load(const float* from, int n_rows, float scale) {
#pragma unroll
        for (int i = 0; i < DIM / 4; i++) {
            const int row = i % 2 * 8, d = i / 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 4 * 2;
            float2 x = {0, 0};
            if (row < n_rows)
                x = *reinterpret_cast<const float2*>(from + row * (N_HEAD * DIM) + d);
            q[i / 4][i % 4] = pack(x.x * scale, x.y * scale);
        }
    }

    // s[n][2r + i]: row g + 8r, position 8n + 2t + i of the tile.
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

    // Scores become exponents of 2; those of positions that a row does not see become nothing.
    __device__ __forceinline__ void mask(float (&s)[TILE / 8][4], int tile, int window) const {
        const int first = at - threadIdx.x % 32 / 4, t = threadIdx.x % 4;  // of the warp's rows
        const bool all = tile + TILE <= first + 1 && (!window || tile > first + 15 - window);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            float& x = s[i / 4][i % 4];
            x *= LOG2_E;
            const int back = at + i % 4 / 2 * 8 - (tile + i / 4 * 8 + 2 * t + i % 2);
            if (!all && (back < 0 || (window && back >= window))) x = NOTHING;
        }
    }

    __device__ __forceinline__ void weigh(float (&s)[TILE / 8][4]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = NOTHING;
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) top = fmaxf(top, s[i / 2][2 * r + i % 2]);
            top = fmaxf(m[r], ceilf(row_max(top)));
            const float keep = power_of_2(m[r] - top);
            m[r] = top, l[r] *= keep;
#pragma unroll
            for (int i = 0; i < TILE / 4; i++) {
                float& x = s[i / 2][2 * r + i % 2];
                x = power_of_2(x - top);
                l[r] += x;
            }
#pragma unroll
            for (int j = 0; j < PART / 8; j++) acc[j][2 * r] *= keep, acc[j][2 * r + 1] *= keep;
        }
    }

    // Values from number `part` on.
    __device__ __forceinline__ void add(const float (&s)[TILE / 8][4], const Tile& v, int part) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < TILE / 8; n += 2) {
            const u32 p[4] = {pack(s[n][0], s[n][1]), pack(s[n][2], s[n][3]),
                              pack(s[n + 1][0], s[n + 1][1]), pack(s[n + 1][2], s[n + 1][3])};
#pragma unroll
            for (int d = 0; d < PART; d += 16) {
                u32 b[4];
                load_transposed(b, &v[8 * n + lane % 16][part + d + lane / 16 * 8]);
                multiply(acc[d / 8], p, b[0], b[1]);
                multiply(acc[d / 8 + 1], p, b[2], b[3]);
            }
        }
    }

    // out: the part's numbers of row g; n_rows: true rows from there on.
    __device__ __forceinline__ void write(float* out, int n_rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float scale = __fdividef(1, row_sum(l[r]));
            if (8 * r >= n_rows) continue;
#pragma unroll
            for (int j = 0; j < PART / 8; j++)
                *reinterpret_cast<float2*>(out + 8 * r * (N_HEAD * DIM) + 8 * j +
                                           threadIdx.x % 4 * 2) =
                    {acc[j][2 * r] * scale, acc[j][2 * r + 1] * scale};
        }
    }
};

// Blocks are (rows / BLOCK_ROWS, N_HEAD); the last rows, which see most, come first.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
attention_rows(const float* q, const __half* cache_k, const __half* cache_v, const int* pos,
               const int* n_rows, float* out, float scale, float softcap, int window,
               int n_slots) {
    __shared__ __align__(16) Tile k, v;
    pdl_launch_dependents();
    pdl_wait();
    const int first = (gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS;
    const int n = min(*n_rows - first, BLOCK_ROWS);
    if (n <= 0) return;
    const int low = window ? max(0, *pos + first + 1 - window) : 0, last = *pos + first + n - 1;
    const Ring ring(low, last + 1, n_slots);
    const __half* keys = cache_k + blockIdx.y / GROUP * DIM;
    const __half* values = cache_v + blockIdx.y / GROUP * DIM;
    int tile = low / TILE * TILE;
    copy_tile(k, keys, ring, tile);

    Rows rows;
    const int row = threadIdx.x / 32 / SHARES * 16 + threadIdx.x % 32 / 4;  // g
    const int part = threadIdx.x / 32 % SHARES * PART;
    const size_t offset = (static_cast<size_t>(first + row) * N_HEAD + blockIdx.y) * DIM;
    rows.at = *pos + first + row;
    rows.load(q + offset, n - row, scale);
    for (; tile <= last; tile += TILE) {
        float s[TILE / 8][4];
        wait_for_copies();
        __syncthreads();  // the keys are there, and the last values are used
        copy_tile(v, values, ring, tile);
        rows.score(k, s);
        wait_for_copies();
        __syncthreads();  // the values are there, and the keys are used
        if (tile + TILE <= last) copy_tile(k, keys, ring, tile + TILE);
        cap(s, softcap);
        rows.mask(s, tile, window);
        rows.weigh(s);
        rows.add(s, v, part);
    }
    rows.write(out + offset + part, n - row);
}
