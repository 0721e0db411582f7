// How a warpgroup brings tiles of the cache into shared memory for products, and what lies there.
// Knows no product.
#pragma once
#include "attention_rows.cuh"
#include "warpgroup.cuh"

static_assert(QUERIES == 128, "two warpgroups of 64 queries");
constexpr int GROUPS = 2;  // warpgroups with queries
constexpr bool CONVERTS = kv::TYPE_K::CONVERTS || kv::TYPE_V::CONVERTS;
constexpr int COPIERS = CONVERTS && DIM <= 128 ? 2 : 1;  // warpgroups that copy
constexpr int THREADS = 128 * (GROUPS + COPIERS);
constexpr int TILE = DIM > 128 ? 64 : 128;  // positions
constexpr int STAGES = DIM > 128 ? 2 : 3;   // tiles of keys, and of values
constexpr int PANELS = DIM / PANEL;
constexpr int TILE_BYTES = TILE * DIM * 2, TILE_PANEL = TILE * PANEL_ROW;
constexpr int QUERY_PANEL = 64 * PANEL_ROW;
constexpr int COPIER_REGISTERS = 56, REGISTERS = COPIERS == 2 ? 200 : 224;  // of a thread

struct Shared {
    u8 q[GROUPS][PANELS][QUERY_PANEL];
    u8 k[STAGES][TILE_BYTES], v[STAGES][TILE_BYTES];
    u64 barriers[2][2][STAGES];  // of full and of empty: of keys, of values

    __device__ __forceinline__ Barrier full(int which, int stage) const {
        return {shared_address(&barriers[0][which][stage])};
    }
    __device__ __forceinline__ Barrier empty(int which, int stage) const {
        return {shared_address(&barriers[1][which][stage])};
    }
};

// The tiles that a block walks over.
struct Tiles {
    int first, n;  // the first position, and how many tiles
};

template <int N>
__device__ __forceinline__ void wait_until_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}

// Calls work(row, number, where they go) for each eight numbers of a tile that are the thread's.
template <class Work>
__device__ __forceinline__ void for_eights(u8* tile, Work work) {
    constexpr int PIECES = DIM / 8, STEP = 128 / PIECES;
    const int piece = threadIdx.x % PIECES, first = threadIdx.x % 128 / PIECES;
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
// Two copiers take turns.
struct Copier {
    Shared& shared;
    const Tiles& tiles;
    const Ring& ring;
    const u8 *keys, *values;
    int started, handed;  // copies: 2i for the keys of tile i, 2i + 1 for its values

    __device__ __forceinline__ Barrier full(int i) const {
        return shared.full(i % 2, i / 2 % STAGES);
    }
    __device__ __forceinline__ Barrier empty(int i) const {
        return shared.empty(i % 2, i / 2 % STAGES);
    }
    static __device__ int phase(int i) { return i / 2 / STAGES % 2 ^ 1; }  // in which it is empty

    __device__ __forceinline__ void start() {
        const int i = started, stage = i / 2 % STAGES, tile = tiles.first + i / 2 * TILE;
        if (i % 2)
            copy_tile<kv::TYPE_V>(shared.v[stage], values, ring, tile);
        else
            copy_tile<kv::TYPE_K>(shared.k[stage], keys, ring, tile);
        started += COPIERS;
    }
    // The oldest copy that has not been handed over has come.
    __device__ __forceinline__ void hand_over() {
        const int i = handed, stage = i / 2 % STAGES;
        if (i % 2)
            convert_tile<kv::TYPE_V>(shared.v[stage]);
        else
            convert_tile<kv::TYPE_K>(shared.k[stage]);
        full(i).arrive();
        handed += COPIERS;
    }
    // Copies whose halves need no work are handed over by themselves.
    __device__ __forceinline__ void run() {
        for (int i = started; i < 2 * tiles.n; i = started) {
            empty(i).wait(phase(i));
            start();
            full(i).arrive_after_copies();
        }
    }
    // Others when LAG more are under way, or when there is nothing else to do.
    __device__ __forceinline__ void run_converting() {
        constexpr int LAG = 1;
        for (int i = started; i < 2 * tiles.n; i = started) {
            if (!empty(i).passed(phase(i))) hand_over_all();
            empty(i).wait(phase(i));
            start();
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (started - handed <= LAG * COPIERS) continue;
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
