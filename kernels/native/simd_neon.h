// simd.h and the whole numbers of functions.h for aarch64: 8 lanes, in two NEON registers. With the instructions of Armv8.6,
// where the compiler's flags allow them: dot_bf16 (BFDOT), and products of bytes (USDOT).
//
// To be included by these two files only, which say what the functions do.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define MAINSPRING_NEON 1
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MAINSPRING_BF16_DOT 1
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MAINSPRING_VNNI 1
#endif

namespace mainspring {

constexpr int LANES = 8;
struct F32 {  // [LANES] fp32
    float32x4_t low, high;
};
struct I32 {  // [LANES] int32, or 32 bytes of anything
    int32x4_t low, high;
};

inline F32 set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F32 zero() { return set(0); }
inline F32 add(F32 a, F32 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F32 sub(F32 a, F32 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F32 mul(F32 a, F32 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F32 div(F32 a, F32 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline F32 sqrt(F32 a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline F32 fnma(F32 a, F32 b, F32 c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
inline F32 abs(F32 a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline F32 round(F32 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
inline F32 where_less(F32 a, F32 b, F32 yes, F32 no) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), yes.low, no.low), vbslq_f32(vcltq_f32(a.high, b.high), yes.high, no.high)};
}
inline F32 max(F32 a, F32 b) { return where_less(b, a, a, b); }
inline F32 min(F32 a, F32 b) { return where_less(a, b, a, b); }
inline F32 to_float(I32 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }

inline F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, F32 a) { vst1q_f32(p, a.low), vst1q_f32(p + 4, a.high); }

// bf16: the upper half of an fp32
inline F32 from_bf16(uint16x8_t a) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(a, 16))};
}
inline uint32x4_t rounded_to_bf16(float32x4_t a) {  // to nearest even, in the upper half
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));  // NaN
    return vbslq_u32(vceqq_f32(a, a), up, quiet);
}
inline uint16x8_t to_bf16(F32 a) {
    return vshrn_high_n_u32(vshrn_n_u32(rounded_to_bf16(a.low), 16), rounded_to_bf16(a.high), 16);
}
inline F32 load(const bf16* p) { return from_bf16(vld1q_u16((const uint16_t*)p)); }
inline void store(bf16* p, F32 a) { vst1q_u16((uint16_t*)p, to_bf16(a)); }

inline F32 load(const fp16* p) {
    const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p));
    return {vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a)};
}
inline void store(fp16* p, F32 a) {
    vst1q_u16((uint16_t*)p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high)));
}

// The end of a row goes through eight numbers on the stack.
template <class T>
inline F32 load_n(const T* p, int n) {
    T numbers[LANES] = {};
    std::memcpy(numbers, p, sizeof(T) * (n < LANES ? n : LANES));
    return load(numbers);
}
template <class T>
inline void store_n(T* p, F32 a, int n) {
    T numbers[LANES];
    store(numbers, a);
    std::memcpy(p, numbers, sizeof(T) * (n < LANES ? n : LANES));
}

// n may lie outside an exponent's range (-126..127), so it is applied in two halves.
inline float32x4_t power_of_2(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
inline float32x4_t scale_by_power_of_2(float32x4_t a, float32x4_t n) {
    const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1);
    return vmulq_f32(vmulq_f32(a, power_of_2(half)), power_of_2(vsubq_s32(whole, half)));
}
inline F32 scale_by_power_of_2(F32 a, F32 n) {
    n = min(set(252), max(set(-252), n));
    return {scale_by_power_of_2(a.low, n.low), scale_by_power_of_2(a.high, n.high)};
}

inline float sum(F32 a) {  // lanes 4 apart, then 2, 1
    const float32x4_t four = vaddq_f32(a.low, a.high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(F32 a) {
    float lanes[LANES], most;
    store(lanes, a);
    most = lanes[0];
    for (float lane : lanes) most = lane > most ? lane : most;
    return most;
}

#if MAINSPRING_BF16_DOT
inline F32 dot_bf16(F32 sum, I32 a, I32 b) {
    const auto dot = [](float32x4_t s, int32x4_t x, int32x4_t y) {
        return vbfdotq_f32(s, vreinterpretq_bf16_s32(x), vreinterpretq_bf16_s32(y));
    };
    return {dot(sum.low, a.low, b.low), dot(sum.high, a.high, b.high)};
}
#endif

// ---------------------------------------------------------------- whole numbers

inline I32 iset(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline I32 iadd(I32 a, I32 b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline I32 isub(I32 a, I32 b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
inline I32 imul(I32 a, I32 b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
inline I32 iand(I32 a, I32 b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
inline I32 ior(I32 a, I32 b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
inline I32 ixor(I32 a, I32 b) { return {veorq_s32(a.low, b.low), veorq_s32(a.high, b.high)}; }
template <int N>
inline I32 ishr(I32 a) {
    const auto shifted = [](int32x4_t x) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N)); };
    return {shifted(a.low), shifted(a.high)};
}
template <int N>
inline I32 ishl(I32 a) {
    return {vshlq_n_s32(a.low, N), vshlq_n_s32(a.high, N)};
}
inline I32 iload(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
inline void istore(int32_t* p, I32 a) { vst1q_s32(p, a.low), vst1q_s32(p + 4, a.high); }
inline I32 ramp() {
    const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7};
    return iload(lanes);
}
inline I32 bits_of(F32 a) { return {vreinterpretq_s32_f32(a.low), vreinterpretq_s32_f32(a.high)}; }
inline F32 from_bits(I32 a) { return {vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)}; }
inline I32 where_less(I32 a, I32 b, I32 yes, I32 no) {
    return {vbslq_s32(vcltq_s32(a.low, b.low), yes.low, no.low), vbslq_s32(vcltq_s32(a.high, b.high), yes.high, no.high)};
}
inline F32 where_less(I32 a, I32 b, F32 yes, F32 no) {
    return from_bits(where_less(a, b, bits_of(yes), bits_of(no)));
}
inline I32 where_less_i(F32 a, F32 b, I32 yes, I32 no) {
    return bits_of(where_less(a, b, from_bits(yes), from_bits(no)));
}
inline unsigned bits_of_lanes(uint32x4_t low, uint32x4_t high) {
    const uint32_t places[4] = {1, 2, 4, 8};
    const uint32x4_t place = vld1q_u32(places);
    return vaddvq_u32(vandq_u32(low, place)) | vaddvq_u32(vandq_u32(high, place)) << 4;
}
inline unsigned less_bits(F32 a, F32 b) { return bits_of_lanes(vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)); }
inline unsigned equal_bits(F32 a, F32 b) { return bits_of_lanes(vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)); }
inline F32 unsigned_to_float(I32 a) {
    return {vcvtq_f32_u32(vreinterpretq_u32_s32(a.low)), vcvtq_f32_u32(vreinterpretq_u32_s32(a.high))};
}
inline I32 to_int(F32 a) { return {vcvtq_s32_f32(a.low), vcvtq_s32_f32(a.high)}; }
inline float first_lane(F32 a) { return vgetq_lane_f32(a.low, 0); }
inline I32 widen_bytes(const void* p) {
    const uint16x8_t shorts = vmovl_u8(vld1_u8((const uint8_t*)p));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(shorts))), vreinterpretq_s32_u32(vmovl_high_u16(shorts))};
}
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

// ---------------------------------------------------------------- bytes, 4 to a lane

inline I32 load_bytes(const void* p) { return {vld1q_s32((const int32_t*)p), vld1q_s32((const int32_t*)p + 4)}; }
inline void store_bytes(void* p, I32 a) { istore((int32_t*)p, a); }
inline I32 set_int(int x) { return iset(x); }
inline I32 add(I32 a, I32 b) { return iadd(a, b); }
inline I32 low_halves(I32 a) { return iand(a, iset(0x0f0f0f0f)); }
inline I32 high_halves(I32 a) { return low_halves(ishr<4>(a)); }
inline I32 even_bytes(I32 a) { return iand(a, iset(0x00ff00ff)); }
inline I32 odd_bytes(I32 a) { return even_bytes(ishr<8>(a)); }
inline I32 look_up(const uint8_t* table, I32 places) {
    const auto found = [&](int32x4_t x) { return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(x))); };
    return {found(places.low), found(places.high)};
}
#if MAINSPRING_VNNI
inline I32 dot_bytes(I32 sum, I32 a, I32 b) {
    const auto dot = [](int32x4_t s, int32x4_t x, int32x4_t y) {
        return vusdotq_s32(s, vreinterpretq_u8_s32(x), vreinterpretq_s8_s32(y));
    };
    return {dot(sum.low, a.low, b.low), dot(sum.high, a.high, b.high)};
}
#endif
inline int16x8_t shorts_of(int32x4_t a) { return vreinterpretq_s16_s32(a); }
inline I32 byte_pairs(I32 a, I32 b) {
    const I32 even = even_bytes(a), odd = odd_bytes(a);
    const auto sums = [](int32x4_t x, int32x4_t y, int32x4_t w) {
        const int16x8_t first = vshrq_n_s16(vshlq_n_s16(shorts_of(w), 8), 8), second = vshrq_n_s16(shorts_of(w), 8);
        return vreinterpretq_s32_s16(vmlaq_s16(vmulq_s16(shorts_of(x), first), shorts_of(y), second));
    };
    return {sums(even.low, odd.low, b.low), sums(even.high, odd.high, b.high)};
}
inline int32x4_t short_pairs(int16x8_t a, int16x8_t b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}
inline I32 short_pairs(I32 a, I32 b) {
    return {short_pairs(shorts_of(a.low), shorts_of(b.low)), short_pairs(shorts_of(a.high), shorts_of(b.high))};
}
inline I32 add_shorts(I32 a, I32 b) {
    const auto sums = [](int32x4_t x, int32x4_t y) { return vreinterpretq_s32_s16(vaddq_s16(shorts_of(x), shorts_of(y))); };
    return {sums(a.low, b.low), sums(a.high, b.high)};
}
inline I32 join_shorts(I32 a) { return short_pairs(a, iset(0x00010001)); }
inline int16x8_t shorts(I32 a) { return vqmovn_high_s32(vqmovn_s32(a.low), a.high); }
inline void store_as_bytes(void* p, I32 a) { vst1_s8((int8_t*)p, vqmovn_s16(shorts(a))); }
inline void store_as_shorts(void* p, I32 a) {
    const uint8_t order[16] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    vst1q_u8((uint8_t*)p, vqtbl1q_u8(vreinterpretq_u8_s16(shorts(a)), vld1q_u8(order)));
}
inline I32 nearest(F32 a) { return {vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
struct Codebook {
    uint8x16x4_t all;
    explicit Codebook(const float* p) {
        for (int i = 0; i < 4; ++i) all.val[i] = vld1q_u8((const uint8_t*)(p + 4 * i));
    }
    F32 at(I32 a) const {
        const I32 place = iadd(imul(iand(a, iset(15)), iset(0x04040404)), iset(0x03020100));
        const auto found = [&](int32x4_t x) { return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(x))); };
        return {found(place.low), found(place.high)};
    }
};
inline I32 shift_4(I32 a) { return ishr<4>(a); }
inline void settle(I32& a) { asm("" : "+w"(a.low), "+w"(a.high)); }

// ---------------------------------------------------------------- orders

inline void interleave(F32& a, F32& b) {
    const F32 first = {vzip1q_f32(a.low, b.low), vzip2q_f32(a.low, b.low)};
    b = {vzip1q_f32(a.high, b.high), vzip2q_f32(a.high, b.high)};
    a = first;
}

inline void transpose(I32* r) {  // only where weights are packed
    int32_t from[LANES][LANES], to[LANES];
    for (int i = 0; i < LANES; ++i) istore(from[i], r[i]);
    for (int j = 0; j < LANES; ++j) {
        for (int i = 0; i < LANES; ++i) to[i] = from[i][j];
        r[j] = iload(to);
    }
}

}  // namespace mainspring
