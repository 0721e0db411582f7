// The end of a step that repeats itself. See llamagraph/kernels/loop.py. A file of its own, because
// a driver before CUDA 12.4 does not load what calls cudaGraphSetConditional.

#include "common.cuh"

// The device runtime's: sets the condition of the graph that the calling kernel is part of.
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned value);

// One warp. No earlier kernel writes `ends`, `stop` and the handle: they are on their way before
// the step is done, `stop` from the host's memory.
extern "C" __global__ void loop_control(const int* pos, const int* tokens, const int* ends,
                                        const int* stop, u32* condition) {
    pdl_launch_dependents();
    const int lane = threadIdx.x, until = ends[0], n_eog = ends[1];
    const int stopped = *static_cast<const volatile int*>(stop);
    const unsigned long long handle =
        condition[0] | static_cast<unsigned long long>(condition[1]) << 32;
    pdl_wait();
    const int position = __ldcg(pos), token = __ldcg(tokens + position);
    bool last = position >= until || stopped;
    for (int i = lane; i < n_eog; i += 32) last |= ends[2 + i] == token;
    last = __any_sync(~0u, last);
    if (lane > 0) return;
    condition[2] = !last;
    if (handle) cudaGraphSetConditional(handle, !last);
}
