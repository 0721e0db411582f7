// Products of 16 or 32 rows with weights, by warps on their own: what the entries of gemm_warps.cu
// are made of.
//
// A block has TEAMS groups of 16 outputs; SPLIT warps share the units along a group's row, BLOCKS
// blocks the row itself. In a step each warp multiplies one unit of its group, which it has copied
// into shared memory itself, STAGES units ahead, with the rows' columns that all have brought in.
// A warp unpacks a piece of its unit once, for all rows. Sums are added up at the end, in the
// order of blocks and warps. See llamagraph/kernels/gemm_warps.py.
#pragma once
#include "warp_units.cuh"

static_assert(GROUPS == 1, "a team has the outputs of one warp");
constexpr int EIGHTS = TILE_ROWS / 8;  // groups of eight rows
constexpr int STRIDE = 20;             // of a row of 16 sums: a warp's lanes meet different banks
constexpr int SUMS = TILE_ROWS * STRIDE;

// A step of the weight S: a unit of each warp's outputs, and the rows' columns.
template <class S>
struct Step {
    static constexpr int N = (S::N_UNITS + BLOCKS * SPLIT - 1) / (BLOCKS * SPLIT);
    static constexpr int ROWS_BYTES = S::UNIT_WEIGHTS * TILE_ROWS * 2;  // of a unit's columns
    static constexpr int STAGE_BYTES = WARPS * PARTS * S::BYTES;
    static constexpr int ROW_STAGES = N < STAGES ? N : STAGES;
    static constexpr int UNITS_AT = ROW_STAGES * SPLIT * ROWS_BYTES;
    static_assert(STAGES > 1 || N == 1, "no stage is filled while it is read");
};

// sums += a unit, from its J-th 64 columns on; `rows` are the columns of the rows in shared memory.
template <class S, int J>
__device__ __forceinline__ void multiply_columns(float (&sums)[PARTS][EIGHTS][4],
                                                 const Operand<typename S::Type> (&operand)[PARTS],
                                                 const WarpUnit<S::Type::BYTES> (&unit)[PARTS],
                                                 u32 rows) {
    const int lane = threadIdx.x % 32;
    u32 a[PARTS][4][4];
#pragma unroll
    for (int p = 0; p < PARTS; p++) operand[p].template get<J>(unit[p], a[p]);
#pragma unroll
    for (int r = 0; r < EIGHTS; r++) {
        const u32 row = rows + ((J * EIGHTS + r) * 8 + lane % 8) * 128;
#pragma unroll
        for (int half = 0; half < 2; half++) {  // 32 columns
            u32 b[4];
            load_matrices(b, row + ((4 * half + lane / 8) ^ lane % 8) * 16);
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                multiply(sums[p][r], a[p][2 * half], b[0], b[1]);
                multiply(sums[p][r], a[p][2 * half + 1], b[2], b[3]);
            }
        }
    }
    if constexpr (J + 1 < S::PANELS) multiply_columns<S, J + 1>(sums, operand, unit, rows);
}

template <class S>
__device__ __forceinline__ void multiply_unit(float (&sums)[PARTS][EIGHTS][4],
                                              const WarpUnit<S::Type::BYTES> (&unit)[PARTS],
                                              u32 rows) {
    Operand<typename S::Type> operand[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) operand[p].begin(unit[p]);
    multiply_columns<S, 0>(sums, operand, unit, rows);
}

// Where a block's rows come from: panels (N_IN / 64, TILE_ROWS, 64), a step's at a time.
template <class S>
struct PanelRows {
    const __half* x;

    // `n` units from `first` on are one run; `copy(to, from)` moves 16 bytes of it.
    template <int Most, class Copy>
    __device__ __forceinline__ void bring(u8* to, int first, int n, Copy copy) const {
        constexpr int PIECES = S::PANELS * TILE_ROWS * 8;
        const uint4* from = reinterpret_cast<const uint4*>(x) + static_cast<size_t>(first) * PIECES;
#pragma unroll
        for (int i = 0; i < Most * PIECES; i += THREADS)
            if (i + static_cast<int>(threadIdx.x) < n * PIECES)
                copy(to + (i + threadIdx.x) * 16, from + i + threadIdx.x);
    }

    // The first do not wait behind the weights, but come by way of registers.
    __device__ __forceinline__ void begin(u8* to, int first, int n) const {
        constexpr int MOST = Step<S>::ROW_STAGES * SPLIT;
        bring<MOST>(to, first, min(n, MOST), [](u8* to, const uint4* from) {
            *reinterpret_cast<uint4*>(to) = __ldcg(from);
        });
    }
    __device__ __forceinline__ void next(u8* to, int first, int n) const {
        if (n > 0)
            bring<SPLIT>(to, first, min(n, SPLIT), [](u8* to, const uint4* from) {
                copy16(to, from);
            });
    }
};

// The products of the block's outputs, from first_out on, with its share of the columns.
template <class S>
__device__ __forceinline__ void multiply_share(float (&sums)[PARTS][EIGHTS][4], const Part& part,
                                               int first_out, const __half* x) {
    extern __shared__ uint4 shared[];
    u8* memory = reinterpret_cast<u8*>(shared);
    const int warp = threadIdx.x / 32, rank = blockIdx.x % BLOCKS;
    const int first = rank * S::N_UNITS / BLOCKS, end = (rank + 1) * S::N_UNITS / BLOCKS;
    const int own = first + warp % SPLIT, n_steps = ceil_div(end - first, SPLIT);
    const size_t group = min((first_out + warp / SPLIT * 16) / S::TILE_OUTPUTS + S::group(),
                             (part.n_out - 1) / S::TILE_OUTPUTS);
    const size_t stored = group * S::N_UNITS * (S::TILE_OUTPUTS * S::Type::BYTES);
    const u8* weights[2] = {part.weight + stored, part.second + stored};
    const auto rows_at = [&](int step) {
        return memory + step % Step<S>::ROW_STAGES * SPLIT * Step<S>::ROWS_BYTES;
    };
    const auto unit_at = [&](int step, int p) {
        return memory + Step<S>::UNITS_AT + step % STAGES * Step<S>::STAGE_BYTES +
               (warp * PARTS + p) * S::BYTES;
    };
    const auto copy_units = [&](int step) {
        const int unit = own + step * SPLIT;
        if (unit < end)
#pragma unroll
            for (int p = 0; p < PARTS; p++) S::copy_unit(unit_at(step, p), weights[p], unit);
        commit_copies();
    };

#pragma unroll 1
    for (int step = 0; step < STAGES; step++) copy_units(step);
    const PanelRows<S> in = {x};
    pdl_wait_and_begin<LATE>();
    in.begin(memory, first, end - first);
#pragma unroll 1
    for (int step = 0; step < n_steps; step++) {
        if (step == 0) wait_for_copies<STAGES - 1>();
        else wait_for_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
        __syncthreads();
        if (step > 0) {  // the stage before is free
            const int next = step + STAGES - 1;
            in.next(rows_at(next), first + next * SPLIT, end - first - next * SPLIT);
            copy_units(next);
        }
        if (own + step * SPLIT >= end) continue;
        WarpUnit<S::Type::BYTES> unit[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++) unit[p] = S::copied(shared_address(unit_at(step, p)));
        multiply_unit<S>(sums, unit,
                         shared_address(rows_at(step)) + warp % SPLIT * Step<S>::ROWS_BYTES);
    }
}

// Four sums of the cluster's block `rank`, at a place that is named as in this one.
__device__ __forceinline__ float4 load_sums(u32 at, int rank) {
    float4 v;
    if constexpr (BLOCKS > 1)
        asm volatile("{\n"
                     ".reg .b32 remote;\n"
                     "mapa.shared::cluster.u32 remote, %4, %5;\n"
                     "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
                     "}" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(rank)
                     : "memory");
    else
        v = load_shared(at);
    return v;
}

// Adds up the sums of a group's warps, and of the cluster's blocks, of which each does some:
// `put(row, o, totals, old)` is for four outputs from o on; old is from `get(row, o)`, which does
// not wait for them.
template <class Get, class Put>
__device__ __forceinline__ void add_up(const float (&sums)[PARTS][EIGHTS][4], Get get, Put put) {
    extern __shared__ uint4 shared[];
    constexpr int SHARE = TEAMS * TILE_ROWS * 4 / BLOCKS;
    const int lane = threadIdx.x % 32, rank = blockIdx.x % BLOCKS;
    const auto output = [](int i) { return i / 4 % TEAMS * 16 + i % 4 * 4; };
    const auto row_of = [](int i) { return i / (4 * TEAMS); };
    const int begin = rank * SHARE + threadIdx.x, end = (rank + 1) * SHARE;
    float4 old = {};
    if (begin < end) old = get(row_of(begin), output(begin));
    const auto place = [](int warp, int p) { return (warp * PARTS + p) * SUMS; };
    float* own = reinterpret_cast<float*>(shared) + place(threadIdx.x / 32, 0);
    __syncthreads();  // no stage is read any more
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int r = 0; r < EIGHTS; r++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[p * SUMS + (8 * r + lane % 4 * 2 + e % 2) * STRIDE + lane / 4 + e / 2 * 8] =
                    sums[p][r][e];
    if constexpr (BLOCKS > 1) cluster_barrier();
    else __syncthreads();
    const u32 first = shared_address(shared);
    for (int i = begin; i < end; i += THREADS) {
        const int quad = i % 4, team = i / 4 % TEAMS, row = row_of(i);
        if (i >= begin + THREADS) old = get(row, output(i));
        float4 totals[PARTS] = {};
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int k = 0; k < SPLIT; k++)
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    const int at = place(team * SPLIT + k, p) + row * STRIDE + quad * 4;
                    const float4 v = load_sums(first + at * 4, block);
                    totals[p].x += v.x, totals[p].y += v.y;
                    totals[p].z += v.z, totals[p].w += v.w;
                }
        put(row, output(i), totals, old);
    }
    if constexpr (BLOCKS > 1) cluster_barrier();  // others may still read this block's sums
}

// Four numbers from `p` on, of which `n` exist.
__device__ __forceinline__ bool whole(const float* p, int n) {
    return n >= 4 && reinterpret_cast<size_t>(p) % 16 == 0;
}
__device__ __forceinline__ float4 get_four(const float* p, int n) {
    if (whole(p, n)) return load_activations(p);
    float all[4] = {};
    for (int i = 0; i < min(n, 4); i++) all[i] = __ldcg(p + i);
    return make_float4(all[0], all[1], all[2], all[3]);
}
__device__ __forceinline__ void put_four(float* p, int n, const float4& v) {
    if (whole(p, n)) {
        *reinterpret_cast<float4*>(p) = v;
        return;
    }
    const float all[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < min(n, 4); i++) p[i] = all[i];
}

template <class S, bool Add>
__device__ __forceinline__ void product_of_part(const Part& part, int block, const __half* x,
                                                const int* n_rows) {
    float sums[PARTS][EIGHTS][4] = {};
    const int first_out = block * OUTPUTS, n = __ldcg(n_rows);  // see norm.cu
    multiply_share<S>(sums, part, first_out, x);
    float* out = static_cast<float*>(part.out);
    const auto at = [&](int row, int o) { return out + static_cast<size_t>(row) * part.n_out + o; };
    const auto get = [&](int row, int o) {
        o += first_out;
        return Add && row < n && o < part.n_out ? get_four(at(row, o), part.n_out - o) : float4{};
    };
    add_up(sums, get, [&](int row, int o, const float4* totals, const float4& old) {
        o += first_out;
        if (row >= n || o >= part.n_out) return;
        const float4 v = totals[0];
#ifdef ACT
        const float4 u = totals[1];
        store_in_panels(static_cast<__half*>(part.out), TILE_ROWS, row, o,
                        make_float4(ACT(v.x) * u.x, ACT(v.y) * u.y, ACT(v.z) * u.z, ACT(v.w) * u.w));
#else
        put_four(at(row, o), part.n_out - o,
                 make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w));
#endif
    });
}
