// The types of stored weights: a struct each, and what kernels read through it. The bytes of a unit
// are where tiles.cuh finds them; blocks and scales are ggml's (ggml-common.h). Knows no kernel; is
// as long as there are types.
//
// A type has  BYTES   of a unit
//             FLOAT   no integers: `values` is all there is
//             SIGNED  how the bytes of `Block::q` count
//             OFFSET  what is taken from each of them
//             MINS    0: none, 1: a minimum a block, 2: one a half block
//             scale(unit)      factors of all the unit's integer scales and minima
//             block(unit, i)   the i-th 32 weights of the unit
// Weight j of a block is  scale.x * d * s * (q[j] - OFFSET) - scale.y * m, with s, m of its half.
#pragma once
#include "tiles.cuh"

struct Block {
    u32 q[8];  // 32 bytes in the order of the weights
    int s0, s1;  // of weights 0..15 and 16..31
    float d;
    float m0, m1;
};

// ---- Pieces of the types ------------------------------------------------------------------------

// Half j of a unit: a scale, as float.
template <class Unit>
__device__ __forceinline__ float half_at(const Unit& u, int j) {
    return half_bits(u.word(j / 2) >> (j % 2 * 16));
}

template <class Unit>
__device__ __forceinline__ void words_of_planes(const Unit& u, int p, u32 (&w)[8]) {
    const uint4 a = u.plane(p), b = u.plane(p + 1);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

// The legacy types keep weights 0..15 of a block in the low halves of 16 bytes, 16..31 in the high
// ones. Those stay where they are, as 16 times the weight.
template <class Unit>
__device__ __forceinline__ void nibbles(const Unit& u, int p, u32 (&q)[8]) {
    const uint4 v = u.plane(p);
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++) q[c] = w[c] & 0x0f0f0f0f, q[4 + c] = w[c] & 0xf0f0f0f0;
}

// The same with a fifth bit each: bit j of `high` belongs to weight j. All are shifted down.
template <class Unit>
__device__ __forceinline__ void nibbles5(const Unit& u, int p, u32 high, u32 (&q)[8]) {
    const uint4 v = u.plane(p);
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        // The product puts bits 0..3 at bits 4, 12, 20 and 28.
        const u32 low = (high >> (4 * c) & 15) * 0x02040810, top = high >> (16 + 4 * c) & 15;
        q[c] = (w[c] & 0x0f0f0f0f) | (low & 0x10101010);
        q[4 + c] = (w[c] >> 4 & 0x0f0f0f0f) | (top * 0x02040810 & 0x10101010);
    }
}

// Signed bytes from a table of 16, by the low and the high halves of 16 bytes.
template <class Unit>
__device__ __forceinline__ void table_nibbles(const Unit& u, int p, const uint4& table,
                                              u32 (&q)[8]) {
    const uint4 v = u.plane(p);
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
        u32 pair[2];  // of each two bytes: low, high, low, high
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 index = w[c] >> (16 * h);
            const u32 a = __byte_perm(table.x, table.y, index & 0x7777);
            const u32 b = __byte_perm(table.z, table.w, index & 0x7777);
            pair[h] = __byte_perm(a, b, 0x3210 | (index & 0x8888) >> 1);
        }
        q[c] = __byte_perm(pair[0], pair[1], 0x6420);
        q[4 + c] = __byte_perm(pair[0], pair[1], 0x7531);
    }
}

// Scale and minimum of block i: 6 bits each in the 12 bytes behind d and dmin (Q4_K, Q5_K).
__device__ __forceinline__ void packed_scales(const uint4& header, int i, int& s, int& m) {
    const u32 low_s = header.y & 0x3f3f3f3f, low_m = header.z & 0x3f3f3f3f;
    const u32 high_s = (header.w & 0x0f0f0f0f) | (header.y >> 2 & 0x30303030);
    const u32 high_m = (header.w >> 4 & 0x0f0f0f0f) | (header.z >> 2 & 0x30303030);
    s = (i < 4 ? low_s : high_s) >> (i % 4 * 8) & 0xff;
    m = (i < 4 ? low_m : high_m) >> (i % 4 * 8) & 0xff;
}

__device__ __forceinline__ int signed_byte(u32 word, int i) {
    return static_cast<int>(word << (24 - 8 * i)) >> 24;
}

// `Weights` weights are stored together in `Bytes` bytes.
template <int UnitWeights, int Weights, int Bytes, bool Signed = false, int Offset = 0,
          int Mins = 0>
struct Integers {
    static constexpr int BYTES = UnitWeights / Weights * Bytes;
    static constexpr bool FLOAT = false, SIGNED = Signed;
    static constexpr int OFFSET = Offset, MINS = Mins;

    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit&) {
        return make_float2(1, 1);
    }
};

// ---- Blocks of 32 -------------------------------------------------------------------------------

template <int UnitWeights>
struct Q4_0 : Integers<UnitWeights, 32, 18, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        nibbles(u, i, b.q);
        const float d = half_at(u, UnitWeights / 32 * 8 + i);
        b.s0 = 16, b.s1 = 1, b.d = d * 0.0625f, b.m0 = b.m1 = 8 * d;
        return b;
    }
};

template <int UnitWeights>
struct Q4_1 : Integers<UnitWeights, 32, 20, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        nibbles(u, i, b.q);
        const float2 dm = half2_bits(u.word(UnitWeights / 32 * 4 + i));
        b.s0 = 16, b.s1 = 1, b.d = dm.x * 0.0625f, b.m0 = b.m1 = -dm.y;
        return b;
    }
};

template <int UnitWeights>
struct Q5_0 : Integers<UnitWeights, 32, 22, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        nibbles5(u, i, u.word(UnitWeights / 32 * 4 + i), b.q);
        b.s0 = b.s1 = 1, b.d = half_at(u, UnitWeights / 32 * 10 + i), b.m0 = b.m1 = 16 * b.d;
        return b;
    }
};

template <int UnitWeights>
struct Q5_1 : Integers<UnitWeights, 32, 24, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        nibbles5(u, i, u.word(UnitWeights / 32 * 4 + i), b.q);
        const float2 dm = half2_bits(u.word(UnitWeights / 32 * 5 + i));
        b.s0 = b.s1 = 1, b.d = dm.x, b.m0 = b.m1 = -dm.y;
        return b;
    }
};

template <int UnitWeights>
struct Q8_0 : Integers<UnitWeights, 32, 34, true> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        words_of_planes(u, 2 * i, b.q);
        b.s0 = b.s1 = 1, b.d = half_at(u, UnitWeights / 32 * 16 + i), b.m0 = b.m1 = 0;
        return b;
    }
};

template <int UnitWeights>
struct IQ4_NL : Integers<UnitWeights, 32, 18, true> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        table_nibbles(u, i, make_uint4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535), b.q);
        b.s0 = b.s1 = 1, b.d = half_at(u, UnitWeights / 32 * 8 + i), b.m0 = b.m1 = 0;
        return b;
    }
};

template <int UnitWeights>
struct MXFP4 : Integers<UnitWeights, 32, 17, true> {
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        table_nibbles(u, i, make_uint4(0x03020100, 0x0c080604, 0xfdfeff00, 0xf4f8fafc), b.q);
        // The scale is 2^(e - 128), for the table holds twice the values.
        const u32 e = u.word(UnitWeights / 32 * 4 + i / 4) >> (i % 4 * 8) & 0xff;
        b.s0 = b.s1 = 1, b.d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        b.m0 = b.m1 = 0;
        return b;
    }
};

// ---- Blocks of 256 ------------------------------------------------------------------------------

template <int UnitWeights>
struct Q4_K : Integers<UnitWeights, 256, 144, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return half2_bits(u.plane(0).x);
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        u32 w[8];
        words_of_planes(u, 1 + i / 2 * 2, w);
#pragma unroll
        for (int c = 0; c < 8; c++) b.q[c] = w[c] & (i % 2 ? 0xf0f0f0f0 : 0x0f0f0f0f);
        int m;
        packed_scales(u.plane(0), i, b.s0, m);
        b.s1 = b.s0, b.d = i % 2 ? 0.0625f : 1.f, b.m0 = b.m1 = m;
        return b;
    }
};

template <int UnitWeights>
struct Q5_K : Integers<UnitWeights, 256, 176, false, 0, 1> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return half2_bits(u.plane(0).x);
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        u32 w[8], high[8];
        words_of_planes(u, 3 + i / 2 * 2, w);
        words_of_planes(u, 1, high);
#pragma unroll
        for (int c = 0; c < 8; c++)
            b.q[c] = (w[c] >> (i % 2 * 4) & 0x0f0f0f0f) | (high[c] >> i << 4 & 0x10101010);
        int m;
        packed_scales(u.plane(0), i, b.s0, m);
        b.s1 = b.s0, b.d = 1, b.m0 = b.m1 = m;
        return b;
    }
};

template <int UnitWeights>
struct Q6_K : Integers<UnitWeights, 256, 210, false, 32> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return make_float2(half_at(u, 104), 0);
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        u32 low[8], high[8];
        words_of_planes(u, i / 4 * 4 + i % 2 * 2, low);
        words_of_planes(u, 8 + i / 4 * 2, high);
#pragma unroll
        for (int c = 0; c < 8; c++)
            b.q[c] = (low[c] >> (i % 4 / 2 * 4) & 0x0f0f0f0f) |
                     (high[c] >> (i % 4 * 2) << 4 & 0x30303030);
        const u32 scales = u.word(48 + i / 2) >> (i % 2 * 16);
        b.s0 = signed_byte(scales, 0), b.s1 = signed_byte(scales, 1);
        b.d = 1, b.m0 = b.m1 = 0;
        return b;
    }
};

template <int UnitWeights>
struct Q2_K : Integers<UnitWeights, 256, 84, false, 0, 2> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return half2_bits(u.word(20));
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        u32 w[8];
        words_of_planes(u, 1 + i / 4 * 2, w);
#pragma unroll
        for (int c = 0; c < 8; c++) b.q[c] = w[c] >> (i % 4 * 2) & 0x03030303;
        const u32 scales = u.word(i / 2) >> (i % 2 * 16);
        b.s0 = scales & 15, b.s1 = scales >> 8 & 15;
        b.d = 1, b.m0 = scales >> 4 & 15, b.m1 = scales >> 12 & 15;
        return b;
    }
};

template <int UnitWeights>
struct Q3_K : Integers<UnitWeights, 256, 110, false, 4> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return make_float2(half_at(u, 54), 0);
    }
    // Scale j, 6 bits: four in nibble j of the first 8 bytes, two of the last 4.
    template <class Unit>
    static __device__ __forceinline__ int scale6(const Unit& u, int j) {
        const u32 low = u.word(24 + j % 8 / 4) >> (j % 4 * 8 + j / 8 * 4) & 15;
        const u32 high = u.word(26) >> (j % 4 * 8 + j / 4 * 2) & 3;
        return static_cast<int>(low | high << 4) - 32;
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        u32 w[8], high[8];
        words_of_planes(u, 2 + i / 4 * 2, w);
        words_of_planes(u, 0, high);
#pragma unroll
        for (int c = 0; c < 8; c++)
            b.q[c] = (w[c] >> (i % 4 * 2) & 0x03030303) | (high[c] >> i << 2 & 0x04040404);
        b.s0 = scale6(u, 2 * i), b.s1 = scale6(u, 2 * i + 1);
        b.d = 1, b.m0 = b.m1 = 0;
        return b;
    }
};

template <int UnitWeights>
struct IQ4_XS : Integers<UnitWeights, 256, 136, true> {
    template <class Unit>
    static __device__ __forceinline__ float2 scale(const Unit& u) {
        return make_float2(half_bits(u.word(32) & 0xffff), 0);
    }
    template <class Unit>
    static __device__ __forceinline__ Block block(const Unit& u, int i) {
        Block b;
        table_nibbles(u, i, make_uint4(0xbfad9881, 0xf6eaddcf, 0x26190d01, 0x71594535), b.q);
        const u32 low = u.word(33) >> (4 * i) & 15, high = u.word(32) >> (16 + 2 * i) & 3;
        b.s0 = b.s1 = static_cast<int>(low | high << 4) - 32;
        b.d = 1, b.m0 = b.m1 = 0;
        return b;
    }
};

// ---- Numbers ------------------------------------------------------------------------------------

template <int UnitWeights>
struct F32 {
    static constexpr int BYTES = UnitWeights * 4;
    static constexpr bool FLOAT = true;
    template <class Unit>
    static __device__ __forceinline__ void values(const Unit& u, int i, float (&w)[32]) {
#pragma unroll
        for (int p = 0; p < 8; p++) {
            const uint4 v = u.plane(8 * i + p);
            w[4 * p] = __uint_as_float(v.x), w[4 * p + 1] = __uint_as_float(v.y);
            w[4 * p + 2] = __uint_as_float(v.z), w[4 * p + 3] = __uint_as_float(v.w);
        }
    }
};

template <int UnitWeights>
struct F16 {
    static constexpr int BYTES = UnitWeights * 2;
    static constexpr bool FLOAT = true;
    template <class Unit>
    static __device__ __forceinline__ void values(const Unit& u, int i, float (&w)[32]) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const uint4 v = u.plane(4 * i + p);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float2 two = half2_bits(pairs[c]);
                w[8 * p + 2 * c] = two.x, w[8 * p + 2 * c + 1] = two.y;
            }
        }
    }
};

template <int UnitWeights>
struct BF16 {
    static constexpr int BYTES = UnitWeights * 2;
    static constexpr bool FLOAT = true;
    template <class Unit>
    static __device__ __forceinline__ void values(const Unit& u, int i, float (&w)[32]) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const uint4 v = u.plane(4 * i + p);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int c = 0; c < 4; c++) {  // a BF16 is the upper half of a float
                w[8 * p + 2 * c] = __uint_as_float(pairs[c] << 16);
                w[8 * p + 2 * c + 1] = __uint_as_float(pairs[c] & 0xffff0000);
            }
        }
    }
};

// ---- What kernels call --------------------------------------------------------------------------

// The i-th 32 weights of a unit as floats.
template <class Type, class Unit>
__device__ __forceinline__ void values(const Unit& u, int i, float (&w)[32]) {
    if constexpr (Type::FLOAT) {
        Type::values(u, i, w);
    } else {
        const Block b = Type::block(u, i);
        const float2 scale = Type::scale(u);
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const u32 word = b.q[j / 4];
            const int q = Type::SIGNED ? signed_byte(word, j % 4) : word >> (j % 4 * 8) & 0xff;
            const float d = scale.x * b.d * (j < 16 ? b.s0 : b.s1);
            w[j] = d * (q - Type::OFFSET);
            if constexpr (Type::MINS != 0) w[j] -= scale.y * (j < 16 ? b.m0 : b.m1);
        }
    }
}

// The i-th 32 weights of a unit, rounded once to 16 bits: weights 2j and 2j + 1 in w[j].
template <class Type, class Unit>
__device__ __forceinline__ void dequant(const Unit& u, int i, __half2 (&w)[16]) {
    float f[32];
    values<Type>(u, i, f);
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = __floats2half2_rn(f[2 * j], f[2 * j + 1]);
}
