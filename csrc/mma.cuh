// Tensor core products of F16 tiles with F32 sums, and what feeds them: matrices from shared
// memory, and copies into it. Knows no weight and no kernel.
//
// Lane 4 * g + t of a warp holds, of a 16 x 16 tile of A, rows g and g + 8 at columns 2t, 2t + 1,
// 2t + 8 and 2t + 9; of 8 columns of B, column g at the same places of the sum; of the 16 x 8
// result, rows g and g + 8 at columns 2t and 2t + 1 (PTX ISA, mma.m16n8k16).
#pragma once
#include "common.cuh"

// Where a generic pointer into shared memory points, for instructions that want it so.
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of halves; lane l names row l % 8 of matrix l / 8 (16 bytes, aligned).
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&m)[4], const void* row) {
    load_matrices(m, shared_address(row));
}

// c += a * b
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Starts a copy of 16 bytes from global to shared memory, both aligned. Before sm_80 it ends here.
__device__ __forceinline__ void copy16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(shared_address(to)), "l"(from) : "memory");
#else
    *static_cast<uint4*>(to) = load_weights16(from);
#endif
}

// Waits for all copies that this thread has started.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The copies that this thread has started since the last call are a group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until no more than N of its groups are under way.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// What a half loses of x; together the two have 22 bits.
__device__ inline float lost(float x) { return x - __half2float(__float2half_rn(x)); }

// Two floats as halves, the first in the lower half of the word.
__device__ __forceinline__ u32 pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const u32*>(&pair);
}

// The same, cut off at the largest half; NaN stays.
__device__ __forceinline__ u32 pack_limited(float low, float high) {
    const __half2 largest = __half2half2(__ushort_as_half(0x7bff));
    const __half2 pair = __floats2half2_rn(low, high);
    const __half2 limited = __hmin2_nan(__hmax2_nan(pair, __hneg2(largest)), largest);
    return *reinterpret_cast<const u32*>(&limited);
}

// Writes a result, or adds it to what is there.
template <bool Add>
__device__ __forceinline__ void put(float* out, float value) {
    *out = Add ? *out + value : value;
}
