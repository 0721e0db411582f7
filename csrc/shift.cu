// Keys and values to earlier positions, keys turned back. See llamagraph/kernels/shift.py.

#include "kv.cuh"
#include "rope.cuh"

constexpr int WARPS = 4, ROTATED = N_ROT / 2;

// ---- Number i of a slot, as attention reads it; F32 and BF16 as they are ------------------------

__device__ float number(kv::F32, const u8* slot, int i) {
    return reinterpret_cast<const float*>(slot)[i];
}

__device__ float number(kv::F16, const u8* slot, int i) {
    return __half2float(reinterpret_cast<const __half*>(slot)[i]);
}

__device__ float number(kv::BF16, const u8* slot, int i) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(slot)[i]);
}

// A whole number times its scale, a half.
template <class Type>
__device__ float scaled_number(const u8* slot, int i, int whole) {
    const __half scale = reinterpret_cast<const __half*>(slot + Type::SCALES)[i / 32];
    return __half2float(__float2half_rn(whole * __half2float(scale)));
}

__device__ float number(kv::Q8_0, const u8* slot, int i) {
    return scaled_number<kv::Q8_0>(slot, i, static_cast<signed char>(slot[i]));
}

__device__ float number(kv::Q4_0, const u8* slot, int i) {
    const u32 word = reinterpret_cast<const u32*>(slot)[i / 8];
    const int nibble = word >> (i / 2 % 4 * 4 + i % 2 * 16) & 15;
    return scaled_number<kv::Q4_0>(slot, i, nibble - 8);
}

// ---- The shift ----------------------------------------------------------------------------------

// A warp's load of a head.
__device__ void load_head(float* head, const u8* slot, int of_k) {
    for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32)
        head[d] = number(kv::TYPE_K{}, slot, of_k * HEAD_DIM + d);
    __syncwarp();
}

__device__ void turn_back(float* head, const float* inv_freq, int distance) {
    for (int i = threadIdx.x % 32; i < ROTATED; i += 32) {
        float &a = head[NEOX ? i : 2 * i], &b = head[NEOX ? i + ROTATED : 2 * i + 1];
        const float2 turned = rotate_pair(a, b, turn_of(-distance, inv_freq[i], 1.f));
        a = turned.x, b = turned.y;
    }
    __syncwarp();
}

template <class Word>
__device__ void move_words(u8* to, const u8* from, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
}

// A slot's bytes, by all threads; an unquantised slot may be of any even number.
template <size_t BYTES>
__device__ void move_slot(u8* to, const u8* from) {
    if constexpr (BYTES % 16 == 0)
        move_words<uint4>(to, from, BYTES / 16);
    else
        move_words<u16>(to, from, BYTES / 2);
}

// A block has one position, then the one gridDim.x behind it: heads of keys by warps, and the
// slot of values as it is. No barrier: no slot that is written is read by another block.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
kv_shift(const u8* from_k, const u8* from_v, u8* cache_k, u8* cache_v, const float* inv_freq,
         const int* moved, int n_slots) {
    using K = kv::TYPE_K;
    constexpr size_t V_SLOT = kv::TYPE_V::SLOT;
    __shared__ float heads[WARPS][HEAD_DIM];
    pdl_launch_dependents();
    pdl_wait();
    const int end = moved[1], distance = moved[2], first = max(moved[0], end - n_slots);
    float* head = heads[threadIdx.x / 32];
    for (int position = first + blockIdx.x; position < end; position += gridDim.x) {
        const size_t from = position % n_slots, to = (position - distance) % n_slots;
        for (int h = threadIdx.x / 32; h < N_HEAD_KV; h += WARPS) {
            load_head(head, from_k + from * K::SLOT, h);
            turn_back(head, inv_freq, distance);
            kv::store_head<K>(cache_k + to * K::SLOT, h, head);
            __syncwarp();
        }
        move_slot<V_SLOT>(cache_v + to * V_SLOT, from_v + from * V_SLOT);
    }
}
