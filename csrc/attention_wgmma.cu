// Attention of many query rows on sm_90a: a warpgroup copies keys and values into shared memory,
// the others have 64 queries each (Shah et al., arXiv:2407.08608). The scores of the next tile are
// under way while weights are made of this one's. Knows no other architecture.
#include "attention_copies.cuh"

// A warpgroup's queries times scale into shared memory.
__device__ __forceinline__ void stage_queries(u8 (&to)[PANELS][QUERY_PANEL], const Block& block,
                                              int first, const float* q, float scale) {
    constexpr int PIECES = DIM / 8;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < 64 * PIECES; i += 128) {
        const int row = i / PIECES, piece = i % PIECES;
        float4 a = {0, 0, 0, 0}, b = a;
        if (first + row < block.n) {
            const float* from = q + block.index(first + row) * DIM + piece * 8;
            a = load_activations(from), b = load_activations(from + 4);
        }
        *reinterpret_cast<uint4*>(&to[piece / 8][swizzled(row, piece % 8)]) = {
            pack(a.x * scale, a.y * scale), pack(a.z * scale, a.w * scale),
            pack(b.x * scale, b.y * scale), pack(b.z * scale, b.w * scale)};
    }
    fence_for_products();
}

// Starts the scores of a warpgroup's queries.
__device__ __forceinline__ void start_scores(float (&s)[TILE / 8][4], u32 q, u32 k) {
#pragma unroll
    for (int d = 0; d < DIM; d += 16)
        multiply_tiles(s, tile_at(q + d / PANEL * QUERY_PANEL + d % PANEL * 2),
                       tile_at(k + d / PANEL * TILE_PANEL + d % PANEL * 2), d > 0);
    products_commit();
}

constexpr int WIDTH = DIM < 128 ? DIM : 128;  // numbers of a head that a product has

// Starts adding weighted values.
__device__ __forceinline__ void start_values(float (&acc)[DIM / WIDTH][WIDTH / 8][4],
                                             const u32 (&p)[TILE / 16][4], u32 v) {
#pragma unroll
    for (int n = 0; n < TILE / 16; n++)
#pragma unroll
        for (int part = 0; part < DIM / WIDTH; part++)
            multiply_rows<true>(
                acc[part], p[n],
                tile_at(v + part * (WIDTH / PANEL) * TILE_PANEL + n * 16 * PANEL_ROW, TILE_PANEL));
    products_commit();
}

struct Attend {
    Softmax softmax;
    float acc[DIM / WIDTH][WIDTH / 8][4] = {};
    u32 p[TILE / 16][4];

    // Scores become weights; what was summed before is to shrink by `keep`.
    __device__ __forceinline__ void weigh(float (&s)[TILE / 8][4], int tile, float softcap,
                                          int window, float (&keep)[2]) {
        cap(s, softcap);
        softmax.mask(s, tile, window);
        softmax.weigh(s, keep);
    }
    __device__ __forceinline__ void take(const float (&s)[TILE / 8][4]) {
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) operand(p[n], s, n);
    }
};

// Waits for the keys (0) or the values (1) of tile i.
__device__ __forceinline__ void wait_for(Shared& shared, int which, int i) {
    shared.full(which, i % STAGES).wait(i / STAGES % 2);
}

// Products of the warpgroups take turns: while one makes weights, the other multiplies.
struct Turns {
    int group, left;

    __device__ __forceinline__ Turns(int group, int n) : group(group), left(n) {
        if (group == 1) barrier_arrive(4, 256);
    }
    __device__ __forceinline__ void begin() const { barrier(4 + group, 256); }
    __device__ __forceinline__ void end() {
        if (--left || group == 0) barrier_arrive(5 - group, 256);
    }
};

// A warpgroup's queries over all tiles.
__device__ __forceinline__ void attend_all(Attend& a, Shared& shared, const Tiles& tiles, u32 q,
                                           float softcap, int window, int group) {
    float s[TILE / 8][4], keep[2];
    Turns turns(group, tiles.n);
    wait_for(shared, 0, 0);
    fence_for_products();
    turns.begin();
    products_begin();
    start_scores(s, q, shared_address(shared.k[0]));
    turns.end();
    products_wait<0>();
    shared.empty(0, 0).arrive_warp();
    a.weigh(s, tiles.first, softcap, window, keep);
    a.take(s);
    for (int i = 1; i < tiles.n; i++) {
        const int stage = i % STAGES, before = (i - 1) % STAGES;
        wait_for(shared, 1, i - 1);
        wait_for(shared, 0, i);
        fence_for_products();
        turns.begin();
        products_begin();
        start_scores(s, q, shared_address(shared.k[stage]));
        start_values(a.acc, a.p, shared_address(shared.v[before]));
        turns.end();
        products_wait<1>();
        shared.empty(0, stage).arrive_warp();
        a.weigh(s, tiles.first + i * TILE, softcap, window, keep);
        products_wait<0>();
        shared.empty(1, before).arrive_warp();
#pragma unroll
        for (int part = 0; part < DIM / WIDTH; part++) shrink(a.acc[part], keep);
        a.take(s);
    }
    const int last = tiles.n - 1;
    wait_for(shared, 1, last);
    fence_for_products();
    products_begin();
    start_values(a.acc, a.p, shared_address(shared.v[last % STAGES]));
    products_wait<0>();
}

__device__ __forceinline__ void prepare(Shared& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) {
            shared.full(i / STAGES, i % STAGES).init(128);
            shared.empty(i / STAGES, i % STAGES).init(4 * GROUPS);
        }
        publish_barriers();
    }
    __syncthreads();
}

__device__ __forceinline__ void attend_rows(const float* q, const u8* cache_k,
                                            const u8* cache_v, const int* pos,
                                            const int* n_rows, float* out, float scale,
                                            float softcap, int window, int n_slots) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    pdl_launch_dependents();
    pdl_wait();
    const Block block(pos, n_rows);
    int low, end;
    if (!find_range(block, n_rows, window, out, low, end)) return;
    Tiles tiles = {low / TILE * TILE, 0};
    tiles.n = ceil_div(end - tiles.first, TILE);
    prepare(shared);
    const int group = static_cast<int>(threadIdx.x / 128) - COPIERS;
    if (group < 0) {
        give_registers<COPIER_REGISTERS>();
        const Ring ring(low, end, n_slots);
        const int first = threadIdx.x / 128;
        Copier copier = {shared, tiles, ring, cache_k, cache_v, first, first};
        if (CONVERTS)
            copier.run_converting();
        else
            copier.run();
    } else {
        take_registers<REGISTERS>();
        Attend a;
        const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // g
        for (int r = 0; r < 2; r++) a.softmax.last[r] = block.last(min(row + 8 * r, block.n - 1));
        stage_queries(shared.q[group], block, group * 64, q, scale);
        barrier(1 + group, 128);
        attend_all(a, shared, tiles, shared_address(shared.q[group]), softcap, window,
                   group);
#pragma unroll
        for (int part = 0; part < DIM / WIDTH; part++)
            write(a.softmax, a.acc[part], block, row, part * WIDTH, out);
    }
}

#ifdef MAX_CHUNKS
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_wgmma_split(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
                      const int* n_rows, float* chunks, float scale, float softcap, int window,
                      int n_slots) {
    attend_rows(q, cache_k, cache_v, pos, n_rows, chunks, scale, softcap, window, n_slots);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attention_wgmma(const float* q, const u8* cache_k, const u8* cache_v, const int* pos,
                const int* n_rows, float* out, float scale, float softcap, int window,
                int n_slots) {
    attend_rows(q, cache_k, cache_v, pos, n_rows, out, scale, softcap, window, n_slots);
}
#endif
