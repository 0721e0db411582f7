// Rotates q and k and stores k, v in the KV cache. See llamagraph/kernels/rope.py.

#include "attention.cuh"
#include "common.cuh"
#include "rope.cuh"

#ifdef KV

using Item = kv::KV::Item;

constexpr int HEADS = 8;  // of one block
constexpr int PAIRS = HEAD_DIM / 2, ROTATED = N_ROT / 2;

// Where the numbers of pair i are: neighbours, or with NEOX in the halves of the rotated part.
__device__ int2 pair_at(int i) {
    return NEOX && i < ROTATED ? make_int2(i, i + ROTATED) : make_int2(2 * i, 2 * i + 1);
}

// A block has one row (x) and HEADS of its heads (y), counted through q, k and v.
extern "C" __global__ void __launch_bounds__(256)
rope_store(float* q, float* k, const float* v, const float* inv_freq, const int* pos,
           const int* n_rows, Item* cache_k, Item* cache_v, float mscale, int n_slots) {
    pdl_launch_dependents();
    pdl_wait();
    const int row = blockIdx.x;
    if (row >= *n_rows) return;
    const int position = *pos + row;
    const size_t slot = static_cast<size_t>(position % n_slots) * N_HEAD_KV;
    for (int p = threadIdx.x; p < HEADS * PAIRS; p += blockDim.x) {
        const int head = blockIdx.y * HEADS + p / PAIRS, i = p % PAIRS;
        const int of_k = head - N_HEAD, of_v = of_k - N_HEAD_KV;
        if (of_v >= N_HEAD_KV) return;
        const int2 at = pair_at(i);
        if (of_v >= 0) {
            const float* x = v + (row * N_HEAD_KV + of_v) * HEAD_DIM;
            Item* to = cache_v + (slot + of_v) * HEAD_DIM;
            to[at.x] = kv::KV::item(x[at.x]), to[at.y] = kv::KV::item(x[at.y]);
            continue;
        }
        float* x = of_k < 0 ? q + (row * N_HEAD + head) * HEAD_DIM
                            : k + (row * N_HEAD_KV + of_k) * HEAD_DIM;
        float2 pair = make_float2(x[at.x], x[at.y]);
        if (i < ROTATED) {
            pair = rotate_pair(pair.x, pair.y, position, inv_freq[i], mscale);
            x[at.x] = pair.x, x[at.y] = pair.y;
        }
        if (of_k >= 0) {
            Item* to = cache_k + (slot + of_k) * HEAD_DIM;
            to[at.x] = kv::KV::item(pair.x), to[at.y] = kv::KV::item(pair.y);
        }
    }
}

#endif
