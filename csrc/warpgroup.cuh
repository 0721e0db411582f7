// What sm_90a has for warpgroups: products of F16 tiles in shared memory with F32 sums, the
// barriers that copies and products wait at, and how registers are shared out. Knows no kernel.
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

struct Barrier {
    u64 state;

    __device__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     :: "r"(shared_address(&state)), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                     :: "r"(shared_address(&state)) : "memory");
    }
    // Arrives when all copies that this thread has started are done.
    __device__ __forceinline__ void arrive_after_copies() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                     :: "r"(shared_address(&state)) : "memory");
    }
    // Once for the warp, when all its lanes have come here.
    __device__ __forceinline__ void arrive_warp() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive();
    }
    // Whether a phase has ended: 0, 1, 0, ..
    __device__ __forceinline__ bool passed(int phase) {
        u32 done;
        asm volatile("{.reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
                     "selp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(shared_address(&state)), "r"(phase) : "memory");
        return done;
    }
    // Waits for its end.
    __device__ __forceinline__ void wait(int phase) {
        asm volatile("{.reg .pred done; AGAIN:"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                     "@done bra DONE; bra AGAIN; DONE:}"
                     :: "r"(shared_address(&state)), "r"(phase) : "memory");
    }
};

// What this thread has written to shared memory, or has seen written by waiting for a barrier, can
// be read by products.
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

#define TO_31                                                                                  \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO_63                                                                                    \
    TO_31 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "   \
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FOUR(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SIXTEEN(c, j) FOUR(c, j), FOUR(c, j + 1), FOUR(c, j + 2), FOUR(c, j + 3)
#define ALL_32(c) SIXTEEN(c, 0), SIXTEEN(c, 4)
#define ALL_64(c) ALL_32(c), SIXTEEN(c, 8), SIXTEEN(c, 12)

// c = a * b^T, or added to c: 64 rows of a and N rows of b, 16 columns of both. Of the result lane
// 4g + t of warp w has rows 16w + g and 16w + g + 8 as of a 16 x 8 product, eight columns after
// eight.
__device__ __forceinline__ void multiply_tiles(float (&c)[8][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" TO_31 "}, "
                 "%32, %33, add, 1, 1, 0, 0;}"
                 : ALL_32(c) : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void multiply_tiles(float (&c)[16][4], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TO_63 "}, "
                 "%64, %65, add, 1, 1, 0, 0;}"
                 : ALL_64(c) : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// c += a * b: a in registers as for `multiply`, b of 16 rows and N columns.
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" TO_31 "}, "
                 "{%32, %33, %34, %35}, %36, add, 1, 1, 1;}"
                 : ALL_32(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_rows(float (&c)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, 1, 0;"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" TO_63 "}, "
                 "{%64, %65, %66, %67}, %68, add, 1, 1, 1;}"
                 : ALL_64(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef TO_31
#undef TO_63
#undef FOUR
#undef SIXTEEN
#undef ALL_32
#undef ALL_64
