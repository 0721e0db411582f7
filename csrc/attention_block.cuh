// How a block attends: its warps take the tiles of a chunk in turn, their sums are added in a fixed
// order, and the block that comes last of a row combines the chunks in order. Partial results are,
// for each row and head, PARTIAL numbers: the weighted values of all chunks (MAX_CHUNKS, HEAD_DIM),
// their maximal scores (MAX_CHUNKS), the sums of their weights (MAX_CHUNKS). Grids are (blocks,
// N_HEAD_KV * SHARES, rows). Knows no rotation.
#pragma once
#include "attention_warp.cuh"

constexpr int PIECES = (DIM + 63) / 64;  // of a head that a warp combines at a time

// Weights that sum to 1 for a head's chunks, for one warp. Past the last chunk they are 0.
__device__ void weigh_chunks(const float* stats, int n_chunks, float* weight) {
    constexpr int MINE = MAX_CHUNKS / 32;
    float m[MINE], l[MINE], top = NOTHING, sum = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int c = 32 * i + threadIdx.x % 32;
        m[i] = c < n_chunks ? __ldcg(stats + c) : NOTHING;
        l[i] = c < n_chunks ? __ldcg(stats + MAX_CHUNKS + c) : 0;
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) top = fmaxf(top, m[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        m[i] = weight_of(m[i] - top);
        sum += m[i] * l[i];
    }
    sum = __fdividef(1, warp_sum(sum));
#pragma unroll
    for (int i = 0; i < MINE; i++) weight[32 * i + threadIdx.x % 32] = m[i] * sum;
    __syncwarp();
}

// One warp combines 64 numbers of a head, from number `d` on, two a lane, chunk after chunk. The
// first chunks' are on their way before the weights are known.
__device__ void combine(const float* partial, int n_chunks, int d, float* weight, float* out) {
    constexpr int AT_ONCE = 32;
    d += threadIdx.x % 32 * 2;
    const float* from = partial + min(d, DIM - 2);
    float2 part[AT_ONCE] = {}, sum = {0, 0};
#pragma unroll 1
    for (int first = 0; first < n_chunks; first += AT_ONCE) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (first + j < n_chunks)
                part[j] = __ldcg(reinterpret_cast<const float2*>(from + (first + j) * DIM));
        __syncwarp();  // all are on their way before the first is used
        if (first == 0) weigh_chunks(partial + MAX_CHUNKS * DIM, n_chunks, weight);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {  // past the last chunk the weight is 0
            const float w = weight[first + j];
            sum.x += w * part[j].x, sum.y += w * part[j].y;
        }
    }
    if (d < DIM) *reinterpret_cast<float2*>(out + d) = sum;
}

// Where the block's heads of one row go: a chunk's partial results, or the answer if there is one
// chunk alone.
struct Place {
    float *sums, *stats;
    int stride;  // from head to head

    __device__ static Place chunk(float* partials, int row, int c) {
        float* first = partials + static_cast<size_t>(row * N_HEAD + first_head()) * PARTIAL;
        return {first + c * DIM, first + MAX_CHUNKS * DIM + c, PARTIAL};
    }
    __device__ static Place answer(float* out, int row) {
        return {out + (row * N_HEAD + first_head()) * DIM, nullptr, DIM};
    }
};

// Of a head over the block's warps: the maximum, the sum, and what a warp's sums count of it.
struct Total {
    float m = NOTHING, l = 0, share[WARPS];

    __device__ __forceinline__ Total(const Shared& shared, int head) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            share[w] = weight_of(shared.m[w][head] - m);
            l += shared.l[w][head] * share[w];
        }
    }
};

// Adds up what the warps have of a chunk and writes it; an answer is divided by the sum of the
// weights. Every thread has ITEMS fours of the result.
__device__ void finish(Shared& shared, const Sums& mine, const Place& place) {
    constexpr int FOURS = DIM / 4, ITEMS = (HEADS * FOURS + THREADS - 1) / THREADS;
    const float l = row_sum(mine.l);
    if (in_quad() == 0) shared.m[warp_index()][quad()] = mine.m, shared.l[warp_index()][quad()] = l;
    float4 sum[ITEMS] = {};
#pragma unroll
    for (int first = 0; first < WARPS; first += SLOTS) {
        const int slot = warp_index() - first;
        if (first > 0) __syncthreads();
        if (slot >= 0 && slot < SLOTS && quad() < HEADS) mine.put(shared.sums[slot][quad()]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * THREADS + threadIdx.x, head = item / FOURS, d = item % FOURS * 4;
            if (head >= n_heads()) continue;
            const Total total(shared, head);
#pragma unroll
            for (int w = 0; w < SLOTS; w++) {
                const float share = total.share[first + w];
                const float4 x = *reinterpret_cast<const float4*>(&shared.sums[w][head][d]);
                sum[i].x += share * x.x, sum[i].y += share * x.y;
                sum[i].z += share * x.z, sum[i].w += share * x.w;
            }
            if (first + SLOTS < WARPS) continue;
            const float scale = place.stats ? 1 : __fdividef(1, total.l);
            *reinterpret_cast<float4*>(place.sums + head * place.stride + d) = {
                sum[i].x * scale, sum[i].y * scale, sum[i].z * scale, sum[i].w * scale};
            if (!place.stats || d > 0) continue;
            float* stats = place.stats + head * place.stride;
            stats[0] = total.m, stats[MAX_CHUNKS] = total.l;
        }
    }
}

// The warp's first tile of a chunk that holds a position of the span.
__device__ int first_tile(const Span& span, int c) {
    const int tile = span.start(c) + TILE * warp_index();
    const int behind = span.low - tile - TILE + 1;  // so far it must move at least
    return behind > 0 ? tile + ceil_div(behind, STEP) * STEP : tile;
}

// The block's chunks of one row. `stage` puts the queries into shared memory while the first keys
// and values are on their way. A warp takes at least one tile of each chunk, if an empty one, so
// that all finish it together. With `out`, one chunk alone is the answer.
template <class Stage>
__device__ void attend(Shared& shared, const Span& span, const Head& head, int row,
                       float* partials, float* out, float softcap, Stage stage) {
    Keys keys;
    Values values;
    Sums mine;
    int c = blockIdx.x, tile = first_tile(span, c);
    keys.load(head, tile, 0);
    values.load(head, tile, 0);
    if (threadIdx.x == 0) shared.n_chunks = span.n_chunks;
    stage();
    while (c < span.n_chunks) {
        const int stop = span.stop(c);
        int next_c = c, next = tile + STEP;
        if (next >= stop) next_c += gridDim.x, next = first_tile(span, next_c);
        const bool more = next_c < span.n_chunks;
        // The new position is only here where its chunk is: a tile past the chunk may reach it too.
        const bool fresh =
            head.ring.end <= span.last && stop > span.last && tile + TILE > span.last;
        float products[2][4] = {};
#pragma unroll
        for (int first = 0; first < K_SPANS; first += K_AT_ONCE) {
            if (first) keys.load(head, tile, first);
            if (fresh) keys.replace(tile, span.last, shared.k, first);
            score(shared, keys, first, products);
        }
        if (more) keys.load(head, next, 0);
        u32 p[4];
        const float keep = mine.weigh(scores(products, tile, span.low, stop, softcap), p);
#pragma unroll
        for (int first = 0; first < V_SPANS; first += V_AT_ONCE) {
            if (first) values.load(head, tile, first);
            if (fresh) values.replace(tile, span.last, shared.v, first);
            mine.add(p, keep, values, first);
        }
        if (more) values.load(head, next, 0);
        if (next_c != c) {
            const bool whole = out && span.n_chunks == 1;
            finish(shared, mine, whole ? Place::answer(out, row) : Place::chunk(partials, row, c));
            mine = Sums();
            if (more) __syncthreads();  // the slots are free again
        }
        c = next_c, tile = next;
    }
}

// True in every thread of the block that comes last of a row's; what the others wrote is visible.
__device__ bool comes_last(bool& last, unsigned* counter, int n_blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        last = arrive(counter) == n_blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

// The block that comes last of a row combines its heads.
__device__ void combine_heads(Shared& shared, int row, const float* partials, unsigned* counters,
                              float* out) {
    const int n_chunks = shared.n_chunks, n_blocks = min(static_cast<int>(gridDim.x), n_chunks);
    unsigned* counter = counters + row * gridDim.y + blockIdx.y;
    if (n_chunks == 1 || !comes_last(shared.last, counter, n_blocks)) return;
    for (int i = warp_index(); i < n_heads() * PIECES; i += WARPS) {
        const size_t head = row * N_HEAD + first_head() + i / PIECES;
        combine(partials + head * PARTIAL, n_chunks, i % PIECES * 64,
                shared.weight[warp_index()], out + head * DIM);
    }
}

// A query head times scale into shared memory, for one warp; numbers that are not there are zero.
__device__ void stage_query(Shared& shared, int head, const float* q, float scale) {
    for (int d = threadIdx.x % 32 * 2; d < 32 * K_SPANS; d += 64) {
        float2 x = {0, 0};
        if (head < n_heads() && d < DIM) x = *reinterpret_cast<const float2*>(q + d);
        x.x *= scale, x.y *= scale;
        reinterpret_cast<uint2*>(shared.q[head])[d / 2] = {pack(x.x, x.y),
                                                           pack(lost(x.x), lost(x.y))};
    }
}
