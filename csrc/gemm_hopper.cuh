// Products of many rows with weights on warp groups (sm_90a): blocks that stay, each with a warp
// that copies weights, one that copies rows, and two warp groups that multiply 64 outputs each.
//
// A stage of weights is one stored tile of every output of the block's, a stage of rows is 64
// columns of TILE_ROWS rows; each is copied by one thread and given back by those that read it. A
// warp unpacks its outputs' next 64 columns into registers while the ones before are multiplied.
// See llamagraph/kernels/gemm_hopper.py.
#pragma once
#include "hopper_weights.cuh"
#include "panels.cuh"

constexpr int OUTPUTS = 128, STEP = 64;  // of a block at a time: outputs, columns
constexpr int MULTIPLIERS = 256, THREADS = 128 + MULTIPLIERS;
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
};

using Usual = Stored<TYPE<UNIT>, UNIT, RW>;
#ifdef V_TYPE
using Other = Stored<V_TYPE<V_UNIT>, V_UNIT, V_RW>;  // of the last part
#else
using Other = Usual;
#endif

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

// The block's tiles in turn, `work(stored, part, first_row, first_out)`: those of one set of
// outputs follow each other.
template <class Work>
__device__ __forceinline__ void for_tiles(const Problem& p, int n, Work work) {
    const int row_tiles = ceil_div(n, TILE_ROWS), a = p.a.tiles(), b = a + p.b.tiles();
    for (int tile = blockIdx.x; tile < row_tiles * (b + p.c.tiles()); tile += gridDim.x) {
        const int row = tile % row_tiles * TILE_ROWS, at = tile / row_tiles;
        if (at < b) {
            const Part part = at < a ? p.a : p.b;
            work(Usual(), part, row, (at < a ? at : at - a) * part.outputs());
        } else {
            work(Other(), p.c, row, (at - b) * p.c.outputs());
        }
    }
}

struct Shared {
    u32 address;  // aligned to 1024
    Ring<WEIGHT_STAGES> weights;
    Ring<ROW_STAGES> rows;

    __device__ __forceinline__ Shared(const void* memory)
        : address((shared_address(memory) + 1023) & ~1023u),
          weights(address + RINGS_AT),
          rows(address + RINGS_AT + 16 * WEIGHT_STAGES) {}

    __device__ __forceinline__ u32 weights_address() const {
        return address + ROW_STAGES * ROW_BYTES + weights.stage * WEIGHT_BYTES;
    }
    __device__ __forceinline__ u32 rows_address() const { return address + rows.stage * ROW_BYTES; }
};

__device__ __forceinline__ void copy_weights(const Problem& p, Shared s, int n) {
    for_tiles(p, n, [&](auto stored, const Part& part, int, int first_out) {
        using S = decltype(stored);
        constexpr int UNIT_BYTES = S::TILE_OUTPUTS * S::Type::BYTES;  // of a group
        const int n_units = p.n_in / S::UNIT_WEIGHTS, last = (part.n_out - 1) / S::TILE_OUTPUTS;
        const int in_first = part.outputs() / S::TILE_OUTPUTS;  // groups
        for (int unit = 0; unit < n_units; unit += S::UNITS) {
            s.weights.wait_emptied();
            const u32 n_bytes = min(S::UNITS, n_units - unit) * UNIT_BYTES;
            expect_bytes(s.weights.filled(), S::GROUPS * n_bytes);
#pragma unroll 1
            for (int g = 0; g < S::GROUPS; g++) {
                const bool second = g >= in_first;
                const size_t group =
                    min(first_out / S::TILE_OUTPUTS + (second ? g - in_first : g), last);
                copy_bulk(s.weights_address() + g * S::TILE_BYTES,
                          (second ? part.second : part.weight) +
                              (group * n_units + unit) * UNIT_BYTES,
                          n_bytes, s.weights.filled());
            }
            s.weights.next();
        }
    });
}

__device__ __forceinline__ void copy_rows(const Problem& p, Shared s, int n) {
    for_tiles(p, n, [&](auto, const Part&, int first_row, int) {
        for (int step = 0; step < p.n_in / STEP; step++) {
            s.rows.wait_emptied();
            expect_bytes(s.rows.filled(), ROW_BYTES);
            copy_bulk(s.rows_address(),
                      p.x + (static_cast<size_t>(step) * p.rows + first_row) * STEP, ROW_BYTES,
                      s.rows.filled());
            s.rows.next();
        }
    });
}

// What a warp multiplies: 16 outputs of a stage, eight from either place on, with all rows.
struct Multiplier {
    int first[2];
    float sums[TILE_ROWS / 2];
    u32 a[2][4][4];  // operands of two steps: one is unpacked while the other is multiplied
    u32 before;      // the barrier that gives back the rows of the step before, or 0

    // Columns 64J on of a unit; their operands go to a[Turn].
    template <int Turn, int J, class Type, class Unit>
    __device__ __forceinline__ void step(const Operand<Type>& operand, const Unit& unit,
                                         Shared& s) {
        operand.template get<J>(unit, a[Turn]);
        s.rows.wait_filled();
        const u64 rows = rows_at(s.rows_address());
        open_products();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_group<TILE_ROWS>(sums, a[Turn][k], rows + 2 * k);
        close_products();
        wait_for_products<1>();
        give_back(s.rows.emptied());
        s.rows.next();
    }

    // The rows of the step before this one have been read.
    __device__ __forceinline__ void give_back(u32 next) {
        if (before && threadIdx.x % 32 == 0) arrive(before);
        before = next;
    }

    // All the steps of a unit, beginning with a[Turn].
    template <class S, int Turn>
    __device__ __forceinline__ void unit(Shared& s, int lanes, int unit) {
        using Type = typename S::Type;
        const auto u = warp_unit<Type, S::TILE_OUTPUTS>(s.weights_address(), lanes, unit, first[0],
                                                        first[1]);
        Operand<Type> operand;
        operand.begin(u);
        step<Turn, 0>(operand, u, s);
        if constexpr (S::UNIT_WEIGHTS >= 128) step<Turn ^ 1, 1>(operand, u, s);
        if constexpr (S::UNIT_WEIGHTS >= 256) {
            step<Turn, 2>(operand, u, s);
            step<Turn ^ 1, 3>(operand, u, s);
        }
    }

    // Sums of all columns.
    template <class S>
    __device__ __forceinline__ void multiply(int n_in, Shared& s) {
        const int n_units = n_in / S::UNIT_WEIGHTS;
#pragma unroll
        for (int i = 0; i < TILE_ROWS / 2; i++) sums[i] = 0;
        before = 0;
        for (int at = 0; at < n_units; at += S::UNITS) {
            const int units = min(S::UNITS, n_units - at), lanes = units * S::TILE_OUTPUTS;
            s.weights.wait_filled();
            if constexpr (S::UNIT_WEIGHTS == STEP) {
                int u = 0;
                for (; u + 1 < units; u += 2) unit<S, 0>(s, lanes, u), unit<S, 1>(s, lanes, u + 1);
                if (u < units) {
                    unit<S, 0>(s, lanes, u);
                    wait_for_products<0>();  // the next stage begins with a[0] again
                }
            } else {
                for (int u = 0; u < units; u++) unit<S, 0>(s, lanes, u);
            }
            arrive(s.weights.emptied());
            s.weights.next();
        }
        wait_for_products<0>();
#pragma unroll
        for (int i = 0; i < TILE_ROWS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
        give_back(0);
    }

    // The lane's results: outputs o and o + 8 of rows `row` and `row` + 1, and of each eighth on.
    template <bool Add>
    __device__ __forceinline__ void write(const Part& part, int row, int o, int n) const {
        float* to = static_cast<float*>(part.out) + static_cast<size_t>(row) * part.n_out + o;
#pragma unroll
        for (int j = 0; j < TILE_ROWS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (row + 8 * j + e < n && o + 8 * i < part.n_out)
                        put<Add>(to + static_cast<size_t>(8 * j + e) * part.n_out + 8 * i,
                                 sums[4 * j + 2 * i + e]);
    }

#ifdef ACT
    // The same where the second outputs are those of `up`: act(gate) * up, in panels. Lanes of two
    // neighbouring outputs, which are a pair there, swap: each writes one of the two rows.
    __device__ __forceinline__ void write_gated(const Part& part, int rows, int row, int o, int n
                                                ) const {
        const int odd = o % 2, own = row + odd, pair = o % 16;
        const int piece = o % 64 / 16 * 2 + pair / 2 % 2;
        u32* to = static_cast<u32*>(part.out) +
                  (static_cast<size_t>(o / 64) * rows + own) * 32 + (piece ^ own % 8) * 4 + pair / 4;
#pragma unroll
        for (int j = 0; j < TILE_ROWS / 8; j++) {
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; e++) v[e] = ACT(sums[4 * j + e]) * sums[4 * j + 2 + e];
            const float other = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
            const u32 both = odd ? pack_limited(other, v[1]) : pack_limited(v[0], other);
            if (own + 8 * j < n && o < part.n_out) to[8 * j * 32] = both;
        }
    }
#endif
};

template <bool Add>
__device__ __forceinline__ void multiply_tiles(const Problem& p, Shared s, int n) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    Multiplier m;
    for_tiles(p, n, [&](auto stored, const Part& part, int first_row, int first_out) {
        const int row = first_row + lane % 4 * 2;
#ifdef ACT
        m.first[0] = 8 * warp, m.first[1] = OUTPUTS / 2 + 8 * warp;
        m.template multiply<decltype(stored)>(p.n_in, s);
        m.write_gated(part, p.rows, row, first_out + m.first[0] + lane / 4, n);
#else
        m.first[0] = 16 * warp, m.first[1] = 16 * warp + 8;
        m.template multiply<decltype(stored)>(p.n_in, s);
        m.template write<Add>(part, row, first_out + m.first[0] + lane / 4, n);
#endif
    });
}

template <bool Add>
__device__ __forceinline__ void product(const Problem& p, const int* n_rows) {
    extern __shared__ u8 memory[];
    Shared s(memory);
    pdl_launch_dependents();
    if (threadIdx.x == 0) {
        s.weights.init(1, MULTIPLIERS);
        s.rows.init(1, MULTIPLIERS / 32);
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        fewer_registers<56>();
        // Where all rows are one tile, which weights come first is known before the rows are.
        if (threadIdx.x == 0) {
            int n = TILE_ROWS;
            if (p.rows > TILE_ROWS) pdl_wait(), n = *n_rows;
            copy_weights(p, s, n);
        } else if (threadIdx.x == 32) {
            pdl_wait();
            copy_rows(p, s, *n_rows);
        }
    } else {
        more_registers<224>();
        pdl_wait();
        multiply_tiles<Add>(p, s, *n_rows);
    }
}
