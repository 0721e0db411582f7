// What the kernels for many query rows share: which queries and positions a block has, the softmax
// of a warp's 16 queries, and where the answers go. A query is a row and one head of the KV head's
// group: row after row, the heads of the group side by side, so that a block reads the cache once
// for all of them. Knows no product and no copy.
//
// Queries and weights are halves. Running maxima are whole powers of two above the scores, so that
// how a weight is rounded does not depend on the tile it comes in.
#pragma once
#include "attention.cuh"

constexpr int DIM = HEAD_DIM, GROUP = N_HEAD / N_HEAD_KV;

// The block's queries. Grids are (N_HEAD_KV, blocks, chunks); the last queries, which see most,
// come first.
struct Block {
    int first, n;  // n: true ones, none or less past the last row
    int position;  // of row 0

    __device__ Block(const int* pos, const int* n_rows)
        : first((gridDim.y - 1 - blockIdx.y) * QUERIES), n(min(*n_rows * GROUP - first, QUERIES)),
          position(*pos) {}

    // The last position that query i sees.
    __device__ int last(int i) const { return position + (first + i) / GROUP; }
    // The first that any of them sees.
    __device__ int low(int window) const { return window ? max(0, last(0) + 1 - window) : 0; }
    // Row and head of query i: q and out are (rows, N_HEAD, DIM).
    __device__ size_t index(int i) const {
        const int j = first + i;
        return static_cast<size_t>(j / GROUP) * N_HEAD + blockIdx.x * GROUP + j % GROUP;
    }
};

#ifdef MAX_CHUNKS
// The positions of the block's chunk: all that the step's rows see is cut by its length alone.
struct Chunk {
    int start, stop;

    __device__ Chunk(int pos, int n_rows, int window) {
        constexpr int WHOLE = 128;  // positions: tiles of any kernel
        const int low = (window ? max(0, pos + 1 - window) : 0) / WHOLE * WHOLE;
        const int share = ceil_div(pos + n_rows - low, MAX_CHUNKS * WHOLE) * WHOLE;
        const int chunk = max(CHUNK, share);
        start = low + blockIdx.z * chunk, stop = start + chunk;
    }
};
#endif

// The softmax of the lane's queries g and g + 8 of a warp.
struct Softmax {
    float m[2] = {NOTHING, NOTHING}, l[2] = {};
    int last[2];  // positions that they see

    // s[n][2r + i]: query g + 8r, position 8n + 2t + i of the tile. What a query does not see
    // becomes nothing.
    template <int N>
    __device__ __forceinline__ void mask(float (&s)[N][4], int tile, int window) const {
        const int highest = max(last[0], last[1]), lowest = min(last[0], last[1]);
        const bool all = tile + 8 * N <= lowest + 1 && (!window || tile > highest - window);
        if (__all_sync(~0u, all)) return;
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int position = tile + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const int back = last[i % 4 / 2] - position;
            if (back < 0 || (window && back >= window)) s[i / 4][i % 4] = NOTHING;
        }
    }

    // Scores become weights; earlier sums are to shrink by the factors `keep`.
    template <int N>
    __device__ __forceinline__ void weigh(float (&s)[N][4], float (&keep)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = NOTHING;
#pragma unroll
            for (int i = 0; i < 2 * N; i++) top = fmaxf(top, s[i / 2][2 * r + i % 2]);
            top = fmaxf(m[r], ceilf(row_max(top) * LOG2_E));
            keep[r] = power_of_2(m[r] - top);
            m[r] = top, l[r] *= keep[r];
#pragma unroll
            for (int i = 0; i < 2 * N; i++) {
                float& x = s[i / 2][2 * r + i % 2];
                x = power_of_2(fmaf(x, LOG2_E, -top));
                l[r] += x;
            }
        }
    }
};

template <int N>
__device__ __forceinline__ void shrink(float (&acc)[N][4], const float (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) acc[i / 4][i % 4] *= keep[i % 4 / 2];
}

// Four 8 x 8 matrices of halves, transposed; lanes name rows as for load_matrices.
__device__ __forceinline__ void load_transposed(u32 (&m)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row))
                 : "memory");
}

// Weights of positions 16n .. 16n + 15 as the operand of a product.
template <int N>
__device__ __forceinline__ void operand(u32 (&p)[4], const float (&s)[N][4], int n) {
    p[0] = pack(s[2 * n][0], s[2 * n][1]), p[1] = pack(s[2 * n][2], s[2 * n][3]);
    p[2] = pack(s[2 * n + 1][0], s[2 * n + 1][1]), p[3] = pack(s[2 * n + 1][2], s[2 * n + 1][3]);
}

// The answer of a row and head, from number `part` on: N eights of the lane's query 8r + g.
template <int N>
__device__ __forceinline__ void write_numbers(float* to, const float (&acc)[N][4], int r,
                                              float scale) {
#pragma unroll
    for (int j = 0; j < N; j++)
        *reinterpret_cast<float2*>(to + 8 * j + threadIdx.x % 4 * 2) =
            {acc[j][2 * r] * scale, acc[j][2 * r + 1] * scale};
}

#ifdef MAX_CHUNKS
// Of a row and head: the weighted values of all chunks (MAX_CHUNKS, DIM), their maxima, in powers
// of two, and the sums of their weights.
__device__ __forceinline__ float* partial(float* chunks, size_t index) {
    return chunks + index * (MAX_CHUNKS * (DIM + 2));
}
#endif

// Writes what the warp's queries have: `row` is the lane's first, of the block. `part` is where the
// numbers begin within a head.
template <int N>
__device__ __forceinline__ void write(const Softmax& softmax, const float (&acc)[N][4],
                                      const Block& block, int row, int part, float* out) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float l = row_sum(softmax.l[r]);
        if (row + 8 * r >= block.n) continue;
        const size_t index = block.index(row + 8 * r);
#ifdef MAX_CHUNKS
        float* to = partial(out, index);
        write_numbers(to + blockIdx.z * DIM + part, acc, r, 1);
        float* stats = to + MAX_CHUNKS * DIM + blockIdx.z;
        if (threadIdx.x % 4 == 0 && part == 0) stats[0] = softmax.m[r], stats[MAX_CHUNKS] = l;
#else
        write_numbers(out + index * DIM + part, acc, r, __fdividef(1, l));
#endif
    }
}

#ifdef MAX_CHUNKS
// A chunk of which the block's queries see nothing.
__device__ void write_nothing(const Block& block, float* out) {
    for (int i = threadIdx.x; i < block.n * (DIM / 4); i += blockDim.x) {
        float* to = partial(out, block.index(i / (DIM / 4)));
        *reinterpret_cast<float4*>(to + blockIdx.z * DIM + i % (DIM / 4) * 4) = {0, 0, 0, 0};
        float* stats = to + MAX_CHUNKS * DIM + blockIdx.z;
        if (i % (DIM / 4) == 0) stats[0] = NOTHING, stats[MAX_CHUNKS] = 0;
    }
}
#endif

// The positions from `low` to before `end` that the block reads: what its queries see, of its chunk
// where there are several. False where it reads nothing, which is then written.
__device__ __forceinline__ bool find_range(const Block& block, const int* n_rows, int window,
                                           float* out, int& low, int& end) {
    if (block.n <= 0) return false;
    low = block.low(window), end = block.last(block.n - 1) + 1;
#ifdef MAX_CHUNKS
    const Chunk chunk(block.position, *n_rows, window);
    low = max(low, chunk.start), end = min(end, chunk.stop);
    if (low >= end) write_nothing(block, out);
#endif
    return low < end;
}
