// What the two warp groups do with the stages of gemm_hopper.cuh: sums of a tile, the sums of a
// cluster's blocks, results; and the product that is made of all. Knows no entry.
#pragma once
#include "gemm_hopper.cuh"

// Activations of what no register is left for but the sums.
namespace quick {
// The division without its slow path, which calls a function: 0 where the divisor is beyond 2^126.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + expf(-x)); }
using ::gelu;
}  // namespace quick

// What a warp multiplies: 16 outputs of a stage, eight from either place on, with all rows.
struct Multiplier {
    static constexpr int EIGHTS = TILE_ROWS / 8;  // groups of eight rows, of which blocks have shares
    static constexpr int SHARES = SPLIT < EIGHTS ? SPLIT : EIGHTS, SHARE = EIGHTS / SHARES;
    static_assert((SPLIT - 1) * SHARE * MULTIPLIERS * 16 <= RINGS_AT, "room for others' sums");

    int first[2];
    float sums[EIGHTS][4];  // as of `multiply_rows`
    u32 a[AHEAD][4][4];  // operands of a step, or of two in turn
    Barrier before;      // gives back the rows of the step before; none at address 0

    // Columns 64J on of a unit, as the Turn-th step.
    template <int Turn, int J, class Type, class Unit>
    __device__ __forceinline__ void step(const Operand<Type>& operand, const Unit& unit,
                                         Shared& s) {
        auto& a = this->a[Turn % AHEAD];
        operand.template get<J>(unit, a);
        s.rows.wait_full();
        const u64 rows = tile_at(s.rows_address());
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++) multiply_rows(sums, a[k], rows + 2 * k);
        products_commit();
        products_wait<AHEAD - 1>();
        if (AHEAD == 1) before = s.rows.empty();
        give_back(s.rows.empty());
        s.rows.next();
    }

    // The rows whose products have ended have been read; those of `next` are the next.
    __device__ __forceinline__ void give_back(Barrier next) {
        if (before.at && threadIdx.x % 32 == 0) before.arrive();
        before = AHEAD == 1 ? Barrier{0} : next;
    }

    // All the steps of a unit, beginning with the Turn-th step.
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

    // Sums of the block's columns.
    template <class S>
    __device__ __forceinline__ void multiply(int n_in, Shared& s) {
        const int end = S::end_unit(n_in);
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; i++) sums[i / 4][i % 4] = 0;
        before = {0};
        for (int at = S::first_unit(n_in); at < end; at += S::UNITS) {
            const int units = min(S::UNITS, end - at), lanes = units * S::TILE_OUTPUTS;
            s.weights.wait_full();
            if constexpr (S::UNIT_WEIGHTS == STEP) {
                int u = 0;
                for (; u + 1 < units; u += 2)
                    unit<S, 0>(s, lanes, u), unit<S, 1>(s, lanes, u + 1);
                if (u < units) {
                    unit<S, 0>(s, lanes, u);
                    products_wait<0>();  // the next stage begins with a[0] again
                }
            } else {
                for (int u = 0; u < units; u++) unit<S, 0>(s, lanes, u);
            }
            s.weights.empty().arrive();
            s.weights.next();
        }
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(sums[i / 4][i % 4])::"memory");
        give_back({0});
    }

    // Sums of all blocks of the cluster, of those eights of rows that are this block's. They lie
    // where the stages were, once all blocks are done with those.
    __device__ __forceinline__ void add_up(Shared& s) {
        const int rank = blockIdx.x % SPLIT;
        const auto place = [&](int from, int to, int i) {  // where `to` has four sums of `from`
            const int slot = (from - (from > to)) * SHARE + i;
            return s.address + (slot * MULTIPLIERS + threadIdx.x - 128) * 16;
        };
#pragma unroll
        for (int other = 0; other < SPLIT; other++)
            if (other != rank) s.free.arrive_warp_at(other);
        s.free.wait_for_others(s.tile % 2);
#pragma unroll
        for (int to = 0; to < SHARES; to++)
#pragma unroll
            for (int i = 0; i < SHARE; i++) {
                const float* own = sums[to * SHARE + i];
                if (to != rank)
                    store_remote(place(rank, to, i), to,
                                 make_float4(own[0], own[1], own[2], own[3]), s.left);
            }
        if (threadIdx.x == 128)
            s.left.arrive_expecting(rank < SHARES ? (SPLIT - 1) * SHARE * MULTIPLIERS * 16 : 0);
        s.left.wait_for_others(s.tile++ % 2);
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            if (!owns(j)) continue;
            const float4 own = make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
            float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int from = 0; from < SPLIT; from++) {
                const float4 v = from == rank ? own : load_shared(place(from, rank, j % SHARE));
                total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
            }
            sums[j][0] = total.x, sums[j][1] = total.y, sums[j][2] = total.z, sums[j][3] = total.w;
        }
        fence_for_products();  // copies will write there again
        s.read.arrive();
    }

    // Whether the results of the j-th eight rows are this block's to write.
    static __device__ __forceinline__ bool owns(int j) {
        return SPLIT == 1 || blockIdx.x % SPLIT == j / SHARE;
    }

    // The lane's results: outputs o and o + 8 of rows `row` and `row` + 1, and of every eighth on.
    template <bool Add>
    __device__ __forceinline__ void write(const Part& part, int row, int o, int n) const {
        float* to = static_cast<float*>(part.out) + static_cast<size_t>(row) * part.n_out + o;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (owns(j) && row + 8 * j + e < n && o + 8 * i < part.n_out)
                        put<Add>(to + static_cast<size_t>(8 * j + e) * part.n_out + 8 * i,
                                 sums[j][2 * i + e]);
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
        for (int j = 0; j < EIGHTS; j++) {
            if (!owns(j)) continue;
            float v[2];
#pragma unroll
            for (int e = 0; e < 2; e++) v[e] = quick::ACT(sums[j][e]) * sums[j][2 + e];
            const float other = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
            const u32 both = odd ? pack_limited(other, v[1]) : pack_limited(v[0], other);
            if (own + 8 * j < n && o < part.n_out) to[8 * j * 32] = both;
        }
    }
#endif
};

template <class S, bool Add>
__device__ __forceinline__ void multiply_tile(const Problem& p, Shared& s, const Part& part,
                                              int first_row, int first_out, int n) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const int row = first_row + lane % 4 * 2;
    Multiplier m;
#ifdef ACT
    m.first[0] = 8 * warp, m.first[1] = OUTPUTS / 2 + 8 * warp;
#else
    m.first[0] = 16 * warp, m.first[1] = 16 * warp + 8;
#endif
    const int out = first_out + m.first[0] + lane / 4;
    m.template multiply<S>(p.n_in, s);
    if constexpr (SPLIT > 1) m.add_up(s);
#ifdef ACT
    m.write_gated(part, p.rows, row, out, n);
#else
    m.template write<Add>(part, row, out, n);
#endif
}

template <bool Add>
__device__ __forceinline__ void multiply_tiles(const Problem& p, Shared s, int n) {
    for_tiles(p, n, [&](auto stored, const Part& part, int first_row, int first_out) {
        using S = decltype(stored);
        multiply_tile<S, Add>(p, s, part, first_row, first_out, n);
    }, [] {});
}

template <bool Add>
__device__ __forceinline__ void product(const Problem& p, const int* n_rows) {
    extern __shared__ u8 memory[];
    Shared s(memory);
    pdl_launch_dependents();
    if (threadIdx.x == 0) s.init();
    if (SPLIT > 1)
        cluster_barrier();
    else
        __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
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
        take_registers<REGISTERS>();
        pdl_wait();
        multiply_tiles<Add>(p, s, *n_rows);
    }
}
