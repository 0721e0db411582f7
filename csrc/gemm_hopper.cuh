// Products of many rows with weights on warp groups (sm_90a): blocks that stay, each with a warp
// that copies weights, one that copies rows, and two warp groups that multiply 64 outputs each
// (gemm_hopper_multiply.cuh).
//
// A stage of weights is one stored tile of every output of the block's, a stage of rows is 64
// columns of TILE_ROWS rows; each is copied by one thread and given back by those that read it. A
// warp unpacks its outputs' next 64 columns into registers while the ones before are multiplied; of
// two blocks on a multiprocessor (BLOCKS), for few rows, one does while the other multiplies.
//
// With SPLIT > 1 the blocks of a cluster share the columns of a tile; each then adds up the sums of
// some of the rows, in the order of the blocks. See llamagraph/kernels/gemm_hopper.py.
#pragma once
#include "hopper_weights.cuh"
#include "panels.cuh"

constexpr int OUTPUTS = 128, STEP = 64;  // of a block at a time: outputs, columns
constexpr int MULTIPLIERS = 256, THREADS = 128 + MULTIPLIERS;
constexpr int COPY_REGISTERS = 40, REGISTERS = BLOCKS == 1 ? 232 : 96;
// Where another block on the multiprocessor unpacks while this one multiplies, no step overlaps.
constexpr int AHEAD = BLOCKS == 1 ? 2 : 1;
constexpr int ROW_BYTES = TILE_ROWS * STEP * 2;  // of a stage

// How a weight is stored.
template <class T, int UnitWeights, int TileRows>
struct Stored {
    using Type = T;
    static constexpr int UNIT_WEIGHTS = UnitWeights, TILE_OUTPUTS = TileRows;
    static constexpr int UNITS = 32 / TileRows;         // of a whole tile
    static constexpr int TILE_BYTES = 32 * T::BYTES;    // of one
    static constexpr int GROUPS = OUTPUTS / TileRows;   // of outputs that are stored together
    static constexpr int BYTES = GROUPS * TILE_BYTES;   // of a stage
    static_assert(Operand<T>::EXISTS, "a type that can be unpacked in registers");
    static_assert(UnitWeights % STEP == 0, "whole steps in a unit");

    // The units of a row that this block multiplies: whole tiles, but for the row's last.
    static __device__ __forceinline__ int first_unit(int n_in, int share = blockIdx.x % SPLIT) {
        const int n_units = n_in / UnitWeights, n_tiles = ceil_div(n_units, UNITS);
        return min(n_units, share * n_tiles / SPLIT * UNITS);
    }
    static __device__ __forceinline__ int end_unit(int n_in) {
        return first_unit(n_in, blockIdx.x % SPLIT + 1);
    }
};

using Usual = Stored<TYPE<UNIT>, UNIT, RW>;
#ifdef V_TYPE
using Other = Stored<V_TYPE<V_UNIT>, V_UNIT, V_RW>;  // of the last part
#else
using Other = Usual;
#endif

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

constexpr int WEIGHT_BYTES = Usual::BYTES > Other::BYTES ? Usual::BYTES : Other::BYTES;
constexpr int RINGS_AT = ROW_STAGES * ROW_BYTES + WEIGHT_STAGES * WEIGHT_BYTES;

// A weight and where its results go. With `second`, a block's outputs are half as many, of both.
struct Part {
    const u8 *weight, *second;
    void* out;
    int n_out;

    __device__ __forceinline__ int outputs() const { return second ? OUTPUTS / 2 : OUTPUTS; }
    __device__ __forceinline__ int tiles() const { return ceil_div(n_out, outputs()); }
};

struct Problem {
    Part a, b, c;     // b and c may be none, of 0 outputs
    const __half* x;  // (n_in / 64, rows, 64), in panels
    int n_in, rows;
};

// The block's tiles in turn, `work(stored, part, first_row, first_out)`, and `between()` two of them.
// Those of one set of outputs follow each other. The last rows' may be no whole tile: a second path
// that multiplies fewer rows made whole tiles 8 % slower.
template <class Work, class Between>
__device__ __forceinline__ void for_tiles(const Problem& p, int n, Work work, Between between) {
    const int a = p.a.tiles(), b = a + p.b.tiles(), outputs = b + p.c.tiles();
    const int row_tiles = ceil_div(n, TILE_ROWS), n_tiles = row_tiles * outputs;
    for (int tile = blockIdx.x / SPLIT; tile < n_tiles;) {
        const int row = tile % row_tiles * TILE_ROWS, at = tile / row_tiles;
        const Part part = at < a ? p.a : at < b ? p.b : p.c;
        const int first = (at < a ? at : at < b ? at - a : at - b) * part.outputs();
        if (SAME<Usual, Other> || at < b)
            work(Usual(), part, row, first);
        else
            work(Other(), part, row, first);
        tile += gridDim.x / SPLIT;
        if (tile < n_tiles) between();
    }
}

// Stages of shared memory that are filled and emptied in turn; each has a barrier for either.
template <int Stages>
struct Turns {
    u32 barriers;  // 8 bytes each, first those of full stages
    int stage = 0, phase = 0;

    __device__ __forceinline__ Turns(u32 barriers) : barriers(barriers) {}

    __device__ __forceinline__ void init(int producers, int consumers) const {
        for (int i = 0; i < Stages; i++) {
            Barrier{barriers + 8 * i}.init(producers);
            Barrier{barriers + 8 * (Stages + i)}.init(consumers);
        }
    }
    __device__ __forceinline__ Barrier full() const { return {barriers + 8 * stage}; }
    __device__ __forceinline__ Barrier empty() const { return {barriers + 8 * (Stages + stage)}; }
    __device__ __forceinline__ void wait_full() const { full().wait(phase); }
    __device__ __forceinline__ void wait_empty() const { empty().wait(phase ^ 1); }
    __device__ __forceinline__ void next() {
        if (++stage == Stages) stage = 0, phase ^= 1;
    }
};

struct Shared {
    u32 address;  // aligned to 1024
    Turns<WEIGHT_STAGES> weights;
    Turns<ROW_STAGES> rows;
    // What the blocks of a cluster tell each other of a tile: that the stages are free, that sums
    // have been left there; and a block itself, that they have been read.
    Barrier free, left, read;
    int tile = 0;

    __device__ __forceinline__ Shared(const void* memory)
        : address((shared_address(memory) + 1023) & ~1023u),
          weights(address + RINGS_AT),
          rows(address + RINGS_AT + 16 * WEIGHT_STAGES),
          free{address + RINGS_AT + 16 * (WEIGHT_STAGES + ROW_STAGES)},
          left{free.at + 8},
          read{free.at + 16} {}

    __device__ __forceinline__ void init() const {
        weights.init(1, MULTIPLIERS);
        rows.init(1, MULTIPLIERS / 32);
        if constexpr (SPLIT > 1) {
            free.init((SPLIT - 1) * (MULTIPLIERS / 32));
            left.init(1);
            read.init(MULTIPLIERS);
        }
        publish_barriers();
    }

    __device__ __forceinline__ u32 weights_address() const {
        return address + ROW_STAGES * ROW_BYTES + weights.stage * WEIGHT_BYTES;
    }
    __device__ __forceinline__ u32 rows_address() const { return address + rows.stage * ROW_BYTES; }

    // Waits until the stages may be filled again, behind a tile whose sums were added up there.
    __device__ __forceinline__ void wait_for_sums() {
        if (SPLIT > 1) read.wait(tile++ % 2);
    }
};

__device__ __forceinline__ void copy_weights(const Problem& p, Shared s, int n) {
    for_tiles(p, n, [&](auto stored, const Part& part, int, int first_out) {
        using S = decltype(stored);
        constexpr int UNIT_BYTES = S::TILE_OUTPUTS * S::Type::BYTES;  // of a group
        const int n_units = p.n_in / S::UNIT_WEIGHTS, last = (part.n_out - 1) / S::TILE_OUTPUTS;
        const int in_first = part.outputs() / S::TILE_OUTPUTS;  // groups
        const int end = S::end_unit(p.n_in);
        for (int unit = S::first_unit(p.n_in); unit < end; unit += S::UNITS) {
            s.weights.wait_empty();
            fence_for_products();  // threads have read there, and copies are not ordered with that
            const u32 n_bytes = min(S::UNITS, end - unit) * UNIT_BYTES;
            s.weights.full().arrive_expecting(S::GROUPS * n_bytes);
#pragma unroll 1
            for (int g = 0; g < S::GROUPS; g++) {
                const bool second = g >= in_first;
                const size_t group =
                    min(first_out / S::TILE_OUTPUTS + (second ? g - in_first : g), last);
                copy_bulk(s.weights_address() + g * S::TILE_BYTES,
                          (second ? part.second : part.weight) +
                              (group * n_units + unit) * UNIT_BYTES,
                          n_bytes, s.weights.full());
            }
            s.weights.next();
        }
    }, [&] { s.wait_for_sums(); });
}

__device__ __forceinline__ void copy_rows(const Problem& p, Shared s, int n) {
    for_tiles(p, n, [&](auto stored, const Part&, int first_row, int) {
        using S = decltype(stored);
        constexpr int STEPS = S::UNIT_WEIGHTS / STEP;
        const int end = S::end_unit(p.n_in) * STEPS;
        const u32 n_bytes = min(TILE_ROWS, (n - first_row + 7) & ~7) * STEP * 2;
        for (int step = S::first_unit(p.n_in) * STEPS; step < end; step++) {
            s.rows.wait_empty();
            s.rows.full().arrive_expecting(n_bytes);
            copy_bulk(s.rows_address(),
                      p.x + (static_cast<size_t>(step) * p.rows + first_row) * STEP, n_bytes,
                      s.rows.full());
            s.rows.next();
        }
    }, [&] { s.wait_for_sums(); });
}
