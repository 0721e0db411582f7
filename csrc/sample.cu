// The choice of the next token: the steps and their sources are in llamagraph/kernels/sample.py.
//
// Each block ranks its slice of the vocabulary. The block that finishes last ranks what the others
// left, and one of its warps runs the chain (chain.cuh).

#include "chain.cuh"
#include "common.cuh"

constexpr int THREADS = 512;
constexpr int SLICE = 4096;  // logits a block

// True in every thread of the block that comes last; what the other blocks wrote is then visible.
__device__ bool is_last_block(unsigned* counter) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = arrive(counter) == gridDim.x - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

// `published` is host memory: the host sees the token, as its id + 1, while later steps run.
__device__ void end_step(int* pos, int* n_rows, int* tokens, int* published, int token) {
    int next = *pos + *n_rows;
    tokens[next] = token;
    *pos = next;
    *n_rows = 1;
    *static_cast<volatile int*>(published + next) = token + 1;
}

// The largest key of the block, in thread 0.
__device__ Key block_best(Key key) {
    __shared__ Key warps[THREADS / 32];
    for (int step = 16; step > 0; step /= 2) {
        key = max(key, __shfl_xor_sync(~0u, key, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x < 32) {
        key = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
        for (int step = THREADS / 64; step > 0; step /= 2) {
            key = max(key, __shfl_xor_sync(~0u, key, step));
        }
    }
    return key;
}

// Reads n logits and adds the bias. Without any a thread may use at once what it has read itself.
__device__ void read_slice(float* slice, const float* logits, int first, int n, const int* ids,
                           const float* values, int n_bias) {
#pragma unroll
    for (int j = 0; j < SLICE; j += THREADS) {
        int i = j + threadIdx.x;
        if (i < n) slice[i] = __ldcg(logits + first + i);
    }
    if (n_bias == 0) return;
    __syncthreads();
    for (int i = threadIdx.x; i < n_bias; i += THREADS) {
        int at = ids[i] - first;
        if (at >= 0 && at < n) slice[at] += values[i];
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
choose_greedy(const float* logits, const SamplerInts* sampler_ints, const int* bias_ids,
              const float* bias_values, Key* partials, unsigned* counters, int* pos, int* n_rows,
              int* tokens, int* published, int n_vocab) {
    __shared__ float slice[SLICE];
    pdl_launch_dependents();
    pdl_wait();
    const int first = blockIdx.x * SLICE, n = min(SLICE, n_vocab - first);
    read_slice(slice, logits, first, n, bias_ids, bias_values, sampler_ints->n_bias);
    Key best = 0;
#pragma unroll
    for (int j = 0; j < SLICE; j += THREADS) {
        int i = j + threadIdx.x;
        if (i < n) best = max(best, key_of(slice[i], first + i));
    }
    best = block_best(best);
    if (threadIdx.x == 0) partials[blockIdx.x] = best;
    if (!is_last_block(counters)) return;
    best = threadIdx.x < gridDim.x ? __ldcg(partials + threadIdx.x) : 0;
    best = block_best(best);
    if (threadIdx.x == 0) end_step(pos, n_rows, tokens, published, id_of(best));
}

// ---- The k best of many keys ----

// The bits of the upper word above all in which two threads' keys differ, and the highest of those.
// Where they agree there is nothing to count.
__device__ unsigned equal_bits(unsigned word, unsigned& highest) {
    __shared__ unsigned most[THREADS / 32], least[THREADS / 32];
    unsigned high = word, low = word;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        high = max(high, __shfl_xor_sync(~0u, high, step));
        low = min(low, __shfl_xor_sync(~0u, low, step));
    }
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = high, least[threadIdx.x / 32] = low;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) high = max(high, most[i]), low = min(low, least[i]);
    highest = high == low ? 0 : 1u << (31 - __clz(high ^ low));
    return high == low ? high : high & ~(2 * highest - 1);
}

// The largest bound that the best keys of k threads reach (0 where fewer threads have any), or a
// smaller one that just as many threads reach.
__device__ Key bound_for(Key best, int k) {
    unsigned bit;
    const unsigned word = best >> 32;
    unsigned bound = equal_bits(word, bit);
#pragma unroll 1
    for (; bit; bit >>= 1) {
        const int reached = __syncthreads_count(word >= (bound | bit));
        if (reached >= k) bound |= bit;
        if (reached == k) return static_cast<Key>(bound) << 32;
    }
    Key whole = static_cast<Key>(bound) << 32;  // equal logits: the ids decide
#pragma unroll 1
    for (Key low = 1ull << 31; low; low >>= 1) {
        const int reached = __syncthreads_count(best >= (whole | low));
        if (reached >= k) whole |= low;
        if (reached == k) break;
    }
    return whole;
}

// Writes the k largest of get(0..n) to `best`, largest first, and zeros where there are fewer.
// A thread looks at every THREADS-th key, and keeps the first few. The best keys of k threads reach
// a bound, so no key below it counts, and the keys that do are all in those k threads: `list` must
// hold k * ceil(n / THREADS).
template <class Get>
__device__ void k_best(int n, Get get, int k, Key* list, Key* best) {
    constexpr int KEPT = 8;
    __shared__ int n_listed;
    if (threadIdx.x == 0) n_listed = 0;
    if (threadIdx.x < MAX_TOP_K) best[threadIdx.x] = 0;
    Key kept[KEPT], mine = 0;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = j * THREADS + threadIdx.x;
        kept[j] = i < n ? get(i) : 0;
        mine = max(mine, kept[j]);
    }
#pragma unroll 1
    for (int i = KEPT * THREADS + threadIdx.x; i < n; i += THREADS) mine = max(mine, get(i));
    const Key bound = max(bound_for(mine, k), static_cast<Key>(1));
    __syncthreads();
    if (mine >= bound) {
#pragma unroll
        for (int j = 0; j < KEPT; j++)
            if (kept[j] >= bound) list[atomicAdd(&n_listed, 1)] = kept[j];
#pragma unroll 1
        for (int i = KEPT * THREADS + threadIdx.x; i < n; i += THREADS) {
            const Key key = get(i);
            if (key >= bound) list[atomicAdd(&n_listed, 1)] = key;
        }
    }
    __syncthreads();
    const int n_kept = n_listed;
    for (int i = threadIdx.x; i < n_kept; i += THREADS) {
        const Key key = list[i];
        int rank = 0;
#pragma unroll 8
        for (int j = 0; j < n_kept; j++) rank += list[j] > key;
        if (rank < k) best[rank] = key;
    }
    __syncthreads();
}

// The penalties for the tokens of the window; `counts` is room for one number a logit.
__device__ void penalise(float* slice, int* counts, int first, int n, const int* window,
                         int n_window, const SamplerFloats& s) {
    for (int i = threadIdx.x; i < n; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n_window; i += THREADS) {
        int at = window[i] - first;
        if (at >= 0 && at < n) atomicAdd(counts + at, 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        if (counts[i] == 0) continue;
        float x = slice[i];
        x = x > 0 ? x / s.repeat_penalty : x * s.repeat_penalty;
        // Rounded after each operation, as numpy does.
        float often = __fmul_rn(static_cast<float>(counts[i]), s.frequency_penalty);
        slice[i] = __fsub_rn(x, __fadd_rn(often, s.presence_penalty));
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
choose_chain(const float* logits, const SamplerFloats* sampler_floats,
             const SamplerInts* sampler_ints, const int* bias_ids, const float* bias_values,
             Key* partials, unsigned* counters, int* pos, int* n_rows, int* tokens,
             int* published, int n_vocab) {
    __shared__ Key room[SLICE];  // first the slice's logits and its counts of recent tokens
    __shared__ Key best[MAX_TOP_K];
    float* slice = reinterpret_cast<float*>(room);
    int* counts = reinterpret_cast<int*>(room + SLICE / 2);
    pdl_launch_dependents();
    pdl_wait();
    const SamplerFloats s = *sampler_floats;
    const SamplerInts ints = *sampler_ints;
    const int where = *pos + *n_rows;
    // Without a draw and without `typical` the likeliest wins, whatever else is left.
    const bool greedy = s.temp <= 0 && s.typical >= 1;
    const int k = greedy ? 1 : ints.top_k > 0 ? min(ints.top_k, MAX_TOP_K) : MAX_TOP_K;

    const int first = blockIdx.x * SLICE, n = min(SLICE, n_vocab - first);
    read_slice(slice, logits, first, n, bias_ids, bias_values, ints.n_bias);
    const unsigned word = philox(ints.seed_low, ints.seed_high, where);
    __syncthreads();
    const int n_window = ints.repeat_last_n < 0 ? where : min(where, ints.repeat_last_n);
    const bool penalties =
        s.repeat_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
    if (penalties && n_window > 0) {
        penalise(slice, counts, first, n, tokens + where - n_window, n_window, s);
    }
    k_best(n, [=](int i) { return key_of(slice[i], first + i); }, k, room + SLICE / 2, best);
    if (threadIdx.x < k) partials[blockIdx.x * k + threadIdx.x] = best[threadIdx.x];
    if (!is_last_block(counters)) return;

    k_best(gridDim.x * k, [=](int i) { return __ldcg(partials + i); }, k, room, best);
    if (threadIdx.x >= 32) return;
    int rank = run_chain(best, s, (word >> 8) * 0x1p-24);
    if (threadIdx.x == 0) end_step(pos, n_rows, tokens, published, id_of(best[rank]));
}
