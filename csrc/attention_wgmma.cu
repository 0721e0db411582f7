// Attention of many query rows on sm_90a: a warpgroup copies keys and values into shared memory,
// the others have 64 queries each (Shah et al., arXiv:2407.08608). The scores of the next tile are
// under way while weights are made of this one's. Knows no other architecture.
#include "attention_rows.cuh"
#include "warpgroup.cuh"

#ifndef PINGPONG
#define PINGPONG 1
#endif
constexpr int GROUPS = QUERIES / 64;  // warpgroups with queries
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int TILE = DIM > 128 ? 64 : 128;  // positions
#ifndef ST
#define ST 3
#endif
constexpr int STAGES = DIM > 128 ? 2 : ST;   // tiles of keys, and of values
constexpr int PANELS = DIM / PANEL;
constexpr int TILE_BYTES = TILE * DIM * 2, TILE_PANEL = TILE * PANEL_ROW;
constexpr int QUERY_PANEL = 64 * PANEL_ROW;
constexpr int COPIER_REGISTERS = GROUPS == 3 ? 32 : 56;
constexpr int REGISTERS = GROUPS == 3 ? 160 : 224;  // of a thread with queries

struct Shared {
    u8 q[GROUPS][PANELS][QUERY_PANEL];
    u8 k[STAGES][TILE_BYTES], v[STAGES][TILE_BYTES];
    Barrier full[2][STAGES], empty[2][STAGES];  // of keys, of values
};

// The tiles that a block walks over.
struct Tiles {
    int first, n;  // the first position, and how many tiles
};

// ---- Copying ------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void wait_until_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// Calls work(row, number, where they go) for each eight numbers of a tile that are the thread's.
template <class Work>
__device__ __forceinline__ void for_eights(u8* tile, Work work) {
    constexpr int PIECES = DIM / 8, STEP = 128 / PIECES;
    const int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
    u8* panel = tile + piece / 8 * TILE_PANEL;
#pragma unroll 4
    for (int i = 0; i < TILE / STEP; i++) {
        const int row = first + i * STEP;
        work(row, piece * 8, panel + swizzled(row, piece % 8));
    }
}

// Starts to bring in a tile of the block's KV head.
template <class Type>
__device__ __forceinline__ void copy_tile(u8* to, const u8* cache, const Ring& ring, int tile) {
    for_eights(to, [&](int row, int d, u8* at) {
        Type::copy(ring.has(tile + row), at, cache + ring.slot_of(tile + row) * Type::SLOT,
                   blockIdx.x * DIM + d);
    });
}

// Makes halves of a tile that has come.
template <class Type>
__device__ __forceinline__ void convert_tile(u8* tile) {
    if (Type::CONVERTS)
        for_eights(tile, [&](int, int d, u8* at) { Type::convert(at, blockIdx.x * DIM + d); });
}

// Brings in keys and values of all tiles in turn, each into the stage that has been free longest.
struct Copier {
    Shared& shared;
    const Tiles& tiles;
    const Ring& ring;
    const u8 *keys, *values;
    int started = 0, handed = 0;  // copies: 2i for the keys of tile i, 2i + 1 for its values

    __device__ __forceinline__ Barrier& full(int i) {
        return shared.full[i % 2][i / 2 % STAGES];
    }
    __device__ __forceinline__ Barrier& empty(int i) {
        return shared.empty[i % 2][i / 2 % STAGES];
    }
    static __device__ int phase(int i) { return i / 2 / STAGES % 2 ^ 1; }  // in which it is empty

    __device__ __forceinline__ void start() {
        const int i = started++, stage = i / 2 % STAGES, tile = tiles.first + i / 2 * TILE;
        if (i % 2)
            copy_tile<kv::TYPE_V>(shared.v[stage], values, ring, tile);
        else
            copy_tile<kv::TYPE_K>(shared.k[stage], keys, ring, tile);
    }
    // The oldest copy that has not been handed over has come.
    __device__ __forceinline__ void hand_over() {
        const int i = handed++, stage = i / 2 % STAGES;
        if (i % 2)
            convert_tile<kv::TYPE_V>(shared.v[stage]);
        else
            convert_tile<kv::TYPE_K>(shared.k[stage]);
        full(i).arrive();
    }
    // Copies whose halves need no work are handed over by themselves.
    __device__ __forceinline__ void run() {
        for (int i = 0; i < 2 * tiles.n; i++) {
            empty(i).wait(phase(i));
            start();
            full(i).arrive_after_copies();
        }
    }
    // Others when LAG more are under way, or when there is nothing else to do.
    __device__ __forceinline__ void run_converting() {
        constexpr int LAG = 2;
        for (int i = 0; i < 2 * tiles.n; i++) {
            if (!empty(i).passed(phase(i))) hand_over_all();
            empty(i).wait(phase(i));
            start();
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (started - handed <= LAG) continue;
            wait_until_copies<LAG>();
            hand_over();
        }
        hand_over_all();
    }
    __device__ __forceinline__ void hand_over_all() {
        wait_until_copies<0>();
        while (handed < started) hand_over();
    }
};

// ---- Attending ----------------------------------------------------------------------------------

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
            multiply_rows(acc[part], p[n],
                          tile_at(v + part * (WIDTH / PANEL) * TILE_PANEL + n * 16 * PANEL_ROW,
                                  TILE_PANEL));
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
    shared.full[which][i % STAGES].wait(i / STAGES % 2);
}

// Products of the warpgroups take turns: while one makes weights, the other multiplies.
struct Turns {
    int group, left;

    __device__ __forceinline__ Turns(int group, int n) : group(group), left(n) {
        if (PINGPONG && group == 1) barrier_arrive(4, 256);
    }
    __device__ __forceinline__ void begin() {
        if (PINGPONG) barrier(4 + group, 256);
    }
    __device__ __forceinline__ void end() {
        if (PINGPONG && (--left || group == 0)) barrier_arrive(5 - group, 256);
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
    shared.empty[0][0].arrive_warp();
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
        shared.empty[0][stage].arrive_warp();
        a.weigh(s, tiles.first + i * TILE, softcap, window, keep);
        products_wait<0>();
        shared.empty[1][before].arrive_warp();
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
            shared.full[i / STAGES][i % STAGES].init(128);
            shared.empty[i / STAGES][i % STAGES].init(4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
    if (block.n <= 0) return;
    int low = block.low(window), end = block.last(block.n - 1) + 1;
#ifdef MAX_CHUNKS
    const Chunk chunk(block.position, *n_rows, window);
    low = max(low, chunk.start), end = min(end, chunk.stop);
    if (low >= end) return write_nothing(block, out);
#endif
    Tiles tiles = {low / TILE * TILE, 0};
    tiles.n = ceil_div(end - tiles.first, TILE);
    prepare(shared);
    const int group = threadIdx.x / 128 - 1;
    if (group < 0) {
        give_registers<COPIER_REGISTERS>();
        const Ring ring(low, end, n_slots);
        Copier copier = {shared, tiles, ring, cache_k, cache_v};
        if (kv::TYPE_K::CONVERTS || kv::TYPE_V::CONVERTS)
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
