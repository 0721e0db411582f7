// What sm_90a has of its own: barriers in shared memory that copies complete, bulk copies, and
// products of a warp group (PTX ISA: mbarrier, cp.async.bulk, wgmma). Knows no weight and no kernel.
#pragma once
#include "mma.cuh"

using u64 = unsigned long long;

// ---- Barriers -----------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

// Barriers that this thread has made can be seen by copies.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives, and lets the barrier wait for so many bytes of copies.
__device__ __forceinline__ void expect_bytes(u32 at, u32 n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(n_bytes)
                 : "memory");
}

// Waits for the end of the phase of that parity. With MOST_TRIES a wait without end is a fault.
__device__ __forceinline__ void wait_for(u32 at, u32 parity) {
    u32 done = 0;
#ifdef MOST_TRIES
    int tries = 0;
#endif
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
#ifdef MOST_TRIES
        if (++tries > MOST_TRIES) {
            printf("block %d thread %d waits for barrier %u, parity %u\n", blockIdx.x, threadIdx.x,
                   at, parity);
            __trap();
        }
#endif
    } while (!done);
}

// Stages of shared memory that are filled and emptied in turn; each has a barrier for either.
template <int Stages>
struct Ring {
    u32 full, empty;  // addresses of the first barriers
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ Ring(u32 barriers) : full(barriers), empty(barriers + 8 * Stages) {}

    __device__ __forceinline__ void init(int producers, int consumers) const {
        for (int i = 0; i < Stages; i++)
            init_barrier(full + 8 * i, producers), init_barrier(empty + 8 * i, consumers);
    }
    __device__ __forceinline__ u32 filled() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 emptied() const { return empty + 8 * stage; }
    __device__ __forceinline__ void wait_filled() const { wait_for(filled(), parity); }
    __device__ __forceinline__ void wait_emptied() const { wait_for(emptied(), parity ^ 1); }
    __device__ __forceinline__ void next() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
};

// ---- Copies -------------------------------------------------------------------------------------

// Starts a copy from global to shared memory, all aligned to 16 bytes, that the barrier counts.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 n_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(n_bytes), "r"(barrier) : "memory");
}

// ---- Clusters -----------------------------------------------------------------------------------

// What all threads of the cluster's blocks have written before can be read behind it, by all.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes to the shared memory of the cluster's block `rank`, at the place that `at` is in this one's.
__device__ __forceinline__ void store_remote(u32 at, int rank, float4 v) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n"
                 "}" ::"r"(at), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_shared(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

// ---- Registers ----------------------------------------------------------------------------------

// All warps of a group give registers back, or take more.
template <int Registers>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- Products of a warp group -------------------------------------------------------------------

__device__ __forceinline__ void open_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Left` of the closed groups still work.
template <int Left>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Names rows of 64 halves in shared memory, 128 bytes each and eight rows aligned to 1024: piece c
// (16 bytes) of row r is at c ^ (r % 8), which is what the 128-byte swizzle wants.
__device__ __forceinline__ u64 rows_at(u32 address) {
    constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 1024 >> 4;
    return (address & 0x3ffff) >> 4 | 1ull << 16 | EIGHT_ROWS << 32 | SWIZZLE_128;
}

#define OPERANDS10(tens)                                                                      \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens  \
    "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define OPERANDS50                                                                            \
    OPERANDS10() OPERANDS10(1) OPERANDS10(2) OPERANDS10(3) OPERANDS10(4)
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define SUMS64(i) SUMS16(i), SUMS16(i + 16), SUMS16(i + 32), SUMS16(i + 48)
#define WGMMA(n, operands, a0, a1, a2, a3, descriptor, ...)                                   \
    asm volatile("{\n"                                                                        \
                 ".reg .pred add;\n"                                                          \
                 "setp.eq.u32 add, 0, 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" operands "}, {%"  \
                 #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #descriptor ", add, 1, 1, 0;\n"     \
                 "}"                                                                          \
                 : __VA_ARGS__                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d += a * b, for 64 rows of A in registers (as in mma.cuh, warp w has rows 16w on) and N rows of
// B in shared memory, 16 columns. Lane 4g + t has d[4j + 2i + e] of row g + 8i and column
// 8j + 2t + e. The registers of `a` are read until the group has ended.
template <int N>
__device__ __forceinline__ void multiply_group(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
    if constexpr (N == 8) {
        WGMMA(8, "%0, %1, %2, %3", 4, 5, 6, 7, 8, SUMS4(0));
    } else if constexpr (N == 16) {
        WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10, 11, 12, SUMS4(0), SUMS4(4));
    } else if constexpr (N == 32) {
        WGMMA(32, OPERANDS10() "%10, %11, %12, %13, %14, %15", 16, 17, 18, 19, 20, SUMS16(0));
    } else if constexpr (N == 64) {
        WGMMA(64, OPERANDS10() OPERANDS10(1) OPERANDS10(2) "%30, %31", 32, 33, 34, 35, 36,
              SUMS16(0), SUMS16(16));
    } else if constexpr (N == 128) {
        WGMMA(128, OPERANDS50 OPERANDS10(5) "%60, %61, %62, %63", 64, 65, 66, 67, 68, SUMS64(0));
    } else {
        static_assert(N == 256, "rows of a tile");
        WGMMA(256,
              OPERANDS50 OPERANDS10(5) OPERANDS10(6) OPERANDS10(7) OPERANDS10(8) OPERANDS10(9)
              OPERANDS10(10) OPERANDS10(11)
              "%120, %121, %122, %123, %124, %125, %126, %127",
              128, 129, 130, 131, 132, SUMS64(0), SUMS64(64));
    }
}

#undef OPERANDS10
#undef OPERANDS50
#undef SUMS4
#undef SUMS16
#undef SUMS64
#undef WGMMA
