// Operands of eight rows that stay the integers which are stored, unpacked by a mask: see
// warp_columns.cuh. Knows no kernel.
//
// An integer q in the lowest bits of a half is q * 2^-24, in bits 4 on q * 2^-20: numbers below the
// smallest normal one, which tensor cores take as they are. The columns that share a scale are
// summed up from zero; the sum is scaled, in F32. What is taken out of each weight, a minimum or
// an offset times the scale, meets the means of 16 columns of rows: the same for all outputs.
#pragma once
#include "hopper_weights.cuh"

// `begin` and `get` as of an Operand, but place 8h + 2t + e of 16 columns has column 4t + h + 2e.
// SCALED columns share a scale, an integer: `scale<J, S>(i)` is for the products of a[S], of the
// i-th eight outputs; `high(J, S)` tells whether these are of the higher bits, 16 times as large.
// All is to be multiplied by `factor(i)`. `taken` are numbers for each 16 columns, as an operand;
// their products with the means are to be added `of_taken(i)` times. With LARGE that is much more than
// what is left where the columns' numbers are of one sign: the means must not be rounded to halves.
template <class Type>
struct BlockOperand {
    static constexpr bool EXISTS = false;
};

constexpr float MEAN_OF = 16;

// Constants that the compiler does not see: an instruction has room for one that it does see.
__constant__ u32 float_2_to_23 = 0x4b000000, two_to[] = {1u << 24, 1u << 26, 1u << 28};

// Byte I of a word, less Offset, as a float: exact.
template <int I, int Offset = 0>
__device__ __forceinline__ float float_of_byte(u32 word) {
    return __uint_as_float(__byte_perm(word, float_2_to_23, 0x7540 | I)) - (8388608.f + Offset);
}

// word >> (8 - 2 * I) by way of a product: shifts and masks share a pipe, which has enough to do.
template <int I = 0>
__device__ __forceinline__ u32 shifted(u32 word) {
    u32 v;
    asm("{.reg .b32 low; .reg .b64 both; mul.wide.u32 both, %1, %2; mov.b64 {low, %0}, both;}"
        : "=r"(v) : "r"(word), "r"(two_to[I]));
    return v;
}

// A half for each of two bytes of a word, 0 and 2 or 1 and 3: the bits from 0 on, or those from 4
// on where they are.
template <int H>
__device__ __forceinline__ u32 low_bits(u32 word) {
    return (H ? shifted(word) : word) & 0x000f000f;
}
template <int H>
__device__ __forceinline__ u32 high_bits(u32 word) {
    return (H ? shifted(word) : word) & 0x00f000f0;
}

template <int UnitWeights>
struct BlockOperand<Q4_K<UnitWeights>> {
    static constexpr bool EXISTS = true, LARGE = false;
    static constexpr int SCALED = 32;
    u32 s[2][2], minima[2][2];
    float d[2], dmin[2];

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 header = u.rows[i].plane(0);
            PackedScales packed;
            packed.read(header);
            const float2 both = half2_bits(header.x);
            d[i] = both.x * 1048576.f, dmin[i] = both.y * -MEAN_OF;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                s[i][k] = packed.s[k];
                // Block 4k + t, twice: each has two means.
                const u32 m = __byte_perm(packed.m[k], 0x64646464, t * 0x0101 + 0x4040);
                minima[i][k] = add2(m, 0xe400 * BOTH);
            }
        }
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) {
        u32 q[4];
        u.load(1 + 2 * J, q);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a[k / 2][k % 2] = low_bits<0>(q[k]), a[k / 2][2 + k % 2] = low_bits<1>(q[k]);
            a[2 + k / 2][k % 2] = high_bits<0>(q[k]), a[2 + k / 2][2 + k % 2] = high_bits<1>(q[k]);
        }
    }
    template <int J, int S>
    __device__ __forceinline__ float scale(int i) const {
        return float_of_byte<J % 2 * 2 + S / 2>(s[i][J / 2]);
    }
    static constexpr bool high(int, int s) { return s >= 2; }
    __device__ __forceinline__ float factor(int i) const { return d[i]; }
    template <class Unit>
    __device__ __forceinline__ void taken(const Unit&, u32 (&a)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; k++) a[k] = minima[k % 2][k / 2];
    }
    __device__ __forceinline__ float of_taken(int i) const { return dmin[i]; }
};

template <int UnitWeights>
struct BlockOperand<Q6_K<UnitWeights>> {
    static constexpr bool EXISTS = true, LARGE = true;
    static constexpr int SCALED = 16;
    u32 s[2];  // of 64 columns, with 128 added
    float d[2];
    u32 low[2][4], top[4];  // of 128 columns

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            d[i] = half_bits(u.rows[i].word(52)) * 1048576.f;
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) {
        if constexpr (J % 2 == 0) {
            u.load(J * 2, low[0]);
            u.load(J * 2 + 2, low[1]);
            u.load(8 + J, top);
        }
        for (int i = 0; i < 2; i++) s[i] = u.rows[i].word(48 + J) ^ 0x80808080;
#pragma unroll
        for (int k = 0; k < 4; k++)  // 16 columns each
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 q = low[k / 2][k % 2 * 2 + i], two = top[k % 2 * 2 + i];
                const u32 even = k < 2 ? two << 4 : two << 2;
                const u32 odd = k < 2 ? shifted<2>(two) : shifted<1>(two);
                if constexpr (J % 2 == 0) {
                    a[k][i] = low_bits<0>(q) | even & 0x00300030;
                    a[k][2 + i] = low_bits<1>(q) | odd & 0x00300030;
                } else {
                    a[k][i] = high_bits<0>(q) | even & 0x03000300;
                    a[k][2 + i] = high_bits<1>(q) | odd & 0x03000300;
                }
            }
    }
    template <int J, int S>
    __device__ __forceinline__ float scale(int i) const {
        return float_of_byte<S, 128>(s[i]);
    }
    static constexpr bool high(int j, int) { return j % 2; }
    __device__ __forceinline__ float factor(int i) const { return d[i]; }
    template <class Unit>
    __device__ __forceinline__ void taken(const Unit& u, u32 (&a)[4]) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 word = u.rows[k % 2].word(48 + k / 2 * 2 + t / 2) ^ 0x80808080;
            a[k] = add2(__byte_perm(word, 0x64646464, t % 2 ? 0x4342 : 0x4140), 0xe480 * BOTH);
        }
    }
    __device__ __forceinline__ float of_taken(int i) const {
        return d[i] * (-32 * MEAN_OF / 1048576.f);
    }
};
