// The rotation of one pair of a head, for every kernel that applies rotary positions. Knows no
// shape and no cache.
#pragma once

// Sine and cosine of an angle in radians, without the local memory that sincosf needs for large
// ones. The nearest multiple of pi/2 is taken off in three parts (Cody and Waite), each exact or
// rounded once in a fused multiply-add; Taylor series do the rest. For |angle| up to 2^20 both are
// within 8e-8 of the truth (tried on 20 million angles a decade).
__device__ __forceinline__ float2 cos_sin(float angle) {
    float turns = rintf(angle * 0.636619772f);  // quarters of a turn
    float r = fmaf(turns, -1.57079637f, angle);
    r = fmaf(turns, 4.37113883e-8f, r);
    r = fmaf(turns, 1.71512451e-15f, r);
    float s = r * r;
    float sine = fmaf(s, 2.75573192e-6f, -1.98412698e-4f);
    sine = fmaf(s, sine, 8.33333333e-3f);
    sine = fmaf(s, sine, -0.166666667f);
    sine = fmaf(r * s, sine, r);
    float cosine = fmaf(s, -2.75573192e-7f, 2.48015873e-5f);
    cosine = fmaf(s, cosine, -1.38888889e-3f);
    cosine = fmaf(s, cosine, 4.16666667e-2f);
    cosine = fmaf(s, cosine, -0.5f);
    cosine = fmaf(s, cosine, 1.0f);
    int quarter = static_cast<int>(turns) & 3;
    float2 on_axis = quarter & 1 ? make_float2(-sine, cosine) : make_float2(cosine, sine);
    return quarter & 2 ? make_float2(-on_axis.x, -on_axis.y) : on_axis;
}

// Cosine and sine of position * inv_freq, times mscale.
__device__ __forceinline__ float2 turn_of(int position, float inv_freq, float mscale) {
    const float2 cs = cos_sin(__fmul_rn(static_cast<float>(position), inv_freq));
    return make_float2(cs.x * mscale, cs.y * mscale);
}

__device__ __forceinline__ float2 rotate_pair(float a, float b, float2 turn) {
    return make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);
}
