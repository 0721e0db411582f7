// Reads memory from end to end and does next to nothing with it, to see how fast it can be read:
// the floor under every kernel that is bound by its weights. llamagraph/kernels/probe.py has the
// meaning in numpy.

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 8;  // 16-byte loads of a thread that are under way at once
constexpr int BLOCKS_PER_SM = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
fill_words(u32* words, int n_words) {
    pdl_launch_dependents();
    pdl_wait();
    const size_t step = static_cast<size_t>(gridDim.x) * THREADS;
    for (size_t i = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x; i < n_words; i += step)
        words[i] = static_cast<u32>(i) * 2654435761u;
}

// A round is a tile of THREADS * LOADS loads for each block; blocks take neighbouring tiles.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
read_all(const uint4* data, u32* out, int n_rounds) {
    __shared__ u32 warps[THREADS / 32];
    pdl_launch_dependents();
    pdl_wait();
    const size_t tile = THREADS * LOADS;
    const uint4* p = data + blockIdx.x * tile + threadIdx.x;
    u32 sum = 0;
#pragma unroll 1
    for (int round = 0; round < n_rounds; round++, p += gridDim.x * tile) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) v[i] = __ldcs(p + i * THREADS);  // read once: no cache
#pragma unroll
        for (int i = 0; i < LOADS; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += warps[i];
    out[blockIdx.x] = sum;
}

// The time, once all that was launched before is done.
extern "C" __global__ void stamp(unsigned long long* times, u32* count) {
    pdl_launch_dependents();
    pdl_wait();
    if (threadIdx.x != 0) return;
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    const u32 i = *count;
    times[i] = now;
    *count = i + 1;
}
