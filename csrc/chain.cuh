// The sampler chain over at most 128 ranked candidates, in one warp: a lane has four of them, the
// likeliest are in lane 0. The steps and their sources are in llamagraph/kernels/sample.py.
//
// Sums are in double, where their order makes no difference that a float could show. Knows nothing
// of the vocabulary.

#pragma once

constexpr int MAX_TOP_K = 128;
constexpr int PER_LANE = MAX_TOP_K / 32;
constexpr float LARGEST = 1e38f;  // stands for infinity, so that differences are never NaN

struct SamplerFloats {  // kernels/step.py: SAMPLER_FLOATS
    float temp, top_p, min_p, typical, repeat_penalty, presence_penalty, frequency_penalty;
};

struct SamplerInts {  // kernels/step.py: SAMPLER_INTS
    int top_k, repeat_last_n;
    unsigned seed_low, seed_high;
    int n_bias;
};

// A logit above the complement of its id: no two are equal, the likelier token has the larger key,
// and 0 is no token at all.
using Key = unsigned long long;

__device__ Key key_of(float logit, int id) {
    logit = fminf(fmaxf(logit, -LARGEST), LARGEST) + 0.0f;  // NaN ranks last, -0 equals 0
    unsigned bits = __float_as_uint(logit);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<Key>(bits) << 32 | ~static_cast<unsigned>(id);
}

__device__ int id_of(Key key) {
    return static_cast<int>(~static_cast<unsigned>(key));
}

__device__ float logit_of(Key key) {
    unsigned bits = static_cast<unsigned>(key >> 32);
    return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

struct Candidates {
    float logit[PER_LANE];
    bool left[PER_LANE];
};

__device__ int lane_index() {
    return threadIdx.x % 32;
}

__device__ double sum_of_lanes(double x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// The sum over the lanes below this one.
__device__ double sum_before(double x) {
    for (int step = 1; step < 32; step *= 2) {
        double below = __shfl_up_sync(~0u, x, step);
        if (lane_index() >= step) x += below;
    }
    double before = __shfl_up_sync(~0u, x, 1);
    return lane_index() ? before : 0;
}

// The index of the first candidate for which `found` is set; one must be.
__device__ int first_where(const bool (&found)[PER_LANE]) {
    int mine = PER_LANE;
    for (int j = PER_LANE - 1; j >= 0; j--) mine = found[j] ? j : mine;
    int lane = __ffs(__ballot_sync(~0u, mine < PER_LANE)) - 1;
    return lane * PER_LANE + __shfl_sync(~0u, mine, lane);
}

// Unnormalised weights exp((logit - top) / temp) of the candidates that are left; the lane's sum.
__device__ double weigh(const Candidates& c, float top, float temp, float (&weight)[PER_LANE]) {
    double sum = 0;
    for (int j = 0; j < PER_LANE; j++) {
        weight[j] = c.left[j] ? expf((c.logit[j] - top) / temp) : 0.0f;
        sum += weight[j];
    }
    return sum;
}

__device__ void probabilities(const Candidates& c, float top, float (&p)[PER_LANE]) {
    float sum = static_cast<float>(sum_of_lanes(weigh(c, top, 1.0f, p)));
    for (int j = 0; j < PER_LANE; j++) p[j] /= sum;
}

// Locally typical: by the distance of the surprise from the entropy, until p is passed.
__device__ void typical(Candidates& c, float p_wanted) {
    __shared__ float distance[MAX_TOP_K], probability[MAX_TOP_K];
    float p[PER_LANE], surprise[PER_LANE];
    probabilities(c, __shfl_sync(~0u, c.logit[0], 0), p);
    double sum = 0;
    for (int j = 0; j < PER_LANE; j++) {
        surprise[j] = -logf(fmaxf(p[j], 1e-38f));
        sum += __fmul_rn(p[j], surprise[j]);
    }
    float entropy = static_cast<float>(sum_of_lanes(sum));
    for (int j = 0; j < PER_LANE; j++) {
        int i = lane_index() * PER_LANE + j;
        distance[i] = c.left[j] ? fabsf(surprise[j] - entropy) : __int_as_float(0x7f800000);
        probability[i] = p[j];
    }
    __syncwarp();
    for (int j = 0; j < PER_LANE; j++) {
        int i = lane_index() * PER_LANE + j;
        double before = 0;
        bool first = true;
#pragma unroll 1
        for (int other = 0; other < MAX_TOP_K; other++) {
            if (distance[other] < distance[i] || (distance[other] == distance[i] && other < i)) {
                before += probability[other];
                first = false;
            }
        }
        c.left[j] = c.left[j] && (first || before <= p_wanted);
    }
}

__device__ void top_p(Candidates& c, int first, float top, float p_wanted) {
    float p[PER_LANE];
    probabilities(c, top, p);
    double own = 0;
    for (int j = 0; j < PER_LANE; j++) own += p[j];
    double before = sum_before(own);
    for (int j = 0; j < PER_LANE; j++) {
        bool is_first = lane_index() * PER_LANE + j == first;
        c.left[j] = c.left[j] && (is_first || before < p_wanted);
        before += p[j];
    }
}

// Philox4x32-10: the first word for a 64-bit key and a 32-bit counter.
__device__ unsigned philox(unsigned k0, unsigned k1, unsigned counter) {
    unsigned c0 = counter, c1 = 0, c2 = 0, c3 = 0;
#pragma unroll 1
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        unsigned high2 = __umulhi(0xCD9E8D57u, c2), low2 = 0xCD9E8D57u * c2;
        c0 = high2 ^ c1 ^ k0, c1 = low2, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}

// The index at which the running sum of weights passes the share u of their sum.
__device__ int draw(const Candidates& c, float top, float temp, double u) {
    float weight[PER_LANE];
    const double own = weigh(c, top, temp, weight);
    double before = sum_before(own);
    double target = u * __shfl_sync(~0u, before + own, 31);
    bool passed[PER_LANE];
    for (int j = 0; j < PER_LANE; j++) {
        before += weight[j];
        passed[j] = before > target;
    }
    return first_where(passed);
}

// The rank of the token that the chain chooses among `best`; for one whole warp.
__device__ int run_chain(const Key* best, const SamplerFloats& s, double u) {
    Candidates c;
    for (int j = 0; j < PER_LANE; j++) {
        Key key = best[lane_index() * PER_LANE + j];
        c.logit[j] = logit_of(key);
        c.left[j] = key != 0;
    }
    if (s.typical < 1) typical(c, s.typical);
    int first = first_where(c.left);
    float top = logit_of(best[first]);
    if (s.top_p < 1) top_p(c, first, top, s.top_p);
    if (s.min_p > 0) {
        float bound = top + logf(fminf(s.min_p, 1.0f));
        for (int j = 0; j < PER_LANE; j++) c.left[j] = c.left[j] && c.logit[j] >= bound;
    }
    return s.temp > 0 ? draw(c, top, s.temp, u) : first;
}
