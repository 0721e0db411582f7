// Products of eight rows with weights, by warps on their own: what the entries of gemm_warps.cu are
// made of.
//
// A block has TEAMS * GROUPS groups of 16 outputs; SPLIT warps share a team's columns. A warp keeps
// the rows' numbers in some of its columns in registers while it goes through the weights of all
// its groups there, which it has copied into shared memory itself, STAGES groups ahead. So no warp
// waits for another until the sums are added up, in the order of warps.
// See llamagraph/kernels/gemm_warps.py.
#pragma once
#include "warp_shares.cuh"

// sums += the products of a unit from its J-th 64 columns on, with those of the rows from b[J] on.
template <class S, int J>
__device__ __forceinline__ void multiply_columns(float (&sums)[2][4],
                                                 Operand<typename S::Type>& operand,
                                                 const WarpUnit<S::Type::BYTES>& unit,
                                                 const u32 (*b)[8]) {
    u32 a[4][4];
    operand.template get<J>(unit, a);
#pragma unroll
    for (int s = 0; s < 4; s++) multiply(sums[s % 2], a[s], b[J][2 * s], b[J][2 * s + 1]);
    if constexpr (J + 1 < S::PANELS) multiply_columns<S, J + 1>(sums, operand, unit, b);
}

// The same with scales apart: sums[1] are 16 times as large.
template <class S, int J, int First = 0>
__device__ __forceinline__ void multiply_blocks(float (&sums)[2][4],
                                                BlockOperand<typename S::Type>& operand,
                                                const WarpUnit<S::Type::BYTES>& unit,
                                                const u32 (*b)[8], u32 (&a)[4][4]) {
    using O = BlockOperand<typename S::Type>;
    constexpr int NEXT = First + O::SCALED / 16;
    if constexpr (First == 0) operand.template get<J>(unit, a);
    float block[4] = {};
#pragma unroll
    for (int s = First; s < NEXT; s++) multiply(block, a[s], b[J][2 * s], b[J][2 * s + 1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float scale = operand.template scale<J, First>(i);
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) sums[O::high(J, First)][e] += scale * block[e];
    }
    if constexpr (NEXT < 4) multiply_blocks<S, J, NEXT>(sums, operand, unit, b, a);
    else if constexpr (J + 1 < S::PANELS) multiply_blocks<S, J + 1>(sums, operand, unit, b, a);
}

// The products of a share of a group's weights, which is at `weights` in shared memory.
template <class S>
__device__ __forceinline__ void multiply_share(float (&result)[4], const Columns<S>& columns,
                                               u32 weights) {
    float sums[2][4] = {};
    if constexpr (BlockOperand<typename S::Type>::EXISTS) {
        const auto unit = S::copied(weights);
        BlockOperand<typename S::Type> operand;
        operand.begin(unit);
        u32 a[4][4];
        multiply_blocks<S, 0>(sums, operand, unit, columns.b, a);
        u32 taken[4];
        operand.taken(unit, taken);
        float less[4] = {};
        multiply(less, taken, columns.means[0], columns.means[1]);
        if constexpr (BlockOperand<typename S::Type>::LARGE)
            multiply(less, taken, columns.rest[0], columns.rest[1]);
#pragma unroll
        for (int e = 0; e < 4; e++)
            result[e] = operand.factor(e / 2) * (16 * sums[0][e] + sums[1][e]) +
                        operand.of_taken(e / 2) * less[e];
    } else {
#pragma unroll
        for (int i = 0; i < Share<S>::UNITS; i++) {
            const auto unit = S::copied(weights + i * S::BYTES);
            Operand<typename S::Type> operand;
            operand.begin(unit);
            multiply_columns<S, 0>(sums, operand, unit, columns.b + i * S::PANELS);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) result[e] = sums[0][e] + sums[1][e];
    }
}

// Writes the sums of a group, or adds them: (16 outputs, 8 rows).
__device__ __forceinline__ void keep(float* sums, const float (&result)[4], bool add) {
    float2* own = reinterpret_cast<float2*>(sums) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float2 v = make_float2(result[2 * i], result[2 * i + 1]);
        if (add) v.x += own[32 * i].x, v.y += own[32 * i].y;
        own[32 * i] = v;
    }
}

// All that a warp does, for the team's outputs from first_out on; `memory` is its own. Returns how
// many rows there are.
template <class S>
__device__ __forceinline__ int multiply_all(u8* memory, const Part& part, int first_out,
                                            const __half* x, const int* n_rows) {
    using H = Share<S>;
    constexpr int PIECES = H::ROWS_BYTES / 16;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % SPLIT;
    const uint4* rows = reinterpret_cast<const uint4*>(x) + lane;
    const auto rows_at = [&](int share) {
        const int stage = share / SPLIT % H::ROW_STAGES;
        return memory + H::ROWS_AT + stage * H::ROWS_BYTES + lane * 16;
    };
    int next_share = first, next = 0;  // what is to be copied
    const auto copy_next = [&](u8* to) {
        if (next_share < H::N_SHARES) {
            if (next == 0 && next_share != first)
#pragma unroll
                for (int i = 0; i < PIECES; i += 32)
                    copy16(rows_at(next_share) + i * 16, rows + next_share * PIECES + i);
            const size_t group = min((first_out + next / PARTS * 16) / S::TILE_OUTPUTS + S::group(),
                                     (part.n_out - 1) / S::TILE_OUTPUTS);
            const u8* weight = (PARTS > 1 && next % PARTS ? part.second : part.weight) +
                               group * S::N_UNITS * (S::TILE_OUTPUTS * S::Type::BYTES);
#pragma unroll
            for (int i = 0; i < H::UNITS; i++)
                S::copy_unit(to + i * S::BYTES, weight, next_share * H::UNITS + i);
            if (++next == EACH) next = 0, next_share += SPLIT;
        }
        commit_copies();
    };

    constexpr int EARLY = STAGES < EACH ? STAGES : EACH;  // stages without rows
#pragma unroll 1
    for (int i = 0; i < EARLY; i++) copy_next(memory + i * H::BYTES);
    const int n = __ldcg(n_rows);  // see norm.cu
    pdl_wait_and_begin<LATE>();
    uint4 own[PIECES / 32];  // do not wait behind the weights, but come by way of registers
#pragma unroll
    for (int i = 0; i < PIECES; i += 32) own[i / 32] = __ldcg(rows + first * PIECES + i);
#pragma unroll 1
    for (int i = EARLY; i < STAGES; i++) copy_next(memory + i * H::BYTES);
#pragma unroll
    for (int i = 0; i < PIECES; i += 32)
        *reinterpret_cast<uint4*>(rows_at(first) + i * 16) = own[i / 32];

    float* sums = reinterpret_cast<float*>(memory + H::SUMS_AT);
    u8* weights = memory;
#pragma unroll 1
    for (int share = first; share < H::N_SHARES; share += SPLIT) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        Columns<S> columns;
        columns.load(shared_address(rows_at(share)) - lane * 16);
        int each = EACH;  // a loop also where it is one: else registers do not suffice
        asm volatile("" : "+r"(each));
#pragma unroll 1
        for (int group = 0; group < each; group++) {
            wait_for_copies<STAGES - 1>();
            __syncwarp();
            float result[4];
            multiply_share<S>(result, columns, shared_address(weights));
            keep(sums + group * GROUP_SUMS, result, share != first);
            __syncwarp();
            copy_next(weights);
            weights = weights + H::BYTES == memory + H::ROWS_AT ? memory : weights + H::BYTES;
        }
    }
    return n;
}

// Adds up the sums of a team's warps: `put(row, o, totals, old)` is for four rows of an output o;
// old is from `get(row, o)`, which does not wait for them.
template <class S, class Get, class Put>
__device__ __forceinline__ void add_up(const u8* memory, Get get, Put put) {
    constexpr int N = TEAMS * GROUPS * 32;
    const int own = threadIdx.x;
    float4 old = {};
    if (own < N) old = get(own % 2 * 4, own / 2);
    __syncthreads();
    for (int i = own; i < N; i += THREADS) {
        if (i >= THREADS) old = get(i % 2 * 4, i / 2);
        const int group = i / 32, first = group / GROUPS * SPLIT;
        const u8* sums = memory + first * Share<S>::WARP_BYTES + Share<S>::SUMS_AT +
                         (group % GROUPS * PARTS * 32 + i % 32) * 16;
        float4 totals[PARTS] = {};
#pragma unroll
        for (int k = 0; k < SPLIT; k++)
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float4 v = *reinterpret_cast<const float4*>(
                    sums + k * Share<S>::WARP_BYTES + p * GROUP_SUMS * 4);
                totals[p].x += v.x, totals[p].y += v.y, totals[p].z += v.z, totals[p].w += v.w;
            }
        put(i % 2 * 4, i / 2, totals, old);
    }
}

template <class S, bool Add>
__device__ __forceinline__ void product_of_part(const Part& part, int block, const __half* x,
                                                const int* n_rows) {
    extern __shared__ uint4 shared[];
    u8* memory = reinterpret_cast<u8*>(shared);
    const int warp = threadIdx.x / 32, first_out = block * OUTPUTS;
    const int n = multiply_all<S>(memory + warp * Share<S>::WARP_BYTES, part,
                                  first_out + warp / SPLIT * GROUPS * 16, x, n_rows);
    float* out = static_cast<float*>(part.out) + first_out;
    const auto exists = [&](int row, int o) { return row < n && first_out + o < part.n_out; };
    const auto get = [&](int row, int o) {
        float old[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (Add && exists(row + i, o)) old[i] = __ldcg(out + (row + i) * part.n_out + o);
        return make_float4(old[0], old[1], old[2], old[3]);
    };
    add_up<S>(memory, get, [&](int row, int o, const float4* totals, const float4& old) {
        const float4 v = totals[0];
#ifdef ACT
        const float4 u = totals[1];
        const float all[4] = {ACT(v.x) * u.x, ACT(v.y) * u.y, ACT(v.z) * u.z, ACT(v.w) * u.w};
#else
        const float all[4] = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
#endif
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (exists(row + i, o)) {
#ifdef ACT
                store_in_panels(static_cast<__half*>(part.out), TILE_ROWS, row + i, first_out + o,
                                all[i]);
#else
                out[(row + i) * part.n_out + o] = all[i];
#endif
            }
    });
}
