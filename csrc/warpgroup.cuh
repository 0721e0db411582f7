// What sm_90a has for warpgroups: products of F16 tiles with F32 sums, the barriers that copies and
// products wait at, clusters, and how registers are shared out (PTX ISA: wgmma, mbarrier,
// cp.async.bulk). Knows no weight and no kernel.
//
// A tile is in panels of 64 halves a row: row r of a panel is 128 bytes in which the sixteen-byte
// piece c lies at c ^ (r % 8). Panels are aligned to 1024 bytes (PTX ISA, wgmma, 128-byte swizzle).
#pragma once
#include "mma.cuh"

using u64 = unsigned long long;

constexpr int PANEL = 64, PANEL_ROW = 128;  // halves, bytes

// Where piece c (eight halves) of a row of a panel lies, in bytes from the panel's first.
__device__ __forceinline__ int swizzled(int row, int c) {
    return row * PANEL_ROW + (c ^ row % 8) * 16;
}

// ---- Barriers -----------------------------------------------------------------------------------

// One of 8 bytes in shared memory, by its address.
struct Barrier {
    u32 at;

    __device__ __forceinline__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
    }
    // Arrives, and lets the barrier wait for so many bytes that are copied or stored there.
    __device__ __forceinline__ void arrive_expecting(u32 n_bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(at), "r"(n_bytes) : "memory");
    }
    // Arrives when all copies that this thread has started are done.
    __device__ __forceinline__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at) : "memory");
    }
    // Once for the warp, when all its lanes have come here.
    __device__ __forceinline__ void arrive_warp() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive();
    }
    // Whether a phase has ended: 0, 1, 0, ..
    __device__ __forceinline__ bool passed(int phase) const {
        u32 done;
        asm volatile("{.reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
                     "selp.u32 %0, 1, 0, done;}" : "=r"(done) : "r"(at), "r"(phase) : "memory");
        return done;
    }
    // Waits for its end.
    __device__ __forceinline__ void wait(int phase) const {
        u32 done;
        do {
            asm volatile("{.reg .pred done; "
                         "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;"
                         "selp.u32 %0, 1, 0, done;}" : "=r"(done) : "r"(at), "r"(phase) : "memory");
        } while (!done);
    }
    // The same for those that other blocks of the cluster arrive at: what they have written before
    // can be read.
    __device__ __forceinline__ void wait_for_others(int phase) const {
        u32 done;
        do {
            asm volatile("{.reg .pred done; "
                         "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;"
                         "selp.u32 %0, 1, 0, done;}" : "=r"(done) : "r"(at), "r"(phase) : "memory");
        } while (!done);
    }
    // Once for the warp, at the barrier that is there in the cluster's block `rank`.
    __device__ __forceinline__ void arrive_warp_at(int rank) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
                         "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];}"
                         :: "r"(at), "r"(rank) : "memory");
    }
};

// Barriers that this thread has made can be seen by copies and by other blocks.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy from global to shared memory, all aligned to 16 bytes, that the barrier counts.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 n_bytes, Barrier barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(n_bytes), "r"(barrier.at) : "memory");
}

// What this thread has written to shared memory, or has seen written by waiting for a barrier, can
// be read by products, and written by copies.
__device__ __forceinline__ void fence_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at a named barrier without waiting.
__device__ __forceinline__ void barrier_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(name), "r"(threads) : "memory");
}

template <int N>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}
template <int N>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

// ---- Clusters -----------------------------------------------------------------------------------

// What all threads of the cluster's blocks have written before can be read behind it, by all.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Starts writing to the shared memory of the cluster's block `rank`, where `at` is in this one's;
// the barrier that is there counts the 16 bytes, like those of a copy.
__device__ __forceinline__ void store_remote(u32 at, int rank, float4 v, Barrier barrier) {
    asm volatile("{.reg .b32 remote, barrier; mapa.shared::cluster.u32 remote, %0, %2;"
                 "mapa.shared::cluster.u32 barrier, %1, %2;"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[remote], {%3, %4, %5, %6}, [barrier];}"
                 :: "r"(at), "r"(barrier.at), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

// ---- Products -----------------------------------------------------------------------------------

// Registers that products read or add to are as the program left them.
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until no more than N groups are under way.
template <int N>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Describes a tile in panels. `along`: bytes from panel to panel, where the operand spans several.
__device__ __forceinline__ u64 tile_at(u32 address, int along = 16) {
    return address >> 4 | static_cast<u64>(along >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

#define TEN(tens)                                                                             \
    "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, "                        \
    "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define TO_29 TEN() TEN(1) TEN(2)
#define TO_59 TO_29 TEN(3) TEN(4) TEN(5)
#define TO_119 TO_59 TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11)
#define SUMS_4 "%0, %1, %2, %3"
#define SUMS_8 SUMS_4 ", %4, %5, %6, %7"
#define SUMS_16 TEN() "%10, %11, %12, %13, %14, %15"
#define SUMS_32 TO_29 "%30, %31"
#define SUMS_64 TO_59 "%60, %61, %62, %63"
#define SUMS_128 TO_119 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FOUR(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define EIGHT(j) FOUR(j), FOUR(j + 1)
#define SIXTEEN(j) EIGHT(j), EIGHT(j + 2)
#define ALL_32 SIXTEEN(0), SIXTEEN(4)
#define ALL_64 ALL_32, SIXTEEN(8), SIXTEEN(12)
#define ALL_128 ALL_64, SIXTEEN(16), SIXTEEN(20), SIXTEEN(24), SIXTEEN(28)

// The instruction for n columns of the sum, whose registers' names are `sums`.
#define WGMMA(n, sums, operands)                                                               \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" sums "}, " operands ";}"
#define TILES(n, sums, at_a, at_b, at_add, ...)                                                \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" #at_add ", 0;"                          \
                 WGMMA(n, sums, "%" #at_a ", %" #at_b ", add, 1, 1, 0, 0")                     \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define ROWS(n, sums, a0, a1, a2, a3, at_b, by_rows, ...)                                      \
    asm volatile("{.reg .pred add; setp.ne.b32 add, 1, 0;"                                     \
                 WGMMA(n, sums, "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at_b            \
                                ", add, 1, 1, %" #by_rows)                                     \
                 : __VA_ARGS__                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(ByRows)))

// c = a * b^T, or added to c: 64 rows of a and N rows of b, 16 columns of both. Of the result lane
// 4g + t of warp w has rows 16w + g and 16w + g + 8 as of a 16 x 8 product, eight columns after
// eight.
template <int Eights>
__device__ __forceinline__ void multiply_tiles(float (&c)[Eights][4], u64 a, u64 b, bool add) {
    if constexpr (Eights == 8) {
        TILES(64, SUMS_32, 32, 33, 34, ALL_32);
    } else {
        static_assert(Eights == 16, "columns of a product");
        TILES(128, SUMS_64, 64, 65, 66, ALL_64);
    }
}

// c += a * b^T, the same with a in registers, 16 rows a warp as for `multiply`; they are read until
// the group has ended. ByRows: c += a * b, with b of 16 rows and N columns.
template <bool ByRows = false, int Eights>
__device__ __forceinline__ void multiply_rows(float (&c)[Eights][4], const u32 (&a)[4], u64 b) {
    if constexpr (Eights == 1) {
        ROWS(8, SUMS_4, 4, 5, 6, 7, 8, 9, FOUR(0));
    } else if constexpr (Eights == 2) {
        ROWS(16, SUMS_8, 8, 9, 10, 11, 12, 13, EIGHT(0));
    } else if constexpr (Eights == 4) {
        ROWS(32, SUMS_16, 16, 17, 18, 19, 20, 21, SIXTEEN(0));
    } else if constexpr (Eights == 8) {
        ROWS(64, SUMS_32, 32, 33, 34, 35, 36, 37, ALL_32);
    } else if constexpr (Eights == 16) {
        ROWS(128, SUMS_64, 64, 65, 66, 67, 68, 69, ALL_64);
    } else {
        static_assert(Eights == 32, "columns of a product");
        ROWS(256, SUMS_128, 128, 129, 130, 131, 132, 133, ALL_128);
    }
}

#undef TEN
#undef TO_29
#undef TO_59
#undef TO_119
#undef SUMS_4
#undef SUMS_8
#undef SUMS_16
#undef SUMS_32
#undef SUMS_64
#undef SUMS_128
#undef FOUR
#undef EIGHT
#undef SIXTEEN
#undef ALL_32
#undef ALL_64
#undef ALL_128
#undef WGMMA
#undef TILES
#undef ROWS
