// Operands whose scales are applied to the sums: of few rows a warp has few sums, and unpacking a
// weight is a mask and one multiplication. Types that gain nothing are as in hopper_weights.cuh.
//
// An integer q in the lowest bits of a half is q * 2^-24, in bits 4 on q * 2^-20: numbers below the
// smallest normal one, which the arithmetic of halves takes as they are. Knows no kernel.
#pragma once
#include "hopper_weights.cuh"

// `begin` and `get` as of an Operand; the sums of a unit's columns are times `scale`, by rows.
template <class Type>
struct ScaledOperand {
    static constexpr bool EXISTS = false;
};

constexpr u32 half_bits_twice(float power_of_2) {  // of a normal half
    u32 exponent = 15;
    for (; power_of_2 >= 2; power_of_2 /= 2) exponent++;
    for (; power_of_2 < 1; power_of_2 *= 2) exponent--;
    return (exponent << 10) * BOTH;
}

// Weights are (d * s * q - dmin * m): s * q - (dmin / d) * m, 2^-14 times as large.
template <int UnitWeights>
struct ScaledOperand<Q4_K<UnitWeights>> {
    static constexpr bool EXISTS = true;
    PackedScales packed[2];
    u32 of_s[2], of_m[2];
    float scale[2];

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 header = u.rows[i].plane(0);
            packed[i].read(header);
            // Where d is nothing beside dmin, this is what is taken out.
            const float2 both = half2_bits(header.x);
            const float base = fabsf(both.y) <= 4096 * fabsf(both.x) ? both.x : both.y;
            const float inverse = base == 0 ? 0 : __fdividef(1, base);
            const float s = both.x * inverse, m = -both.y * inverse;
            of_s[i] = pack(s * 1024, s * 64);  // q is 2^-24 and 2^-20 times as large
            of_m[i] = pack(m / 16, m / 16);
            scale[i] = base * 16384;
        }
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        u32 q[4];
        u.load(1 + 2 * J, q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 s = mul2(from_bytes<J % 2, 0>(packed[i].s[J / 2]), of_s[i]);
            // (1024 + m) / 1024 - 1
            const u32 m_bits = __byte_perm(packed[i].m[J / 2], 0x64646464, J % 2 ? 0x4342 : 0x4140);
            const u32 m = mul2(fma2(m_bits, half_bits_twice(1.f / 1024), 0xbc00 * BOTH), of_m[i]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const u32 x[2] = {widen<0>(q[2 * k + i]), widen<1>(q[2 * k + i])};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    a[k][2 * h + i] = fma2(x[h] & 0x000f000f, twice<0>(s), twice<0>(m));
                    a[2 + k][2 * h + i] = fma2(x[h] & 0x00f000f0, twice<1>(s), twice<1>(m));
                }
            }
        }
    }
};

// Weights are d * s * (q - 32): s * q - 32 * s, 2^-16 times as large.
template <int UnitWeights>
struct ScaledOperand<Q6_K<UnitWeights>> {
    static constexpr bool EXISTS = true;
    u32 s[2][4];  // with 128 added
    float scale[2];

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 bytes = u.rows[i].plane(12);
            s[i][0] = bytes.x ^ 0x80808080, s[i][1] = bytes.y ^ 0x80808080;
            s[i][2] = bytes.z ^ 0x80808080, s[i][3] = bytes.w ^ 0x80808080;
            scale[i] = half_bits(u.rows[i].word(52)) * 65536;
        }
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        constexpr bool HIGH_BITS = J % 2;
        constexpr u32 OF_Q = half_bits_twice(HIGH_BITS ? 16 : 256);
        constexpr u32 OF_32 = half_bits_twice(1.f / 2048) | 0x8000 * BOTH;
        u32 q[2][4], high[4];
        u.load(J / 2 * 4, q[0]);
        u.load(J / 2 * 4 + 2, q[1]);
        u.load(8 + J / 2 * 2, high);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 by_two[2] = {from_bytes<0, 128>(s[i][J]), from_bytes<1, 128>(s[i][J])};
#pragma unroll
            for (int k = 0; k < 4; k++) {  // 16 columns each
                const u32 of_q = mul2(by_two[k / 2], OF_Q), less = mul2(by_two[k / 2], OF_32);
                const u32 low = q[k / 2][k % 2 * 2 + i], two = high[k % 2 * 2 + i];
                const u32 x[2] = {widen<0>(low), widen<1>(low)};
                const u32 y[2] = {widen<0>(two), widen<1>(two)};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 top = HIGH_BITS ? y[h] << (4 - k / 2 * 2) & 0x03000300
                                              : y[h] << (4 - k / 2 * 2) & 0x00300030;
                    const u32 bits = x[h] & (HIGH_BITS ? 0x00f000f0 : 0x000f000f) | top;
                    a[k][2 * h + i] = k % 2 ? fma2(bits, twice<1>(of_q), twice<1>(less))
                                            : fma2(bits, twice<0>(of_q), twice<0>(less));
                }
            }
        }
    }
};
