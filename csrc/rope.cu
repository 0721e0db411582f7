// Rotates q and k and stores k, v in the KV cache. See llamagraph/kernels/rope.py.

#include "kv.cuh"
#include "rope.cuh"

constexpr int HEADS = 8;  // of one block
constexpr int PAIRS = HEAD_DIM / 2, ROTATED = N_ROT / 2;

// Where the numbers of pair i are: neighbours, or with NEOX in the halves of the rotated part.
__device__ int2 pair_at(int i) {
    return NEOX && i < ROTATED ? make_int2(i, i + ROTATED) : make_int2(2 * i, 2 * i + 1);
}

// Rotates a head into `to`, and in place.
__device__ void rotate_head(float* x, float* to, const float* inv_freq, int position,
                            float mscale) {
    for (int i = threadIdx.x % 32; i < PAIRS; i += 32) {
        const int2 at = pair_at(i);
        float2 pair = make_float2(x[at.x], x[at.y]);
        if (i < ROTATED) {
            pair = rotate_pair(pair.x, pair.y, turn_of(position, inv_freq[i], mscale));
            x[at.x] = pair.x, x[at.y] = pair.y;
        }
        to[at.x] = pair.x, to[at.y] = pair.y;
    }
    __syncwarp();
}

// A block has one row (x) and HEADS of its heads (y), counted through q, k and v: a warp each.
extern "C" __global__ void __launch_bounds__(32 * HEADS)
rope_store(float* q, float* k, const float* v, const float* inv_freq, const int* pos,
           const int* n_rows, u8* cache_k, u8* cache_v, float mscale, int n_slots) {
    __shared__ float heads[HEADS][HEAD_DIM];
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.x;
    if (row >= *n_rows) return;
    const int position = *pos + row, head = blockIdx.y * HEADS + threadIdx.x / 32;
    const int of_k = head - N_HEAD, of_v = of_k - N_HEAD_KV;
    const size_t slot = position % n_slots;
    float* rotated = heads[threadIdx.x / 32];
    if (of_v >= N_HEAD_KV) return;
    if (of_k < 0) {
        rotate_head(q + (row * N_HEAD + head) * HEAD_DIM, rotated, inv_freq, position, mscale);
    } else if (of_v < 0) {
        rotate_head(k + (row * N_HEAD_KV + of_k) * HEAD_DIM, rotated, inv_freq, position, mscale);
        kv::store_head<kv::TYPE_K>(cache_k + slot * kv::TYPE_K::SLOT, of_k, rotated);
    } else {
        kv::store_head<kv::TYPE_V>(cache_v + slot * kv::TYPE_V::SLOT, of_v,
                                   v + (row * N_HEAD_KV + of_v) * HEAD_DIM);
    }
}
