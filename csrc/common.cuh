// What every kernel shares: reductions in a fixed order, wide loads, int8 products and the two ends
// of programmatic dependent launch. Knows no quantised type and no shape.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

// The next kernel of the stream may start: it can load its weights while this one works.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Everything that earlier kernels wrote can be read, and what they read can be overwritten.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Instead of the two above, for launches behind which several others would start early, one after
// another, and take each other's places on the multiprocessors: with Late these two let the next
// start no sooner than this one can work itself.
template <bool Late>
__device__ __forceinline__ void pdl_begin() {
    if constexpr (!Late) pdl_launch_dependents();
}
template <bool Late>
__device__ __forceinline__ void pdl_wait_and_begin() {
    pdl_wait();
    if constexpr (Late) pdl_launch_dependents();
}

// For q, k and v and for attention, each by its own width: a narrow model's launches are so short.
// On an H200 a width of 576 gains 5 to 7 % by starting late, 2048 loses as much.
template <int Width>
constexpr bool NARROW = Width <= 1024;

// Weights: read once, by no kernel written, so past the first-level cache. Addresses are aligned
// to the size of the load.
__device__ __forceinline__ uint4 load_weights16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load_weights8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 load_weights4(const void* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 load_weights2(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// Activations: other multiprocessors wrote them, so from the second-level cache.
__device__ __forceinline__ float4 load_activations(const float* p) {
    return __ldcg(reinterpret_cast<const float4*>(p));
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Sum over the lanes; every lane gets it.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// Sum over the block of whole warps; every thread gets it. `partial` holds a float a warp and may
// be used again after the next barrier.
__device__ __forceinline__ float block_sum(float v, float* partial) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < blockDim.x / 32; i++) total += partial[i];
    return total;
}

// Waits for `threads` threads of the block, whole warps, that name the same barrier: 1 to 15.
__device__ __forceinline__ void barrier(int name, int threads) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Counts the arrival of a block, once, behind a barrier of its threads; how many were there before.
// What those blocks wrote is visible behind the next barrier.
__device__ __forceinline__ u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// c + the products of four bytes: unsigned or signed weights with signed activations.
__device__ __forceinline__ int dot4(u32 unsigned_weights, int x, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(unsigned_weights), "r"(x), "r"(c));
    return d;
}

__device__ __forceinline__ int dot4_signed(u32 weights, int x, int c) {
    int d;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(weights), "r"(x), "r"(c));
    return d;
}

__device__ __forceinline__ float half_bits(u32 bits) {
    return __half2float(__ushort_as_half(static_cast<u16>(bits)));
}

// Two halves of a word as floats, the lower half first.
__device__ __forceinline__ float2 half2_bits(u32 bits) {
    return make_float2(half_bits(bits & 0xffff), half_bits(bits >> 16));
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + expf(-x)); }

// The tanh form (Hendrycks and Gimpel, arXiv:1606.08415).
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
