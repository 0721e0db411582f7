// The types of the KV cache: how eight numbers of a slot are loaded, what they are as halves, and
// how a head is stored. llamagraph/kernels/kv.py says the same in numpy. Knows no attention.
//
// A slot is the numbers of all heads; those of a quantised type are followed by the scales, a half
// for 32 numbers, and filled up to 16 bytes. A number's index counts from the slot's first.
#pragma once
#include "mma.cuh"

// 16 bytes that another kernel wrote, or zeros where there is nothing.
__device__ __forceinline__ uint4 load_if(bool there, const void* p) {
    uint4 v;
    asm volatile("{.reg .pred there; setp.ne.u32 there, %5, 0;"
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
                 "@there ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "r"(static_cast<u32>(there)));
    return v;
}

__device__ __forceinline__ uint2 load8_if(bool there, const void* p) {
    uint2 v;
    asm volatile("{.reg .pred there; setp.ne.u32 there, %3, 0; mov.u32 %0, 0; mov.u32 %1, 0;"
                 "@there ld.global.cg.v2.u32 {%0, %1}, [%2];}"
                 : "=r"(v.x), "=r"(v.y) : "l"(p), "r"(static_cast<u32>(there)));
    return v;
}

__device__ __forceinline__ u32 load4_if(bool there, const void* p) {
    u32 v;
    asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; mov.u32 %0, 0;"
                 "@there ld.global.cg.u32 %0, [%1];}"
                 : "=r"(v) : "l"(p), "r"(static_cast<u32>(there)));
    return v;
}

__device__ __forceinline__ u32 load2_if(bool there, const void* p) {
    u16 v;
    asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; mov.u16 %0, 0;"
                 "@there ld.global.cg.u16 %0, [%1];}"
                 : "=h"(v) : "l"(p), "r"(static_cast<u32>(there)));
    return v;
}

// Starts a copy of 4, 8 or 16 bytes that another kernel wrote; zeros where there is nothing.
template <int BYTES>
__device__ __forceinline__ void copy_if(bool there, void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0)
                     : "memory");
#else
    if constexpr (BYTES == 16) *static_cast<uint4*>(to) = load_if(there, from);
    if constexpr (BYTES == 8) *static_cast<uint2*>(to) = load8_if(there, from);
    if constexpr (BYTES == 4) *static_cast<u32*>(to) = load4_if(there, from);
#endif
}

__device__ __forceinline__ u32 half2_of(__half2 x) { return *reinterpret_cast<const u32*>(&x); }
__device__ __forceinline__ __half2 as_half2(u32 x) { return *reinterpret_cast<const __half2*>(&x); }

// Two whole numbers, in the lower bits of halves of size 1024, less `from`, times a scale.
__device__ __forceinline__ u32 scaled(u32 x, u32 from, u32 scale) {
    return half2_of(__hmul2(__hsub2(as_half2(x), as_half2(from)), as_half2(scale)));
}

namespace kv {

constexpr int NUMBERS = N_HEAD_KV * HEAD_DIM;  // of a slot

// What types without scales have in common; BITS a number.
template <int BITS>
struct Plain {
    template <int PAIRS>
    struct Scales {
        __device__ void load_if(bool, const u8*, int) {}
        __device__ void fetch(const u8*, int) {}
        __device__ u32 of(int) const { return 0; }
    };

    static constexpr size_t SLOT = NUMBERS * BITS / 8;   // bytes
    static constexpr size_t HEAD = HEAD_DIM * BITS / 8;  // bytes of one head by itself
    static constexpr size_t HEAD_SCALES = 0;             // where its scales would begin

    static __device__ u8* numbers_of(u8* slot, int head) { return slot + head * HEAD; }
    static __device__ u8* scales_of(u8* slot, int) { return slot; }
};

// Of types with a scale for 32 numbers; a head is whole blocks of them.
template <int BITS>
struct Scaled {
    static constexpr int PARTS = 1;
    static constexpr bool CONVERTS = true;
    static constexpr size_t SCALES = NUMBERS * BITS / 8;  // where they begin in a slot
    static constexpr size_t SLOT = (SCALES + NUMBERS / 16 + 15) / 16 * 16;
    static constexpr size_t HEAD_SCALES = HEAD_DIM * BITS / 8;
    static constexpr size_t HEAD = (HEAD_SCALES + HEAD_DIM / 16 + 15) / 16 * 16;

    static __device__ u8* numbers_of(u8* slot, int head) { return slot + head * HEAD_SCALES; }
    static __device__ u8* scales_of(u8* slot, int head) {
        return slot + SCALES + head * (HEAD_DIM / 16);
    }
    // The scale of number i, from the pair that it is in.
    static __device__ __forceinline__ u32 of_pair(u32 pair, int i) {
        return __byte_perm(pair, 0, i / 32 % 2 ? 0x3232 : 0x1010);
    }
    // Those of 64 numbers each, from number i or d on, which begins a block.
    template <int PAIRS>
    struct Scales {
        u32 pair[PAIRS];

        __device__ __forceinline__ void load_if(bool there, const u8* slot, int i) {
            const u8* from = slot + SCALES + i / 32 * 2;
            if constexpr (HEAD_DIM % 64 == 0 && PAIRS == 2) {
                const uint2 two = load8_if(there, from);
                pair[0] = two.x, pair[1] = two.y;
            } else {
#pragma unroll
                for (int p = 0; p < PAIRS; p++)
                    if constexpr (HEAD_DIM % 64 == 0)
                        pair[p] = load4_if(there, from + 4 * p);
                    else  // the pairs of a head may lie across words
                        pair[p] = load2_if(there, from + 4 * p) |
                                  load2_if(there, from + 4 * p + 2) << 16;
            }
        }
        __device__ __forceinline__ void fetch(const u8* head, int d) {
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                pair[p] = reinterpret_cast<const u32*>(head + HEAD_SCALES)[d / 64 + p];
        }
        // That of a number, counted from where the pairs begin.
        __device__ __forceinline__ u32 of(int i) const { return of_pair(pair[i / 64], i); }
    };
};

// ---- The types ----------------------------------------------------------------------------------
//
// A type loads eight numbers at a time, `load_if` from a slot and `fetch` from a head by itself in
// shared memory, and gives them, with their scale, as the sum of PARTS operands, each of eight
// halves. `copy` starts
// to bring eight numbers into 16 bytes of shared memory, where `convert` makes halves of them once
// they have come. `put` stores number d of a head, for a warp that has 32 in a row.

struct F16 : Plain<16> {
    using Eight = uint4;
    static constexpr int PARTS = 1;
    static constexpr bool CONVERTS = false;
    static __device__ Eight load_if(bool there, const u8* slot, int i) {
        return ::load_if(there, slot + 2 * i);
    }
    static __device__ Eight fetch(const u8* head, int d) {
        return *reinterpret_cast<const uint4*>(head + 2 * d);
    }
    static __device__ uint4 part(const Eight& e, int, u32) { return e; }
    static __device__ __forceinline__ void copy(bool there, void* to, const u8* slot, int i) {
        copy_if<16>(there, to, slot + 2 * i);
    }
    static __device__ void convert(void*, int) {}
    static __device__ void put(u8* numbers, u8*, int d, float x) {
        reinterpret_cast<__half*>(numbers)[d] = __float2half_rn(x);
    }
};

struct BF16 : Plain<16> {
    using Eight = uint4;
    static constexpr int PARTS = 1;
    static constexpr bool CONVERTS = true;
    static __device__ Eight load_if(bool there, const u8* slot, int i) {
        return ::load_if(there, slot + 2 * i);
    }
    static __device__ Eight fetch(const u8* head, int d) {
        return *reinterpret_cast<const uint4*>(head + 2 * d);
    }
    static __device__ __forceinline__ u32 pair(u32 x) {
        return pack_limited(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
    }
    static __device__ __forceinline__ uint4 part(const Eight& e, int, u32) {
        return {pair(e.x), pair(e.y), pair(e.z), pair(e.w)};
    }
    static __device__ __forceinline__ void copy(bool there, void* to, const u8* slot, int i) {
        copy_if<16>(there, to, slot + 2 * i);
    }
    static __device__ __forceinline__ void convert(void* at, int) {
        uint4& eight = *static_cast<uint4*>(at);
        eight = part(eight, 0, 0);
    }
    static __device__ void put(u8* numbers, u8*, int d, float x) {
        reinterpret_cast<__nv_bfloat16*>(numbers)[d] = __float2bfloat16_rn(x);
    }
};

struct F32 : Plain<32> {
    struct Eight {
        uint4 a, b;
    };
    static constexpr int PARTS = 2;
    static constexpr bool CONVERTS = false;
    static __device__ Eight load_if(bool there, const u8* slot, int i) {
        return {::load_if(there, slot + 4 * i), ::load_if(there, slot + 4 * i + 16)};
    }
    static __device__ Eight fetch(const u8* head, int d) {
        const uint4* q = reinterpret_cast<const uint4*>(head + 4 * d);
        return {q[0], q[1]};
    }
    static __device__ u32 pair(u32 low, u32 high, int part) {
        const float a = __uint_as_float(low), b = __uint_as_float(high);
        return part ? pack(lost(a), lost(b)) : pack(a, b);
    }
    static __device__ __forceinline__ uint4 part(const Eight& e, int part, u32) {
        return {pair(e.a.x, e.a.y, part), pair(e.a.z, e.a.w, part), pair(e.b.x, e.b.y, part),
                pair(e.b.z, e.b.w, part)};
    }
    // Rounded to halves at once: 16 bytes have no room for more.
    static __device__ __forceinline__ void copy(bool there, void* to, const u8* slot, int i) {
        *static_cast<uint4*>(to) = part(load_if(there, slot, i), 0, 0);
    }
    static __device__ void convert(void*, int) {}
    static __device__ void put(u8* numbers, u8*, int d, float x) {
        reinterpret_cast<float*>(numbers)[d] = x;
    }
};

// Whole numbers times a scale, which is a 127th of a block's largest.
struct Q8_0 : Scaled<8> {
    using Eight = uint2;
    static __device__ Eight load_if(bool there, const u8* slot, int i) {
        return load8_if(there, slot + i);
    }
    static __device__ Eight fetch(const u8* head, int d) {
        return *reinterpret_cast<const uint2*>(head + d);
    }
    static __device__ __forceinline__ uint4 part(const Eight& e, int, u32 scale) {
        const u32 a = e.x ^ 0x80808080, b = e.y ^ 0x80808080;
        constexpr u32 EXPONENT = 0x64646464, FROM = 0x64806480;
        return {scaled(__byte_perm(a, EXPONENT, 0x4140), FROM, scale),
                scaled(__byte_perm(a, EXPONENT, 0x4342), FROM, scale),
                scaled(__byte_perm(b, EXPONENT, 0x4140), FROM, scale),
                scaled(__byte_perm(b, EXPONENT, 0x4342), FROM, scale)};
    }
    static __device__ __forceinline__ void copy(bool there, void* to, const u8* slot, int i) {
        copy_if<8>(there, to, slot + i);
        copy_if<4>(there, static_cast<u8*>(to) + 8, slot + SCALES + i / 64 * 4);
    }
    static __device__ __forceinline__ void convert(void* at, int i) {
        const uint4 raw = *static_cast<const uint4*>(at);
        *static_cast<uint4*>(at) = part({raw.x, raw.y}, 0, of_pair(raw.z, i));
    }
    static __device__ __forceinline__ void put(u8* numbers, u8* scales, int d, float x) {
        const float scale = warp_max(fabsf(x)) / 127;
        numbers[d] = static_cast<u8>(__float2int_rn(x * (scale == 0 ? 0 : 1 / scale)));
        if (d % 32 == 0) reinterpret_cast<__half*>(scales)[d / 32] = __float2half_rn(scale);
    }
};

// Whole numbers from -8 to 7 times a scale, which makes -8 of a block's largest. Number 2j of eight
// is nibble j of a word, number 2j + 1 nibble j + 4.
struct Q4_0 : Scaled<4> {
    using Eight = u32;
    static __device__ Eight load_if(bool there, const u8* slot, int i) {
        return load4_if(there, slot + i / 2);
    }
    static __device__ Eight fetch(const u8* head, int d) {
        return *reinterpret_cast<const u32*>(head + d / 2);
    }
    static __device__ __forceinline__ u32 pair(u32 e, int j, u32 scale) {
        return scaled(e >> 4 * j & 0x000f000f | 0x64006400, 0x64086408, scale);
    }
    static __device__ __forceinline__ uint4 part(const Eight& e, int, u32 scale) {
        return {pair(e, 0, scale), pair(e, 1, scale), pair(e, 2, scale), pair(e, 3, scale)};
    }
    static __device__ __forceinline__ void copy(bool there, void* to, const u8* slot, int i) {
        copy_if<4>(there, to, slot + i / 2);
        copy_if<4>(there, static_cast<u8*>(to) + 4, slot + SCALES + i / 64 * 4);
    }
    static __device__ __forceinline__ void convert(void* at, int i) {
        const uint2 raw = *static_cast<const uint2*>(at);
        *static_cast<uint4*>(at) = part(raw.x, 0, of_pair(raw.y, i));
    }
    static __device__ __forceinline__ void put(u8* numbers, u8* scales, int d, float x) {
        const float top = warp_max(fabsf(x));
        const int first = __ffs(__ballot_sync(~0u, fabsf(x) == top)) - 1;  // -1 for NaN alone
        const float scale = __shfl_sync(~0u, x, first & 31) / -8;
        const float q = __fadd_rn(__fmul_rn(x, scale == 0 ? 0 : 1 / scale), 8.5f);
        u32 word = min(15, static_cast<int>(q)) << (d / 2 % 4 * 4 + d % 2 * 16);
        for (int i = 1; i < 8; i *= 2) word |= __shfl_xor_sync(~0u, word, i);
        if (d % 8 == 0) reinterpret_cast<u32*>(numbers)[d / 8] = word;
        if (d % 32 == 0) reinterpret_cast<__half*>(scales)[d / 32] = __float2half_rn(scale);
    }
};

// A warp stores a head's numbers in a slot.
template <class Type>
__device__ __forceinline__ void store_head(u8* slot, int head, const float* x) {
    u8 *numbers = Type::numbers_of(slot, head), *scales = Type::scales_of(slot, head);
    for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) Type::put(numbers, scales, d, x[d]);
}

// The same for a head by itself.
template <class Type>
__device__ __forceinline__ void keep_head(u8* head, const float* x) {
    for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32)
        Type::put(head, head + Type::HEAD_SCALES, d, x[d]);
}

}  // namespace kv
