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
    float m[MINE], top = NOTHING, sum = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int c = 32 * i + threadIdx.x % 32;
        m[i] = c < n_chunks ? __ldcg(stats + c) : NOTHING;
        top = fmaxf(top, m[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int c = 32 * i + threadIdx.x % 32;
        m[i] = weight_of(m[i] - top);
        if (c < n_chunks) sum += m[i] * __ldcg(stats + MAX_CHUNKS + c);
    }
    sum = __fdividef(1, warp_sum(sum));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MINE; i++) weight[32 * i + threadIdx.x % 32] = m[i] * sum;
    __syncwarp();
}

// One warp combines 64 numbers of a head, from number `d` on, two a lane, chunk after chunk.
__device__ void combine(const float* partial, int n_chunks, int d, float* weight, float* out) {
    constexpr int AT_ONCE = 32;
    weigh_chunks(partial + MAX_CHUNKS * DIM, n_chunks, weight);
    d += threadIdx.x % 32 * 2;
    const float* from = partial + min(d, DIM - 2);
    float2 sum = {0, 0};
#pragma unroll 1
    for (int first = 0; first < n_chunks; first += AT_ONCE) {
        float2 part[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {  // past the last chunk: any number, for weight 0
            const int c = min(first + j, n_chunks - 1);
            part[j] = __ldcg(reinterpret_cast<const float2*>(from + c * DIM));
        }
        __syncwarp();  // all are on their way before the first is used
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
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

// The maximum and the sum of a head over the block's warps.
__device__ float2 total(const Shared& shared, int head) {
    float m = NOTHING, l = 0;
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, shared.m[w][head]);
    for (int w = 0; w < WARPS; w++) l += shared.l[w][head] * weight_of(shared.m[w][head] - m);
    return {m, l};
}

// Writes what the two slots of shared memory hold; the answer is divided by the sum of the weights.
__device__ void write(const Shared& shared, const Place& place) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_heads() * DIM / 4; i += THREADS) {
        const int head = i / (DIM / 4), d = i % (DIM / 4) * 4;
        const float4 a = *reinterpret_cast<const float4*>(&shared.sums[0][head][d]);
        const float4 b = *reinterpret_cast<const float4*>(&shared.sums[1][head][d]);
        const float scale = place.stats ? 1 : __fdividef(1, total(shared, head).y);
        *reinterpret_cast<float4*>(place.sums + head * place.stride + d) = {
            (a.x + b.x) * scale, (a.y + b.y) * scale, (a.z + b.z) * scale, (a.w + b.w) * scale};
    }
    if (place.stats && threadIdx.x < n_heads()) {
        const float2 t = total(shared, threadIdx.x);
        float* stats = place.stats + threadIdx.x * place.stride;
        stats[0] = t.x, stats[MAX_CHUNKS] = t.y;
    }
}

// Adds up what the warps have of a chunk: two put down their sums, two add theirs.
__device__ void finish(Shared& shared, Sums& mine, const Place& place) {
    const int w = warp_index(), head = quad();
    const float l = row_sum(mine.l);
    if (in_quad() == 0) shared.m[w][head] = mine.m, shared.l[w][head] = l;
    __syncthreads();
    const float keep = weight_of(mine.m - total(shared, head).x);
    if (w >= WARPS / 2) mine.put(shared.sums[w % 2][head], keep, false);
    __syncthreads();
    if (w < WARPS / 2) mine.put(shared.sums[w % 2][head], keep, true);
    __syncthreads();
    write(shared, place);
    __syncthreads();
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
        }
        c = next_c, tile = next;
    }
}

// True in every thread of the block that comes last of a row's; what the others wrote is visible.
__device__ bool comes_last(bool& last, unsigned* counter, int n_blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(counter, 1u) == n_blocks - 1;
        if (last) *counter = 0;
        __threadfence();
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

// Queries times scale into shared memory; heads and numbers that are not there are zero.
__device__ void stage_queries(Shared& shared, const float* q, float scale) {
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * K_SPANS * 16; i += THREADS) {
        const int head = i / (K_SPANS * 16), d = i % (K_SPANS * 16) * 2;
        float2 x = {0, 0};
        if (head < n_heads() && d < DIM) x = *reinterpret_cast<const float2*>(q + head * DIM + d);
        x.x *= scale, x.y *= scale;
        reinterpret_cast<uint2*>(shared.q[head])[d / 2] = {pack(x.x, x.y),
                                                           pack(lost(x.x), lost(x.y))};
    }
}
