// A weight's bytes from the file's order into tiles (tiles.cuh), once, when a model is loaded.
// Reference: llamagraph/kernels/repack.py.
#include "common.cuh"

// Where byte `at` of a unit is among the unit's bytes in the file.
__device__ __forceinline__ int source_of(int at, int blocks, int head, int high, int quants) {
    const int block_bytes = head + high + quants;
    if (at < blocks * quants) return at / quants * block_bytes + head + high + at % quants;
    at -= blocks * quants;
    if (at < blocks * high) return at / high * block_bytes + head + at % high;
    at -= blocks * high;
    return at / head * block_bytes + at % head;
}

// A thread brings one lane's unit.
extern "C" __global__ void __launch_bounds__(256)
repack(const u8* raw, u8* stored, int n_out, int n_units, int rows, int blocks, int head, int high,
       int quants) {
    pdl_launch_dependents();
    pdl_wait();
    const int index = blockIdx.x * 256 + threadIdx.x, in_group = rows * n_units;
    const int group = index / in_group, tile = index % in_group / 32;
    if (group * rows >= n_out) return;
    const int lanes = min(32, in_group - tile * 32), lane = index % in_group - tile * 32;
    const int row = group * rows + lane % rows, unit = tile * (32 / rows) + lane / rows;
    const int unit_bytes = blocks * (head + high + quants);
    const u8* from = raw + (static_cast<size_t>(row) * n_units + unit) * unit_bytes;
    u8* to = stored + (static_cast<size_t>(group) * in_group + tile * 32) * unit_bytes;
    for (int at = 0, size = 16; at < unit_bytes; at += size) {
        while (at + size > unit_bytes) size /= 2;
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < size && row < n_out)
                words[i / 4] |= from[source_of(at + i, blocks, head, high, quants)] << (i % 4 * 8);
        u8* piece = to + at * lanes + lane * size;
        if (size == 16)
            *reinterpret_cast<uint4*>(piece) = make_uint4(words[0], words[1], words[2], words[3]);
        else if (size == 8) *reinterpret_cast<uint2*>(piece) = make_uint2(words[0], words[1]);
        else if (size == 4) *reinterpret_cast<u32*>(piece) = words[0];
        else *reinterpret_cast<u16*>(piece) = words[0];
    }
}
