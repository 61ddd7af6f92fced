// What the kernels need of vectors beyond simd.h: whole numbers, fp8, powers of two, logarithms, and the activations with
// a small relative error. Like simd.h's, each function does the same to every lane.
#pragma once

#include "simd.h"

namespace mainspring {

struct fp8 {  // float8_e4m3fn
    uint8_t bits;
};

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float INFINITE = __builtin_inff();

// ---------------------------------------------------------------- I32: a vector of LANES int32

#if MAINSPRING_AVX512

inline I32 iset(int32_t x) { return _mm512_set1_epi32(x); }
inline I32 iadd(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
inline I32 isub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
inline I32 imul(I32 a, I32 b) { return _mm512_mullo_epi32(a, b); }
inline I32 iand(I32 a, I32 b) { return _mm512_and_si512(a, b); }
inline I32 ior(I32 a, I32 b) { return _mm512_or_si512(a, b); }
inline I32 ixor(I32 a, I32 b) { return _mm512_xor_si512(a, b); }
template <int N>
inline I32 ishr(I32 a) {  // shifts in zeros
    return _mm512_srli_epi32(a, N);
}
template <int N>
inline I32 ishl(I32 a) {
    return _mm512_slli_epi32(a, N);
}
inline I32 iload(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void istore(int32_t* p, I32 a) { _mm512_storeu_si512(p, a); }
inline I32 ramp() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline I32 bits_of(F32 a) { return _mm512_castps_si512(a); }
inline F32 from_bits(I32 a) { return _mm512_castsi512_ps(a); }
inline I32 where_less(I32 a, I32 b, I32 yes, I32 no) {  // signed
    return _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(a, b), no, yes);
}
inline F32 where_less(I32 a, I32 b, F32 yes, F32 no) {
    return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(a, b), no, yes);
}
inline I32 where_less_i(F32 a, F32 b, I32 yes, I32 no) {
    return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline unsigned less_bits(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline unsigned equal_bits(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline F32 unsigned_to_float(I32 a) { return _mm512_cvtepu32_ps(a); }
inline I32 to_int(F32 a) { return _mm512_cvttps_epi32(a); }  // towards zero
inline float first_lane(F32 a) { return _mm512_cvtss_f32(a); }
inline void interleave(F32& a, F32& b) {  // a0 b0 a1 b1 …
    const I32 first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const F32 low = _mm512_permutex2var_ps(a, first, b);
    b = _mm512_permutex2var_ps(a, iadd(first, iset(8)), b), a = low;
}

inline I32 widen_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline I32 widen_bytes_n(const void* p, int n) { return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)); }
inline void narrow_to_bytes_n(void* p, I32 a, int n) { _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), a); }

#elif MAINSPRING_AVX2

inline I32 iset(int32_t x) { return _mm256_set1_epi32(x); }
inline I32 iadd(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
inline I32 isub(I32 a, I32 b) { return _mm256_sub_epi32(a, b); }
inline I32 imul(I32 a, I32 b) { return _mm256_mullo_epi32(a, b); }
inline I32 iand(I32 a, I32 b) { return _mm256_and_si256(a, b); }
inline I32 ior(I32 a, I32 b) { return _mm256_or_si256(a, b); }
inline I32 ixor(I32 a, I32 b) { return _mm256_xor_si256(a, b); }
template <int N>
inline I32 ishr(I32 a) {
    return _mm256_srli_epi32(a, N);
}
template <int N>
inline I32 ishl(I32 a) {
    return _mm256_slli_epi32(a, N);
}
inline I32 iload(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void istore(int32_t* p, I32 a) { _mm256_storeu_si256((__m256i*)p, a); }
inline I32 ramp() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline I32 bits_of(F32 a) { return _mm256_castps_si256(a); }
inline F32 from_bits(I32 a) { return _mm256_castsi256_ps(a); }
inline I32 where_less(I32 a, I32 b, I32 yes, I32 no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(b, a)); }
inline F32 where_less(I32 a, I32 b, F32 yes, F32 no) {
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)));
}
inline I32 where_less_i(F32 a, F32 b, I32 yes, I32 no) {
    return _mm256_blendv_epi8(no, yes, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
inline unsigned less_bits(F32 a, F32 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
inline unsigned equal_bits(F32 a, F32 b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline F32 unsigned_to_float(I32 a) {  // rounded once: the upper 16 bits times 2^16 are exact, and so are the lower
    const F32 high = to_float(_mm256_srli_epi32(a, 16)), low = to_float(_mm256_and_si256(a, iset(0xffff)));
    return fma(high, set(65536.0f), low);
}
inline I32 to_int(F32 a) { return _mm256_cvttps_epi32(a); }
inline float first_lane(F32 a) { return _mm256_cvtss_f32(a); }
inline void interleave(F32& a, F32& b) {
    const F32 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20), b = _mm256_permute2f128_ps(low, high, 0x31);
}

inline I32 widen_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline I32 widen_bytes_n(const void* p, int n) {
    uint8_t bytes[LANES] = {};
    std::memcpy(bytes, p, n < LANES ? n : LANES);
    return widen_bytes(bytes);
}
inline void narrow_to_bytes_n(void* p, I32 a, int n) {
    int32_t lanes[LANES];
    istore(lanes, a);
    for (int i = 0; i < n && i < LANES; ++i) ((uint8_t*)p)[i] = (uint8_t)lanes[i];
}

#endif

// ---------------------------------------------------------------- fp8 (e4m3fn: no infinity, one NaN, largest 448)

inline F32 from_fp8(I32 byte) {
    const I32 magnitude = iand(byte, iset(0x7f)), sign = ishl<24>(iand(byte, iset(0x80)));
    const F32 normal = from_bits(iadd(ishl<20>(magnitude), iset(120 << 23)));
    const F32 small = mul(to_float(magnitude), set(0x1p-9f));
    const F32 finite = where_less(magnitude, iset(8), small, normal);
    const F32 value = where_less(magnitude, iset(0x7f), finite, set(__builtin_nanf("")));
    return from_bits(ior(bits_of(value), sign));
}
inline F32 load(const fp8* p) { return from_fp8(widen_bytes(p)); }
inline F32 load_n(const fp8* p, int n) { return from_fp8(widen_bytes_n(p, n)); }

// To nearest even; what is beyond 448 becomes 448.
inline I32 to_fp8(F32 a) {
    const I32 bits = bits_of(a), sign = ishr<24>(iand(bits, iset((int)0x80000000)));
    const F32 magnitude = from_bits(iand(bits, iset(0x7fffffff)));
    const F32 bound = min(magnitude, set(448.0f));
    const I32 wide = bits_of(bound), odd = iand(ishr<20>(wide), iset(1));
    const I32 normal = ishr<20>(iadd(iadd(wide, iset(0x7ffff - (120 << 23))), odd));
    const I32 small = isub(bits_of(add(bound, set(0x1p14f))), bits_of(set(0x1p14f)));  // the sum rounds to 2^-9
    const I32 finite = where_less_i(bound, set(0x1p-6f), small, normal);
    const I32 infinity = bits_of(set(INFINITE));
    return ior(where_less(infinity, iand(bits, iset(0x7fffffff)), iset(0x7f), finite), sign);
}
inline void store_n(fp8* p, F32 a, int n) { narrow_to_bytes_n(p, to_fp8(a), n); }
inline void store(fp8* p, F32 a) { store_n(p, a, LANES); }

// ---------------------------------------------------------------- functions

// 2^x for x up to 127, exactly 1 at 0 and exactly 0 from -127 down; NaN stays NaN. Adding 1.5 * 2^23 leaves the nearest
// whole number n in the lowest bits, whence it goes into the exponent; 2^r for the rest, |r| <= 1/2, by a minimax polynomial
// that is 1 at 0.
template <int TERMS>
inline F32 exp2_by(const float (&terms)[TERMS], F32 x) {
    const F32 magic = set(0x1.8p23f);
    x = max(set(-127.0f), x);
    const F32 shifted = add(x, magic), r = sub(x, sub(shifted, magic));
    F32 p = set(terms[0]);
    for (int i = 1; i < TERMS; ++i) p = fma(p, r, set(terms[i]));
    return from_bits(iadd(bits_of(p), ishl<23>(bits_of(shifted))));
}
inline F32 exp2(F32 x) {  // off by at most 2e-7 of the result
    constexpr float TERMS[] = {1.326472690e-03f, 9.671512661e-03f, 5.550733744e-02f, 2.402224208e-01f, 6.931469776e-01f, 1};
    return exp2_by(TERMS, x);
}
inline F32 exp2_coarse(F32 x) {  // off by at most 3e-6: for what is rounded to bf16 next
    constexpr float TERMS[] = {9.582852867e-03f, 5.590642492e-02f, 2.402409862e-01f, 6.931241934e-01f, 1};
    return exp2_by(TERMS, x);
}

inline float exp2_of(float x) { return first_lane(exp2(set(x))); }

// tanh by Cephes' tanhf: its polynomial near 0, where 1 - 2 / (e^2x + 1) would lose its digits.
inline F32 tanh_precise(F32 x) {
    const F32 z = mul(x, x), size = abs(x);
    F32 p = set(-5.70498872745e-3f);
    p = fma(p, z, set(2.06390887954e-2f));
    p = fma(p, z, set(-5.37397155531e-2f));
    p = fma(p, z, set(1.33314422036e-1f));
    p = fma(p, z, set(-3.33332819422e-1f));
    return where_less(size, set(0.625f), fma(mul(p, z), x, x), tanh(x));
}

// The natural logarithm of normal numbers above 0, off by about 1 ulp (Cephes' logf); of 0: -87.3.
inline F32 log(F32 x) {
    const I32 bits = bits_of(max(x, set(0x1p-126f)));
    // x = m * 2^e with m in [sqrt 1/2, sqrt 2)
    const I32 shifted = isub(bits, iset(0x3f3504f3));
    const F32 e = to_float(isub(ishr<23>(iadd(shifted, iset(128 << 23))), iset(128)));
    const F32 m = from_bits(iadd(iand(shifted, iset(0x007fffff)), iset(0x3f3504f3)));
    const F32 f = sub(m, set(1.0f)), z = mul(f, f);
    F32 p = set(7.0376836292e-2f);
    p = fma(p, f, set(-1.1514610310e-1f));
    p = fma(p, f, set(1.1676998740e-1f));
    p = fma(p, f, set(-1.2420140846e-1f));
    p = fma(p, f, set(1.4249322787e-1f));
    p = fma(p, f, set(-1.6668057665e-1f));
    p = fma(p, f, set(2.0000714765e-1f));
    p = fma(p, f, set(-2.4999993993e-1f));
    p = fma(p, f, set(3.3333331174e-1f));
    F32 y = mul(mul(p, f), z);
    y = fma(e, set(-2.12194440e-4f), y);
    y = fnma(set(0.5f), z, y);
    return fma(e, set(0.693359375f), add(f, y));
}

// -log(1 - u) for 0 < u < 1, to a few ulp also where u is tiny: log(w) for the rounded w = 1 - u, and what it missed.
inline F32 minus_log_of_rest(F32 u) {
    const F32 w = sub(set(1.0f), u);
    const F32 missed = sub(sub(set(1.0f), w), u);  // exact: log(1 - u) = log(w) + log(1 + missed / w)
    return sub(zero(), add(log(w), div(missed, w)));
}

// x times the normal distribution's integral, through erfc, whose error is relative (Press et al., Numerical Recipes,
// erfcc: 1.2e-7).
inline F32 gelu_precise(F32 x) {
    const F32 z = mul(abs(x), set(0.70710678118654752f));
    const F32 t = div(set(1.0f), fma(z, set(0.5f), set(1.0f)));
    F32 p = set(0.17087277f);
    p = fma(p, t, set(-0.82215223f));
    p = fma(p, t, set(1.48851587f));
    p = fma(p, t, set(-1.13520398f));
    p = fma(p, t, set(0.27886807f));
    p = fma(p, t, set(-0.18628806f));
    p = fma(p, t, set(0.09678418f));
    p = fma(p, t, set(0.37409196f));
    p = fma(p, t, set(1.00002368f));
    p = fma(p, t, set(-1.26551223f));
    const F32 half_tail = mul(mul(set(0.5f), t), exp(fnma(z, z, p)));
    return mul(x, where_less(x, zero(), half_tail, sub(set(1.0f), half_tail)));
}

// x (1 + tanh(u)) / 2 is x sigmoid(2u).
inline F32 gelu_tanh_precise(F32 x) {
    const F32 u = mul(fma(mul(mul(x, x), x), set(0.044715f), x), set(2 * 0.79788456080286536f));
    return mul(x, sigmoid(u));
}

}  // namespace mainspring
