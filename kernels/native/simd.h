// Vectors of fp32, and what lies in memory as fp32, bf16 or fp16: one set of names for the instruction sets we use.
//
// The compiler's flags decide (-march=native where the kernels are built and run):
//   AVX-512 (F, BW, DQ, VL)    16 lanes, masked loads and stores; with AVX512_BF16 also dot_bf16
//   AVX2 + FMA + F16C           8 lanes
//   NEON (simd_neon.h)          8 lanes; with BF16 also dot_bf16
// All arithmetic is fp32. A function here does the same to every lane: a number's bits do not depend on its place in a
// vector, nor on whether it came through `load` or, at the end of a row, through `load_n`.
#pragma once

#ifndef __aarch64__
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MAINSPRING_AVX512 1
#if defined(__AVX512BF16__)
#define MAINSPRING_BF16_DOT 1  // VDPBF16PS
#define MAINSPRING_BF16_ATTENTION 1
#endif
#if defined(__AVX512VNNI__)
#define MAINSPRING_VNNI 1  // VPDPBUSD
#endif
#if defined(__AVX512BF16__) && defined(__AMX_BF16__)
#define MAINSPRING_AMX 1
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define MAINSPRING_AVX2 1
#elif !defined(__aarch64__)
#error "the native kernels need AVX-512 (F, BW, DQ, VL), AVX2 with FMA and F16C, or aarch64: compile with -march=native"
#endif

// gcc stops inlining once a file has grown enough. An inner step that became a call cost half the speed (seen): what must be
// inlined says so, and what should be a function of its own, with the registers to itself, too.
#define MAINSPRING_INLINE inline __attribute__((always_inline))
#define MAINSPRING_NOINLINE __attribute__((noinline))

namespace mainspring {

// Numbers as they lie in memory. Two types, so that the compiler tells a bf16 from an fp16.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Into all levels of the cache, or into all but the first. Inlined by force: gcc takes a function that does nothing else for
// one without effect, and drops its calls.
MAINSPRING_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
MAINSPRING_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#ifdef __aarch64__
}  // namespace mainspring
#include "simd_neon.h"
namespace mainspring {
#endif

// ---------------------------------------------------------------- F32: a vector of LANES fp32

#if MAINSPRING_AVX512

constexpr int LANES = 16;
using F32 = __m512;  // [LANES] fp32
using I32 = __m512i;  // [LANES] int32, or 64 bytes of anything

inline __mmask16 first_lanes(int n) { return n >= LANES ? (__mmask16)-1 : (__mmask16)((1u << n) - 1); }

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 set(float x) { return _mm512_set1_ps(x); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 sqrt(F32 a) { return _mm512_sqrt_ps(a); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c, rounded once
inline F32 fnma(F32 a, F32 b, F32 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b, rounded once
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }                // b where either is NaN
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }                // b where either is NaN
inline F32 abs(F32 a) { return _mm512_abs_ps(a); }
inline F32 round(F32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {  // a < b ? yes : no; no where either is NaN
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }

// fp32
inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }  // the others are 0
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a); }
inline void store_n(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }

// bf16: the upper half of an fp32
inline F32 from_bf16(__m256i a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)); }
inline __m256i to_bf16(F32 a) {  // round to nearest even
#if MAINSPRING_BF16_DOT
    return (__m256i)_mm512_cvtneps_pbh(a);  // fp32 denormals (below 1.2e-38) become 0
#else
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, up, quiet), 16));
#endif
}
inline F32 load(const bf16* p) { return from_bf16(_mm256_loadu_si256((const __m256i*)p)); }
inline F32 load_n(const bf16* p, int n) { return from_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store(bf16* p, F32 a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }
inline void store_n(bf16* p, F32 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16(a)); }

// fp16
inline F32 from_fp16(__m256i a) { return _mm512_cvtph_ps(a); }
inline __m256i to_fp16(F32 a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 load(const fp16* p) { return from_fp16(_mm256_loadu_si256((const __m256i*)p)); }
inline F32 load_n(const fp16* p, int n) { return from_fp16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store(fp16* p, F32 a) { _mm256_storeu_si256((__m256i*)p, to_fp16(a)); }
inline void store_n(fp16* p, F32 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_fp16(a)); }

// a * 2^n, for whole n of any size
inline F32 scale_by_power_of_2(F32 a, F32 n) { return _mm512_scalef_ps(a, n); }

// The sum of all lanes, always in this order: lanes 8 apart, then 4, 2, 1.
inline float sum(F32 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(F32 a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

#if MAINSPRING_BF16_DOT
// Per lane: sum + a[2i+1] * b[2i+1] + a[2i] * b[2i], of 32 bf16 each. Rounds to nearest even and flushes denormals
// whatever the control register says, so it has bits of its own: never mix it with `fma` for one and the same result.
inline F32 dot_bf16(F32 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

// Bytes, 4 to a lane.
inline I32 load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(void* p, I32 a) { _mm512_storeu_si512(p, a); }
inline I32 set_int(int x) { return _mm512_set1_epi32(x); }
inline I32 low_halves(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }  // of each byte
inline I32 high_halves(I32 a) { return low_halves(_mm512_srli_epi16(a, 4)); }
inline I32 even_bytes(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi16(255)); }  // as int16
inline I32 odd_bytes(I32 a) { return _mm512_srli_epi16(a, 8); }
inline I32 look_up(const uint8_t* table, I32 places) {  // of each byte, one of 16
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), places);
}
// For `dot`, below.
#if MAINSPRING_VNNI
inline I32 dot_bytes(I32 sum, I32 a, I32 b) { return _mm512_dpbusd_epi32(sum, a, b); }
#endif
inline I32 byte_pairs(I32 a, I32 b) { return _mm512_maddubs_epi16(a, b); }  // sums of two products, unsigned times signed
inline I32 short_pairs(I32 a, I32 b) { return _mm512_madd_epi16(a, b); }  // of int16; int32
inline I32 add_shorts(I32 a, I32 b) { return _mm512_add_epi16(a, b); }
inline I32 join_shorts(I32 a) { return short_pairs(a, _mm512_set1_epi16(1)); }
// Whole numbers, which lie in -128..127, as bytes; or as int16, of each 4 the first, third, second, fourth.
inline void store_as_bytes(void* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
inline void store_as_shorts(void* p, I32 a) {
    const __m256i shorts = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(_mm512_cvtepi32_epi16(a), 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i*)p, shorts);
}
inline I32 nearest(F32 a) { return _mm512_cvtps_epi32(a); }
inline I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
// 16 numbers in registers. `at`: of each lane, the one that its lowest 4 bits name.
struct Codebook {
    __m512 all;
    explicit Codebook(const float* p) : all(_mm512_loadu_ps(p)) {}
    F32 at(I32 a) const { return _mm512_permutexvar_ps(a, all); }
};
inline I32 shift_4(I32 a) { return _mm512_srli_epi32(a, 4); }
inline void settle(I32& a) { asm("" : "+v"(a)); }  // the compiler must have it in a register here

#elif MAINSPRING_AVX2

constexpr int LANES = 8;
using F32 = __m256;  // [LANES] fp32
using I32 = __m256i;  // [LANES] int32, or 32 bytes of anything

inline __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline F32 zero() { return _mm256_setzero_ps(); }
inline F32 set(float x) { return _mm256_set1_ps(x); }
inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 sqrt(F32 a) { return _mm256_sqrt_ps(a); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 fnma(F32 a, F32 b, F32 c) { return _mm256_fnmadd_ps(a, b, c); }
inline F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
inline F32 abs(F32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F32 round(F32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline F32 to_float(I32 a) { return _mm256_cvtepi32_ps(a); }

inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline F32 load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a); }
inline void store_n(float* p, F32 a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a); }

// AVX2 has no masked loads of 16 bits: a tail goes through eight numbers on the stack.
inline __m128i load_16_bits(const void* p, int n) {
    uint16_t halves[LANES] = {};
    std::memcpy(halves, p, 2 * (n < LANES ? n : LANES));
    return _mm_loadu_si128((const __m128i*)halves);
}
inline void store_16_bits(void* p, __m128i a, int n) {
    uint16_t halves[LANES];
    _mm_storeu_si128((__m128i*)halves, a);
    std::memcpy(p, halves, 2 * (n < LANES ? n : LANES));
}

inline F32 from_bf16(__m128i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
inline __m128i to_bf16(F32 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline F32 load(const bf16* p) { return from_bf16(_mm_loadu_si128((const __m128i*)p)); }
inline F32 load_n(const bf16* p, int n) { return from_bf16(load_16_bits(p, n)); }
inline void store(bf16* p, F32 a) { _mm_storeu_si128((__m128i*)p, to_bf16(a)); }
inline void store_n(bf16* p, F32 a, int n) { store_16_bits(p, to_bf16(a), n); }

inline F32 from_fp16(__m128i a) { return _mm256_cvtph_ps(a); }
inline __m128i to_fp16(F32 a) { return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F32 load(const fp16* p) { return from_fp16(_mm_loadu_si128((const __m128i*)p)); }
inline F32 load_n(const fp16* p, int n) { return from_fp16(load_16_bits(p, n)); }
inline void store(fp16* p, F32 a) { _mm_storeu_si128((__m128i*)p, to_fp16(a)); }
inline void store_n(fp16* p, F32 a, int n) { store_16_bits(p, to_fp16(a), n); }

// n may lie outside an exponent's range (-126..127), so it is applied in two halves.
inline F32 power_of_2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline F32 scale_by_power_of_2(F32 a, F32 n) {
    const __m256i whole = _mm256_cvtps_epi32(min(set(252), max(set(-252), n)));
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return mul(mul(a, power_of_2(half)), power_of_2(_mm256_sub_epi32(whole, half)));
}

inline float sum(F32 a) {  // lanes 4 apart, then 2, 1
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(F32 a) {
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline I32 load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_bytes(void* p, I32 a) { _mm256_storeu_si256((__m256i*)p, a); }
inline I32 set_int(int x) { return _mm256_set1_epi32(x); }
inline I32 low_halves(I32 a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline I32 high_halves(I32 a) { return low_halves(_mm256_srli_epi16(a, 4)); }
inline I32 even_bytes(I32 a) { return _mm256_and_si256(a, _mm256_set1_epi16(255)); }
inline I32 odd_bytes(I32 a) { return _mm256_srli_epi16(a, 8); }
inline I32 look_up(const uint8_t* table, I32 places) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), places);
}
#if defined(__AVXVNNI__)
#define MAINSPRING_VNNI 1
inline I32 dot_bytes(I32 sum, I32 a, I32 b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#endif
inline I32 byte_pairs(I32 a, I32 b) { return _mm256_maddubs_epi16(a, b); }
inline I32 short_pairs(I32 a, I32 b) { return _mm256_madd_epi16(a, b); }
inline I32 add_shorts(I32 a, I32 b) { return _mm256_add_epi16(a, b); }
inline I32 join_shorts(I32 a) { return short_pairs(a, _mm256_set1_epi16(1)); }
inline __m128i shorts(I32 a) { return _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)); }
inline void store_as_bytes(void* p, I32 a) { _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts(a), shorts(a))); }
inline void store_as_shorts(void* p, I32 a) {
    _mm_storeu_si128((__m128i*)p, _mm_shufflehi_epi16(_mm_shufflelo_epi16(shorts(a), 0xd8), 0xd8));
}
inline I32 nearest(F32 a) { return _mm256_cvtps_epi32(a); }
inline I32 add(I32 a, I32 b) { return _mm256_add_epi32(a, b); }
struct Codebook {
    __m256 low, high;
    explicit Codebook(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    F32 at(I32 a) const {
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(a, 28));  // the sign: whether it is 8 or more
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, a), _mm256_permutevar8x32_ps(high, a), upper);
    }
};
inline I32 shift_4(I32 a) { return _mm256_srli_epi32(a, 4); }
inline void settle(I32& a) { asm("" : "+x"(a)); }

#endif

// ---------------------------------------------------------------- sums of products of bytes

// Products of unsigned numbers of 8 or 4 bits with signed ones, which lie in -127..127, are added up in int32, 4 or 8 to a
// lane, exactly. AT_ONCE: by one instruction. Without it bytes are multiplied as int16, for two products of bytes up to 255
// are more than fits there, and sums of products of 4 bits are kept in int16 for `join_shorts`: up to 16 fit, or 8 of FP4.
#if MAINSPRING_VNNI
constexpr bool AT_ONCE = true;
#else
constexpr bool AT_ONCE = false;
#endif

// Bytes of W → what `dot` takes.
template <int BITS>
inline void take_apart(I32 bytes, I32& first, I32& second) {
    if (BITS == 4)
        first = low_halves(bytes), second = high_halves(bytes);
    else if (AT_ONCE)
        first = second = bytes;
    else
        first = even_bytes(bytes), second = odd_bytes(bytes);
}

// sum + the products of `first` with b, and (but for bytes AT_ONCE) of `second` with c.
template <int BITS>
inline I32 dot(I32 sum, I32 first, I32 second, I32 b, I32 c) {
#if MAINSPRING_VNNI
    const I32 half = dot_bytes(sum, first, b);
    return BITS == 8 ? half : dot_bytes(half, second, c);
#else
    return BITS == 8 ? add(add(sum, short_pairs(first, b)), short_pairs(second, c))
                     : add_shorts(add_shorts(sum, byte_pairs(first, b)), byte_pairs(second, c));
#endif
}

// ---------------------------------------------------------------- one number

inline float load_one(const float* p) { return *p; }
inline float load_one(const bf16* p) {
    const uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float load_one(const fp16* p) {
#ifdef __aarch64__
    return vgetq_lane_f32(load_n(p, 1).low, 0);
#else
    return _cvtsh_ss(p->bits);
#endif
}

// As `store` would round it.
template <class T>
inline void store_one(T* p, float x) {
    store_n(p, set(x), 1);
}

// ---------------------------------------------------------------- functions of a vector

// e^x, off by at most 1.01 units in the last place over all of fp32's range. e^-inf is 0, e^inf is inf, NaN stays NaN.
//
// x = n ln 2 + r with whole n, |r| <= ln 2 / 2; e^r by a polynomial (Cephes' expf); n goes into the exponent.
inline F32 exp(F32 x) {
    // Beyond these the result is 0 or infinity anyway, and r stays finite. The bound comes first: NaN passes through.
    x = min(set(89.0f), max(set(-104.0f), x));
    const F32 n = round(mul(x, set(1.44269504088896341f)));
    F32 r = fnma(n, set(0.693359375f), x);  // ln 2 in two parts; n times the first is exact
    r = fnma(n, set(-2.12194440e-4f), r);
    F32 p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, mul(r, r), r);
    return scale_by_power_of_2(add(p, set(1.0f)), n);
}

inline F32 sigmoid(F32 x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

// tanh(x) = 1 - 2 / (e^2x + 1), off by at most 1.8e-7 (absolute: near 0 it is as coarse as 1 is).
inline F32 tanh(F32 x) { return sub(set(1.0f), div(set(2.0f), add(exp(add(x, x)), set(1.0f)))); }

// erf(x) as a quotient of polynomials on [-4, 4] (the coefficients are Eigen's), off by at most 4e-7.
inline F32 erf(F32 x) {
    x = min(set(4.0f), max(set(-4.0f), x));
    const F32 y = mul(x, x);
    F32 p = set(-2.72614225801306e-10f);
    p = fma(p, y, set(2.77068142495902e-08f));
    p = fma(p, y, set(-2.10102402082508e-06f));
    p = fma(p, y, set(-5.69250639462346e-05f));
    p = fma(p, y, set(-7.34990630326855e-04f));
    p = fma(p, y, set(-2.95459980854025e-03f));
    p = fma(p, y, set(-1.60960333262415e-02f));
    F32 q = set(-1.45660718464996e-05f);
    q = fma(q, y, set(-2.13374055278905e-04f));
    q = fma(q, y, set(-1.68282697438203e-03f));
    q = fma(q, y, set(-7.37332916720468e-03f));
    q = fma(q, y, set(-1.42647390514189e-02f));
    return div(mul(x, p), q);
}

inline F32 silu(F32 x) { return mul(x, sigmoid(x)); }
inline F32 gelu(F32 x) { return mul(mul(set(0.5f), x), add(set(1.0f), erf(mul(x, set(0.70710678118654752f))))); }
inline F32 gelu_tanh(F32 x) {
    const F32 cubic = fma(mul(mul(x, x), x), set(0.044715f), x);
    return mul(mul(set(0.5f), x), add(set(1.0f), tanh(mul(cubic, set(0.79788456080286536f)))));
}

// ---------------------------------------------------------------- squares

// A LANES x LANES square of 32-bit numbers, in place.
#if MAINSPRING_AVX512
MAINSPRING_INLINE void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#elif MAINSPRING_AVX2
MAINSPRING_INLINE void transpose(__m256i* r) {
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
    }
}
#endif

}  // namespace mainspring
