// Stored weights as an operand of a warp group's products: halves in registers, unpacked from tiles
// in shared memory. A type each, beside its meaning in quants.cuh. Knows no kernel.
//
// Within each 16 columns, place 8h + 2t + e of the sum has column 4t + 2h + e: then what a lane needs
// of a row is a run of four columns, and the matrices of four rows of 16 bytes, loaded as if they
// were halves, are handed out just so. The other operand has its columns in this order too
// (llamagraph/kernels/panels.py).
#pragma once
#include "quants.cuh"
#include "warpgroup.cuh"

// ---- Arithmetic of pairs of halves --------------------------------------------------------------

__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

constexpr u32 BOTH = 0x00010001;

// Half i of a word, twice: as halves, not as bytes, it is part of the instruction that uses it.
template <int I>
__device__ __forceinline__ u32 twice(u32 word) {
    u32 d;
    if constexpr (I)
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}"
            : "=r"(d) : "r"(word));
    else
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}"
            : "=r"(d) : "r"(word));
    return d;
}

// Bytes 2i and 2i + 1 of a word, each as 16 bits.
template <int I>
__device__ __forceinline__ u32 widen(u32 word) {
    return __byte_perm(word, 0, I ? 0x4342 : 0x4140);
}

// Two halves that hold an integer in their lowest bits: 1024 and it. Four bits higher: 64 and it.
constexpr u32 LOW = 0x6400 * BOTH, HIGH = 0x5400 * BOTH;

// (bits & Mask) | Mark in one instruction, which the compiler does not find for two constants.
template <u32 Mask, u32 Mark>
__device__ __forceinline__ u32 marked(u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(bits), "n"(Mask), "n"(Mark));
    return d;
}

// The integers, less Offset: exact.
template <int Offset = 0>
__device__ __forceinline__ u32 from_low(u32 marked_bits) {
    return add2(marked_bits, (0xe400 + Offset) * BOTH);
}
template <int Offset = 0>
__device__ __forceinline__ u32 from_high(u32 marked_bits) {
    return add2(marked_bits, (0xd400 + 16 * Offset) * BOTH);
}

// Bytes 2i and 2i + 1 of a word, less Offset.
template <int I, int Offset>
__device__ __forceinline__ u32 from_bytes(u32 word) {
    return add2(__byte_perm(word, 0x64646464, I ? 0x4342 : 0x4140), (0xe400 + Offset) * BOTH);
}

// ---- Where a lane's weights are -----------------------------------------------------------------

// A unit in shared memory by its address, as MemoryUnit in tiles.cuh.
template <int Bytes>
struct SharedUnit {
    static constexpr int PLANES = Bytes / 16, REST = Bytes % 16;
    u32 tile;
    int lanes, lane;  // of the tile, and the own

    __device__ __forceinline__ u32 piece(int p) const { return tile + (p * lanes + lane) * 16; }
    __device__ __forceinline__ uint4 plane(int p) const {
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(piece(p)) : "memory");
        return v;
    }
    // Half a piece.
    __device__ __forceinline__ uint2 eight(int p, int which) const {
        uint2 v;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.x), "=r"(v.y) : "r"(piece(p) + which * 8) : "memory");
        return v;
    }
    __device__ __forceinline__ u32 word(int j) const {
        const int at = j * 4 - PLANES * 16;
        if (at < 0) return four(piece(j / 4) + j % 4 * 4);
        const u32 rest = tile + PLANES * 16 * lanes;
        if (at < (REST & 8)) return four(rest + lane * 8 + at);
        if (at < (REST & 12)) return four(rest + (REST & 8) * lanes + lane * 4);
        return two(rest + (REST & 12) * lanes + lane * 2);
    }

  private:
    static __device__ __forceinline__ u32 four(u32 at) {
        u32 v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
        return v;
    }
    static __device__ __forceinline__ u32 two(u32 at) {
        u16 v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
        return v;
    }
};

// The same unit of a warp's twice eight outputs. Lane 4g + t works on output g of either eight.
template <int Bytes>
struct WarpUnit {
    SharedUnit<Bytes> rows[2];
    u32 matrices;  // where this lane's row of the first two pieces' matrices is

    // m[2k + i]: four bytes of piece p + k of output g of the i-th eight, from byte 4t on.
    __device__ __forceinline__ void load(int p, u32 (&m)[4]) const {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(matrices + p * rows[0].lanes * 16) : "memory");
    }
};

// The unit of 16 outputs of a stage, which has tiles of `TileRows` outputs with `lanes` lanes: eight
// outputs from `first` on and eight from `second` on.
template <class Type, int TileRows>
__device__ __forceinline__ WarpUnit<Type::BYTES> warp_unit(u32 stage, int lanes, int unit,
                                                           int first, int second) {
    constexpr int TILE_BYTES = 32 * Type::BYTES;
    const int lane = threadIdx.x % 32;
    const auto row = [&](int r) {
        return SharedUnit<Type::BYTES>{stage + r / TileRows * TILE_BYTES, lanes,
                                       unit * TileRows + r % TileRows};
    };
    const auto named = row((lane % 16 < 8 ? first : second) + lane % 8);
    return {{row(first + lane / 4), row(second + lane / 4)}, named.piece(lane / 16)};
}

// ---- The types ----------------------------------------------------------------------------------
//
// `begin` reads what a unit has once, `get<J>` unpacks columns 64J on: a[s] is the operand of 16
// columns, a[s][2h + i] for output g of the i-th eight.

template <class Type>
struct Operand {
    static constexpr bool EXISTS = false;
};

// Scales and minima of the two rows' blocks of 32, 6 bits each (Q4_K, Q5_K).
struct PackedScales {
    u32 s[2], m[2];  // of blocks 0..3 and 4..7, a byte each
    u32 d, minus_dmin;

    __device__ __forceinline__ void read(const uint4& header) {
        s[0] = header.y & 0x3f3f3f3f, m[0] = header.z & 0x3f3f3f3f;
        s[1] = (header.w & 0x0f0f0f0f) | (header.y >> 2 & 0x30303030);
        m[1] = (header.w >> 4 & 0x0f0f0f0f) | (header.z >> 2 & 0x30303030);
        d = twice<0>(header.x), minus_dmin = twice<1>(header.x) ^ 0x80008000;
    }
    // Of blocks 2J and 2J + 1.
    template <int J>
    __device__ __forceinline__ void get(u32& scales, u32& minima) const {
        scales = mul2(from_bytes<J % 2, 0>(s[J / 2]), d);
        minima = mul2(from_bytes<J % 2, 0>(m[J / 2]), minus_dmin);
    }
};

template <int UnitWeights>
struct Operand<Q4_K<UnitWeights>> {
    static constexpr bool EXISTS = true;
    PackedScales scales[2];

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
        for (int i = 0; i < 2; i++) scales[i].read(u.rows[i].plane(0));
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        u32 q[4];
        u.load(1 + 2 * J, q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 s, m;
            scales[i].template get<J>(s, m);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const u32 x[2] = {widen<0>(q[2 * k + i]), widen<1>(q[2 * k + i])};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    a[k][2 * h + i] = fma2(from_low(marked<0x000f000f, LOW>(x[h])),
                                           twice<0>(s), twice<0>(m));
                    a[2 + k][2 * h + i] = fma2(from_high(marked<0x00f000f0, HIGH>(x[h])),
                                               twice<1>(s), twice<1>(m));
                }
            }
        }
    }
};

template <int UnitWeights>
struct Operand<Q5_K<UnitWeights>> {
    static constexpr bool EXISTS = true;
    PackedScales scales[2];
    u32 high[4];  // fifth bits: bit b of a byte for block b

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
        for (int i = 0; i < 2; i++) scales[i].read(u.rows[i].plane(0));
        u.load(1, high);
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        u32 q[4];
        u.load(3 + 2 * J, q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 s, m;
            scales[i].template get<J>(s, m);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const u32 x[2] = {widen<0>(q[2 * k + i]), widen<1>(q[2 * k + i])};
                const u32 y[2] = {widen<0>(high[2 * k + i]), widen<1>(high[2 * k + i])};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 fifth = J < 2 ? y[h] << (4 - 2 * J) : y[h] >> (2 * J - 4);
                    const u32 low = (x[h] & 0x000f000f) | marked<0x00100010, LOW>(fifth);
                    const u32 top =
                        (x[h] & 0x00f000f0) | marked<0x01000100, HIGH>(y[h] << (7 - 2 * J));
                    a[k][2 * h + i] = fma2(from_low(low), twice<0>(s), twice<0>(m));
                    a[2 + k][2 * h + i] = fma2(from_high(top), twice<1>(s), twice<1>(m));
                }
            }
        }
    }
};

template <int UnitWeights>
struct Operand<Q6_K<UnitWeights>> {
    static constexpr bool EXISTS = true;
    u32 scales[2][4], d[2];

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit& u) {
        for (int i = 0; i < 2; i++) {
            const uint4 bytes = u.rows[i].plane(12);
            scales[i][0] = bytes.x ^ 0x80808080, scales[i][1] = bytes.y ^ 0x80808080;
            scales[i][2] = bytes.z ^ 0x80808080, scales[i][3] = bytes.w ^ 0x80808080;
            d[i] = twice<0>(u.rows[i].word(52));
        }
    }
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        u32 q[2][4], high[4];
        u.load(J / 2 * 4, q[0]);
        u.load(J / 2 * 4 + 2, q[1]);
        u.load(8 + J / 2 * 2, high);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 s[2] = {mul2(from_bytes<0, 128>(scales[i][J]), d[i]),
                              mul2(from_bytes<1, 128>(scales[i][J]), d[i])};
#pragma unroll
            for (int k = 0; k < 4; k++) {  // 16 columns each
                const u32 scale = k % 2 ? twice<1>(s[k / 2]) : twice<0>(s[k / 2]);
                const u32 low = q[k / 2][k % 2 * 2 + i], two = high[k % 2 * 2 + i];
                const u32 x[2] = {widen<0>(low), widen<1>(low)};
                const u32 y[2] = {widen<0>(two), widen<1>(two)};
                constexpr int AT = J % 2 * 4;  // of the bits of the first 32 columns
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 value;
                    if constexpr (J % 2 == 0) {
                        const u32 top = marked<0x00300030, LOW>(y[h] << (4 - k / 2 * 2));
                        value = from_low<32>((x[h] & 0x000f000f) | top);
                    } else {
                        const u32 top = marked<0x03000300, HIGH>(y[h] << (8 - AT - k / 2 * 2));
                        value = from_high<32>((x[h] & 0x00f000f0) | top);
                    }
                    a[k][2 * h + i] = mul2(value, scale);
                }
            }
        }
    }
};

template <int UnitWeights>
struct Operand<Q8_0<UnitWeights>> {
    static constexpr bool EXISTS = true;

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit&) {}
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        const u32 d[2] = {u.rows[0].word(UnitWeights / 4 + J), u.rows[1].word(UnitWeights / 4 + J)};
#pragma unroll
        for (int b = 0; b < 2; b++) {  // a block of 32
            u32 q[4];
            u.load(4 * J + 2 * b, q);
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const u32 scale = b ? twice<1>(d[i]) : twice<0>(d[i]);
                    const u32 bytes = q[2 * k + i] ^ 0x80808080;
                    a[2 * b + k][i] = mul2(from_bytes<0, 128>(bytes), scale);
                    a[2 * b + k][2 + i] = mul2(from_bytes<1, 128>(bytes), scale);
                }
        }
    }
};

// The legacy types: blocks 2J and 2J + 1 are pieces 2J and 2J + 1, weights 0..15 of a block in the
// low halves of its bytes. `Fifth`: where the word of a block's fifth bits is, `Scale`: of a half, or
// with `Min` of a word with the minimum too.
template <int Fifth, int Scale, bool Min>
struct LegacyOperand {
    static constexpr bool EXISTS = true;

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit&) {}
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        constexpr int OFFSET = Min ? 0 : Fifth ? 16 : 8;
        const int t = threadIdx.x % 4;
        u32 q[4];
        u.load(2 * J, q);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 both = Min ? 0 : u.rows[i].word(Scale / 2 + J);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const u32 own = Min ? u.rows[i].word(Scale + 2 * J + b) : both;
                const u32 d = !Min && b ? twice<1>(own) : twice<0>(own), m = twice<1>(own);
                const u32 bytes[2] = {widen<0>(q[2 * b + i]), widen<1>(q[2 * b + i])};
                u32 x[2], top[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    x[h] = marked<0x000f000f, LOW>(bytes[h]);
                    top[h] = marked<0x00f000f0, HIGH>(bytes[h]);
                }
                if constexpr (Fifth != 0) {
                    const u32 bits = u.rows[i].word(Fifth + 2 * J + b) >> (4 * t);
#pragma unroll
                    for (int h = 0; h < 2; h++) {  // two bits, each to its half
                        x[h] |= (bits >> (2 * h) & 3) * (1 << 4 | 1 << 19) & 0x00100010;
                        top[h] |= (bits >> (16 + 2 * h) & 3) * (1 << 8 | 1 << 23) & 0x01000100;
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const u32 low = from_low<OFFSET>(x[h]), high = from_high<OFFSET>(top[h]);
                    a[2 * b][2 * h + i] = Min ? fma2(low, d, m) : mul2(low, d);
                    a[2 * b + 1][2 * h + i] = Min ? fma2(high, d, m) : mul2(high, d);
                }
            }
        }
    }
};

template <int UnitWeights>
struct Operand<Q4_0<UnitWeights>> : LegacyOperand<0, UnitWeights / 4, false> {};
template <int UnitWeights>
struct Operand<Q4_1<UnitWeights>> : LegacyOperand<0, UnitWeights / 8, true> {};
template <int UnitWeights>
struct Operand<Q5_0<UnitWeights>>
    : LegacyOperand<UnitWeights / 8, UnitWeights / 32 * 10, false> {};
template <int UnitWeights>
struct Operand<Q5_1<UnitWeights>>
    : LegacyOperand<UnitWeights / 8, UnitWeights / 32 * 5, true> {};

// Numbers of 16 bits: four of a row are eight bytes.
template <bool Brain>
struct FloatOperand {
    static constexpr bool EXISTS = true;

    template <class Unit>
    __device__ __forceinline__ void begin(const Unit&) {}
    template <int J, class Unit>
    __device__ __forceinline__ void get(const Unit& u, u32 (&a)[4][4]) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint2 v = u.rows[i].eight(8 * J + 2 * k + t / 2, t % 2);
                a[k][i] = Brain ? halves_of_brains(v.x) : v.x;
                a[k][2 + i] = Brain ? halves_of_brains(v.y) : v.y;
            }
    }
    static __device__ __forceinline__ u32 halves_of_brains(u32 pair) {
        return pack(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
    }
};

template <int UnitWeights>
struct Operand<F16<UnitWeights>> : FloatOperand<false> {};
template <int UnitWeights>
struct Operand<BF16<UnitWeights>> : FloatOperand<true> {};
