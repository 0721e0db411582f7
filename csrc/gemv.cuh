// A weight times one row of activations: what the entries of gemv.cu are made of.
//
// Every block brings the row of N_IN numbers into shared memory: as int8 with a scale per 32 where
// weights are integers, as floats where they are. Its warps are TEAMS x PARTS x SPLIT: a team has a
// group of RW rows, a part one of the weights that meet in a row's result (gate and up), a split a
// share of the tiles along the row. Lanes own units (tiles.cuh), so the only exchange is the sum at
// the end. Blocks take groups in turn. Knows no layer; kernels/gemv.py chooses the numbers.
//
// The order is the point: a warp's first weights are requested before the kernel waits for the one
// before it, all activations before the first is used, and the next tile as soon as the last has
// left its registers, before its sums are exchanged. 16 warps keep enough on the way.
#pragma once
#include "quants.cuh"

constexpr int WARPS = TEAMS * PARTS * SPLIT, THREADS = WARPS * 32;
constexpr int MOST_THREADS = 512;  // of 128 registers each, which fill a multiprocessor

// ---- The row in shared memory -------------------------------------------------------------------

// What goes with 32 activations as integers: their scale, that times their sum, and the sums of
// integers 0..15 and 16..31, which serve the weights' minima and offsets.
struct __align__(16) Int8Scale {
    float d, d_sum;
    int sum0, sum1;
};

// Of 8 blocks the integers, 32 bytes each, then the scales. 16 bytes of space behind the integers
// of 4 blocks, and behind 32 floats: lanes that own neighbouring units of a row then read from
// different banks.
constexpr int EIGHT_BLOCKS = 2 * 144 + 8 * sizeof(Int8Scale);
__device__ __forceinline__ int int8_at(unsigned block) {
    return block / 8 * EIGHT_BLOCKS + block % 8 * 32 + block % 8 / 4 * 16;
}
__device__ __forceinline__ int scale_at(unsigned block) {
    return block / 8 * EIGHT_BLOCKS + 2 * 144 + block % 8 * sizeof(Int8Scale);
}
__device__ __forceinline__ int float_at(int k) { return k * 4 + k / 32 * 16; }

// Quantises a thread's fours from k and k + 8 on, side by side; four neighbouring lanes share a
// block. All lanes take part.
template <bool Sums>
__device__ __forceinline__ void store_int8(char* row, int k, const float4& v, const float4& w,
                                           bool inside) {
    const float f[8] = {v.x, v.y, v.z, v.w, w.x, w.y, w.z, w.w};
    float amax = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(f[j]));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const float inverse = amax > 1e-30f ? 127.f / amax : 0.f, d = amax * (1.f / 127.f);
    u32 words[2] = {0, 0};
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int q = __float2int_rn(f[j] * inverse);
        words[j / 4] |= (q & 0xff) << (j % 4 * 8);
        sum += q;
    }
    int half = 0, other = 0;
    if constexpr (Sums) {
        half = sum + __shfl_xor_sync(~0u, sum, 1);
        other = __shfl_xor_sync(~0u, half, 2);
    }
    if (!inside) return;
    const int block = k / 32, part = threadIdx.x % 4;
    *reinterpret_cast<uint2*>(row + int8_at(block) + part * 8) = make_uint2(words[0], words[1]);
    // Each lane a member of the Int8Scale.
    const float scale = part == 0 ? d : d * (half + other);
    const int member = part < 2 ? __float_as_int(scale) : part == 2 ? other : half;
    if (Sums || part == 0) *reinterpret_cast<int*>(row + scale_at(block) + part * 4) = member;
}

// A row of N_IN floats on its way to shared memory, two fours a thread at a time, as weights of a
// type meet it; where `Norm` times the weight of a norm. Warps load whole sectors and meet no bank
// twice. `request` comes before the kernel waits, `store` after. A thread's registers hold MOST
// steps beside a unit of weights.
template <class Type, bool Norm>
struct Row {
    static constexpr int STEP = THREADS * 8, STEPS = (N_IN + STEP - 1) / STEP;
    static constexpr int MOST = Norm ? 2 : 4, FOURS = 2 * (STEPS < MOST ? STEPS : MOST);
    float4 norm[Norm ? FOURS : 1];

    // Where a thread's four is. For integers two lanes share 16 floats, turn by turn: sectors are
    // read whole, and four lanes still have a block.
    static __device__ __forceinline__ int place(int four) {
        const int t = threadIdx.x, first = four / 2 * STEP;
        return Type::FLOAT ? first + t / 32 * 256 + four % 2 * 128 + t % 32 * 4
                           : first + t / 2 * 16 + four % 2 * 8 + t % 2 * 4;
    }
    // Known when compiling where no step goes beyond the row: that saves a branch a load.
    static __device__ __forceinline__ bool inside(int k) {
        return N_IN % (FOURS / 2 * STEP) == 0 || k < N_IN;
    }
    __device__ __forceinline__ void request(const float* weight, int first = 0) {
        if constexpr (Norm) {
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                if (const int k = place(first + i); inside(k))
                    norm[i] = *reinterpret_cast<const float4*>(weight + k);
        }
    }

    // Puts x, or x * weight, into `row`; its return is a barrier. The factor that is still missing
    // is the same for the whole row, and so are the integers with or without it: with `Norm` the
    // result is that factor, 1 / sqrt(mean(x^2) + eps), else 1.
    __device__ __forceinline__ float store(char* row, const float* x, const float* weight,
                                           float eps) {
        __shared__ float sums[WARPS];
        float squares = 0;
#pragma unroll 1
        for (int first = 0; first < 2 * STEPS; first += FOURS) {
            float4 v[FOURS];
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                const int k = place(first + i);
                v[i] = inside(k) ? load_activations(x + k) : make_float4(0, 0, 0, 0);
            }
            if (first > 0) request(weight, first);
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                const int k = place(first + i);
                if constexpr (Norm) {
                    const float4 f = v[i], g = norm[i];
                    squares += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
                    if (inside(k)) v[i] = make_float4(f.x * g.x, f.y * g.y, f.z * g.z, f.w * g.w);
                }
                if constexpr (Type::FLOAT) {
                    if (inside(k)) *reinterpret_cast<float4*>(row + float_at(k)) = v[i];
                } else if (i % 2) {
                    store_int8<Type::OFFSET != 0 || Type::MINS != 0>(row, k - 8, v[i - 1], v[i],
                                                                     inside(k));
                }
            }
        }
        if constexpr (Norm) return rsqrtf(block_sum(squares, sums) / N_IN + eps);
        __syncthreads();
        return 1;
    }
};

// ---- Products -----------------------------------------------------------------------------------

// A unit's weights times the activations that they meet; `unit` counts along the row.
template <class Type, int Blocks>
__device__ __forceinline__ float dot(const RegisterUnit<Type::BYTES>& u, const char* row,
                                     int unit) {
    if constexpr (Type::FLOAT) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < Blocks; i++) {
            float w[32];
            values<Type>(u, i, w);
            const char* at = row + float_at((unit * Blocks + i) * 32);
#pragma unroll
            for (int p = 0; p < 8; p++) {
                const float4 x = reinterpret_cast<const float4*>(at)[p];
                sum.x += w[4 * p] * x.x, sum.y += w[4 * p + 1] * x.y;
                sum.z += w[4 * p + 2] * x.z, sum.w += w[4 * p + 3] * x.w;
            }
        }
        return (sum.x + sum.y) + (sum.z + sum.w);
    } else {
        static_assert(8 % Blocks == 0, "a unit's scales are side by side");
        const char* integers = row + int8_at(unit * Blocks);
        const Int8Scale* scales =
            reinterpret_cast<const Int8Scale*>(row + scale_at(unit * Blocks));
        float sum = 0, minima = 0;
#pragma unroll
        for (int i = 0; i < Blocks; i++) {
            const Block b = Type::block(u, i);
            const Int8Scale x = scales[i];
            const int4* words = reinterpret_cast<const int4*>(integers + int8_at(i));
            const int4 first = words[0], last = words[1];
            const int q[8] = {first.x, first.z, first.y, first.w,
                              last.x,  last.z,  last.y,  last.w};
            int low = 0, high = 0;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                low = Type::SIGNED ? dot4_signed(b.q[c], q[c], low) : dot4(b.q[c], q[c], low);
                high = Type::SIGNED ? dot4_signed(b.q[4 + c], q[4 + c], high)
                                    : dot4(b.q[4 + c], q[4 + c], high);
            }
            if constexpr (Type::OFFSET != 0)
                low -= Type::OFFSET * x.sum0, high -= Type::OFFSET * x.sum1;
            sum += x.d * b.d * static_cast<float>(low * b.s0 + high * b.s1);
            if constexpr (Type::MINS == 1) minima += b.m0 * x.d_sum;
            if constexpr (Type::MINS == 2) minima += x.d * (b.m0 * x.sum0 + b.m1 * x.sum1);
        }
        const float2 scale = Type::scale(u);
        return scale.x * sum - scale.y * minima;
    }
}

// ---- Tiles --------------------------------------------------------------------------------------

// The first tile of a group of rows.
template <class Type, int UnitWeights, int TileRows>
__device__ __forceinline__ const u8* group_at(const u8* weight, int group) {
    return weight + static_cast<size_t>(group) * (N_IN / UnitWeights * TileRows * Type::BYTES);
}

// Runs over groups of rows, shared among the blocks blockIdx.x = first_block, .. of n_blocks.
// `group_of(g, part)` finds the first tile of group g; `row_in()` brings the activations in and
// returns the factor of all sums; `before(g, lane)` requests what a result needs beside its sums,
// and `after(g, lane, sums, factor, requested)` stores the result of the group's row `lane`.
template <class Type, int UnitWeights, int TileRows, class GroupOf, class RowIn, class Before,
          class After>
__device__ __forceinline__ void for_groups(int n_groups, int first_block, int n_blocks,
                                           const char* row, GroupOf group_of, RowIn row_in,
                                           Before before, After after) {
    constexpr int N_UNITS = N_IN / UnitWeights, PER_TILE = 32 / TileRows;
    constexpr int N_TILES = (N_UNITS + PER_TILE - 1) / PER_TILE;
    constexpr int LAST = N_UNITS - (N_TILES - 1) * PER_TILE;  // units of the last tile
    __shared__ float partial[2][TEAMS][PARTS][SPLIT][TileRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team = warp / (PARTS * SPLIT), part = warp / SPLIT % PARTS, split = warp % SPLIT;
    const int start = (blockIdx.x - first_block) * TEAMS + team, stride = n_blocks * TEAMS;

    auto lanes_of = [&](int tile) {
        int lanes = LAST == PER_TILE || tile < N_TILES - 1 ? 32 : LAST * TileRows;
        if (LAST < PER_TILE) asm("" : "+r"(lanes));  // or there would be a path for either
        return lanes;
    };
    RegisterUnit<Type::BYTES> unit;
    auto request = [&](int g, int tile) {
        if (tile >= N_TILES) tile = split, g += stride;
        if (g >= n_groups || tile >= N_TILES || lane >= lanes_of(tile)) return;
        unit.load(group_of(g, part) + tile * (PER_TILE * TileRows * Type::BYTES), lanes_of(tile),
                  lane);
    };

    request(start, split);
    const float factor = row_in();
    int turn = 0;
    for (int g = start; g < n_groups; g += stride, turn ^= 1) {
        const bool finishes = part == 0 && split == 0 && lane < TileRows;
        float requested = 0, sum = 0;
        if (finishes) requested = before(g, lane);
        for (int tile = split; tile < N_TILES; tile += SPLIT) {
            if (lane < lanes_of(tile))
                sum += dot<Type, UnitWeights / 32>(unit, row, tile * PER_TILE + lane / TileRows);
            request(g, tile + SPLIT);
        }
#pragma unroll
        for (int step = TileRows; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane < TileRows) partial[turn][team][part][split][lane] = sum;
        if constexpr (PARTS * SPLIT > 1) barrier(1 + team, PARTS * SPLIT * 32);
        else __syncwarp();
        if (finishes) {
            float sums[PARTS] = {};
#pragma unroll
            for (int p = 0; p < PARTS; p++)
#pragma unroll
                for (int s = 0; s < SPLIT; s++) sums[p] += partial[turn][team][p][s][lane];
            after(g, lane, sums, factor, requested);
        }
    }
}
