// The two products of attention, for a tile of keys and values and up to six query rows.
//
// Scores: one number (or pair of bf16) of each row, broadcast, times a vector of LANES keys: so keys are transposed. Weighted
// values: a weight (or the weights of two neighbouring keys), broadcast, times a vector along the value's dimension. Each
// result is one chain of sums, over the dimension or over the keys, in ascending order: it has the same bits whether its
// factors were packed before (`product`, blocks of up to six rows by 64 columns in registers) or come straight from the
// cache (`score_directly`, `weigh_directly`).
//
// Two kinds of arithmetic: pairs of bf16 with VDPBF16PS, where queries are bf16 and the cache is bf16 or fp8 (which is
// exact in bf16), weights rounded to bf16: twice the products of fp32 an instruction, and no widening. Else fp32.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "attention_plan.h"
#include "dtypes.h"

namespace mainspring {

// ---------------------------------------------------------------- what comes next

// Asks for the keys and values that are packed next (of the next head, or of the next tile's first), a few lines at a time
// and all the time: a core keeps some dozens of lines on the way, so memory falls idle wherever nobody asks, and asking for
// more at once only waits. No further ahead than that: what is asked for must still be in the first-level cache when its
// time comes, or fetching it from the second competes for the same dozens.
class Ahead {
  public:
    void clear() { count_ = at_ = 0; }
    void add(const void* row, int64_t bytes) { row_[count_++] = (const char*)row, lines_ = int((bytes + 63) / 64); }
    template <int LINES>
    void ask() {
        int at = at_;
        for (int left = LINES; left > 0 && at < count_; left -= lines_) {
            const char* p = row_[at++];
            for (int l = 0; l < lines_; ++l) _mm_prefetch(p + 64 * l, _MM_HINT_T0);
        }
        at_ = at;
    }
    void ask_rest() { ask<2 * TILE * 64>(); }

  private:
    int count_ = 0, at_ = 0, lines_ = 1;
    const char *row_[2 * TILE];
};

// ---------------------------------------------------------------- the register kernel

constexpr int BLOCK_ROWS = 6;
constexpr int MOST_DIRECT_ROWS = 4;  // so few that packing would cost more than it saves

// How numbers are packed: `step` adds to each lane one term (fp32) or two (bf16), from 32 bits of either factor.
struct Fp32Math {
    static constexpr int PER_STEP = 1;
    static F32 step(F32 sum, uint32_t a, const uint32_t* b) {
        float x;
        std::memcpy(&x, &a, 4);
        return fma(set(x), load((const float*)b), sum);
    }
    static F32 step(F32 sum, uint32_t a, I32 b) {
        float x;
        std::memcpy(&x, &a, 4);
        return fma(set(x), from_bits(b), sum);
    }
    static F32 exp2_of(F32 x) { return exp2(x); }
};
#if MAINSPRING_BF16_DOT
struct Bf16Math {
    static constexpr int PER_STEP = 2;
    static F32 step(F32 sum, uint32_t a, const uint32_t* b) {
        return dot_bf16(sum, _mm512_set1_epi32((int)a), _mm512_loadu_si512(b));
    }
    static F32 step(F32 sum, uint32_t a, I32 b) { return dot_bf16(sum, _mm512_set1_epi32((int)a), b); }
    static F32 exp2_of(F32 x) { return exp2_coarse(x); }
};
#endif

// c[r][:] = c[r][:] * keep[r] + sum over s of a[r][s] * b[s][:], for ROWS rows and COLUMNS vectors; keep null: from zero.
template <class Math, int ROWS, int COLUMNS>
inline void product_block(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_step, int64_t steps, float* c, int64_t c_row,
    const float* keep, Ahead& ahead
) {
    F32 sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j)
            sums[r][j] = keep ? mul(load(c + r * c_row + j * LANES), set(keep[r])) : zero();
    for (int64_t s = 0; s < steps; ++s) {
        if constexpr (ROWS <= MOST_DIRECT_ROWS && COLUMNS > 1) ahead.ask<1>();
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int j = 0; j < COLUMNS; ++j)
                sums[r][j] = Math::step(sums[r][j], a[r * a_row + s], b + s * b_step + j * LANES);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j) store(c + r * c_row + j * LANES, sums[r][j]);
}

// The same for `columns` vectors.
template <class Math, int ROWS>
inline void product_rows(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_step, int64_t steps, float* c, int64_t c_row,
    int columns, const float* keep, Ahead& ahead
) {
    constexpr int WIDE = LANES == 16 ? 4 : 2;  // 24 or 12 sums in registers
    int j = 0;
    for (; j + WIDE <= columns; j += WIDE)
        product_block<Math, ROWS, WIDE>(a, a_row, b + j * LANES, b_step, steps, c + j * LANES, c_row, keep, ahead);
    if constexpr (WIDE == 4)
        for (; j + 2 <= columns; j += 2)
            product_block<Math, ROWS, 2>(a, a_row, b + j * LANES, b_step, steps, c + j * LANES, c_row, keep, ahead);
    for (; j < columns; ++j)
        product_block<Math, ROWS, 1>(a, a_row, b + j * LANES, b_step, steps, c + j * LANES, c_row, keep, ahead);
}

template <class Math>
__attribute__((noinline)) void product(
    int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_step, int64_t steps, float* c,
    int64_t c_row, int columns, const float* keep, Ahead& ahead
) {
    switch (rows) {
        case 1: return product_rows<Math, 1>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
        case 2: return product_rows<Math, 2>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
        case 3: return product_rows<Math, 3>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
        case 4: return product_rows<Math, 4>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
        case 5: return product_rows<Math, 5>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
        default: return product_rows<Math, 6>(a, a_row, b, b_step, steps, c, c_row, columns, keep, ahead);
    }
}

// ---------------------------------------------------------------- packing

// A LANES x LANES square of 32-bit numbers, in place.
#if MAINSPRING_AVX512
inline void transpose(__m512i* r) {
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
#else
inline void transpose(__m256i* r) {
    __m256i t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    __m256i u[8];
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

// What a cache of T offers to either arithmetic: LANES dwords from element i on, those at or beyond n elements as zero.
template <class Math, class T>
struct Source;

template <class T>
struct Source<Fp32Math, T> {
    static I32 dwords(const T* p, int64_t i, int64_t n) {
        return bits_of(n - i >= LANES ? load(p + i) : load_n(p + i, int(n - i)));
    }
};
#if MAINSPRING_BF16_DOT
template <>
struct Source<Bf16Math, bf16> {
    static I32 dwords(const bf16* p, int64_t i, int64_t n) {
        if (n - i >= 32) return _mm512_loadu_si512(p + i);
        return _mm512_maskz_loadu_epi16((1u << (n - i)) - 1, p + i);
    }
};
// Every fp8 number without its sign as bf16, where it is exact.
struct Fp8Table {
    alignas(64) uint16_t bits[128];
    constexpr Fp8Table() : bits() {
        for (int i = 8; i < 127; ++i) bits[i] = uint16_t((i << 4) + (120 << 7));
        for (int i = 1; i < 8; ++i) {  // i * 2^-9
            const int top = i >= 4 ? 2 : i >= 2 ? 1 : 0;
            bits[i] = uint16_t((127 - 9 + top) << 7 | (i << (7 - top) & 0x7f));
        }
        bits[127] = 0x7fc0;
    }
};
inline constexpr Fp8Table FP8_AS_BF16;

template <>
struct Source<Bf16Math, fp8> {
    static I32 dwords(const fp8* p, int64_t i, int64_t n) {
        const __m256i bytes = n - i >= 32 ? _mm256_loadu_si256((const __m256i*)(p + i))
                                          : _mm256_maskz_loadu_epi8((1u << (n - i)) - 1, p + i);
        const __m512i index = _mm512_cvtepu8_epi16(bytes);  // its 7 lowest bits: 6 for a lookup, 1 for which half
        const __m512i* table = (const __m512i*)FP8_AS_BF16.bits;
        const __m512i low = _mm512_permutex2var_epi16(table[0], index, table[1]);
        const __m512i high = _mm512_permutex2var_epi16(table[2], index, table[3]);
        const __mmask32 in_high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(index, _mm512_set1_epi16(0x80)), 8);
        return _mm512_or_si512(_mm512_mask_blend_epi16(in_high, low, high), sign);
    }
};
#endif

constexpr int64_t up_to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// A tile's keys, rows[0..count) → [steps][TILE] dwords. Columns beyond `count` hold rubbish.
template <class Math, class T>
inline void pack_keys(const T* const* rows, int count, int64_t dim, uint32_t* packed, Ahead& ahead) {
    const int64_t steps = (dim + Math::PER_STEP - 1) / Math::PER_STEP;
    for (int column = 0; column < count; column += LANES) {
        for (int64_t s = 0; s < steps; s += LANES) {
            I32 square[LANES];
            const int64_t d = s * Math::PER_STEP, whole = d + LANES * Math::PER_STEP;
            if (whole <= dim)
                for (int i = 0; i < LANES; ++i) square[i] = Source<Math, T>::dwords(rows[column + i], d, whole);
            else
                for (int i = 0; i < LANES; ++i) square[i] = Source<Math, T>::dwords(rows[column + i], d, dim);
            transpose(square);
            ahead.ask<8>();
            const int used = int(std::min<int64_t>(LANES, steps - s));
            for (int i = 0; i < used; ++i) istore((int32_t*)packed + (s + i) * TILE + column, square[i]);
        }
    }
}

// What `pack_keys` and `product` do together, in registers: scores of ROWS rows with LANES keys after LANES keys.
template <class Math, int ROWS, class T>
__attribute__((noinline)) void score_directly(
    const T* const* keys, int count, int64_t dim, const uint32_t* query, int64_t query_row, float* scores, Ahead& ahead
) {
    const int64_t steps = (dim + Math::PER_STEP - 1) / Math::PER_STEP;
    for (int64_t s = 0; s < steps; s += LANES) {
        const int64_t d = s * Math::PER_STEP, whole = d + LANES * Math::PER_STEP;
        const int used = int(std::min<int64_t>(LANES, steps - s));
        for (int column = 0; column < count; column += LANES) {
            I32 square[LANES];
            if (whole <= dim)
                for (int i = 0; i < LANES; ++i) square[i] = Source<Math, T>::dwords(keys[column + i], d, whole);
            else
                for (int i = 0; i < LANES; ++i) square[i] = Source<Math, T>::dwords(keys[column + i], d, dim);
            transpose(square);
            ahead.ask<16>();
            F32 sums[ROWS];
            for (int r = 0; r < ROWS; ++r) sums[r] = s ? load(scores + r * TILE + column) : zero();
            if (used == LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; ++i)
                    for (int r = 0; r < ROWS; ++r) sums[r] = Math::step(sums[r], query[r * query_row + s + i], square[i]);
            } else {
                for (int i = 0; i < used; ++i)
                    for (int r = 0; r < ROWS; ++r) sums[r] = Math::step(sums[r], query[r * query_row + s + i], square[i]);
            }
            for (int r = 0; r < ROWS; ++r) store(scores + r * TILE + column, sums[r]);
        }
    }
}

// A tile's values, rows[0..count) → [steps][columns] dwords: count fp32 rows, or count / 2 rows of pairs of neighbouring
// keys, whose columns are in the order that unpacking leaves them in (see `natural_order`).
template <class T>
inline void pack_values(
    Fp32Math, const T* const* rows, int count, int64_t dim, uint32_t* packed, int64_t columns, Ahead& ahead
) {
    for (int k = 0; k < count; ++k) {
        for (int64_t d = 0; d < dim; d += LANES)
            istore((int32_t*)packed + k * columns + d, Source<Fp32Math, T>::dwords(rows[k], d, dim));
        if (k % 4 == 3) ahead.ask<LANES>();
    }
}
#if MAINSPRING_BF16_DOT
template <class T>
inline void pack_values(
    Bf16Math, const T* const* rows, int count, int64_t dim, uint32_t* packed, int64_t columns, Ahead& ahead
) {
    for (int k = 0; k < count; k += 2) {
        if (k % 4 == 0) ahead.ask<16>();
        for (int64_t d = 0; d < dim; d += 32) {
            const __m512i even = Source<Bf16Math, T>::dwords(rows[k], d, dim);
            const __m512i odd = Source<Bf16Math, T>::dwords(rows[k + 1], d, dim);
            uint32_t* at = packed + k / 2 * columns + d;
            _mm512_storeu_si512(at, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(at + 16, _mm512_unpackhi_epi16(even, odd));
        }
    }
}
#endif

// What `pack_values` and `product` do together, straight from the cache: the same terms in the same order.
template <int ROWS, int COLUMNS, bool WHOLE, class T>
inline void weigh_columns(
    Fp32Math, const uint32_t* weights, const T* const* values, int count, int64_t from, int64_t dim, float* sums,
    int64_t sums_row, const float* keep, Ahead& ahead
) {
    F32 of_row[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j)
            of_row[r][j] = mul(load(sums + r * sums_row + from + j * LANES), set(keep[r]));
    for (int k = 0; k < count; ++k) {
        for (int j = 0; j < COLUMNS; ++j) {
            const int64_t d = from + j * LANES;
            const F32 v = from_bits(Source<Fp32Math, T>::dwords(values[k], d, WHOLE ? d + LANES : dim));
            for (int r = 0; r < ROWS; ++r) of_row[r][j] = fma(set(((const float*)weights)[r * TILE + k]), v, of_row[r][j]);
        }
        if (k % 4 == 3) ahead.ask<LANES>();
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j) store(sums + r * sums_row + from + j * LANES, of_row[r][j]);
}
#if MAINSPRING_BF16_DOT
template <int ROWS, int COLUMNS, bool WHOLE, class T>
inline void weigh_columns(
    Bf16Math, const uint32_t* weights, const T* const* values, int count, int64_t from, int64_t dim, float* sums,
    int64_t sums_row, const float* keep, Ahead& ahead
) {
    F32 of_row[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j)
            of_row[r][j] = mul(load(sums + r * sums_row + from + j * LANES), set(keep[r]));
    for (int k = 0; k < count; k += 2) {
        ahead.ask<4>();
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; j += 2) {
            const int64_t d = from + j * LANES, end = WHOLE ? d + 32 : dim;
            const __m512i even = Source<Bf16Math, T>::dwords(values[k], d, end);
            const __m512i odd = Source<Bf16Math, T>::dwords(values[k + 1], d, end);
            const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const __m512i weight = _mm512_set1_epi32((int)weights[r * TILE + k / 2]);
                of_row[r][j] = dot_bf16(of_row[r][j], weight, low);
                of_row[r][j + 1] = dot_bf16(of_row[r][j + 1], weight, high);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < COLUMNS; ++j) store(sums + r * sums_row + from + j * LANES, of_row[r][j]);
}
#endif

template <class Math, int ROWS, class T>
__attribute__((noinline)) void weigh_directly(
    const uint32_t* weights, const T* const* values, int count, int64_t dim, float* sums, int64_t sums_row,
    const float* keep, Ahead& ahead
) {
    constexpr int WIDE = 4, NARROW = Math::PER_STEP;
    int64_t d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        weigh_columns<ROWS, WIDE, true>(Math(), weights, values, count, d, dim, sums, sums_row, keep, ahead);
    for (; d < dim; d += NARROW * LANES)
        weigh_columns<ROWS, NARROW, false>(Math(), weights, values, count, d, dim, sums, sums_row, keep, ahead);
}

// A row of weighted values in the order of its columns, as they were before packing.
inline void natural_order(Fp32Math, float*, int64_t) {}
#if MAINSPRING_BF16_DOT
inline void natural_order(Bf16Math, float* row, int64_t columns) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t d = 0; d < columns; d += 32) {
        const F32 low = load(row + d), high = load(row + d + 16);
        store(row + d, _mm512_permutex2var_ps(low, first, high));
        store(row + d + 16, _mm512_permutex2var_ps(low, second, high));
    }
}
#endif

// LANES weights as the first factor of the second product.
inline void store_weights(Fp32Math, uint32_t* row, const F32* weights, int vectors) {
    for (int j = 0; j < vectors; ++j) store((float*)row + j * LANES, weights[j]);
}
#if MAINSPRING_BF16_DOT
inline void store_weights(Bf16Math, uint32_t* row, const F32* weights, int vectors) {
    for (int j = 0; j < vectors; j += 2)
        _mm512_storeu_si512(row + j / 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(weights[j + 1], weights[j]));
}
#endif

// A head of the query → dwords, zeros up to the next multiple of LANES.
template <class Math, class T>
inline void pack_query_of(const void* query, int64_t offset, int64_t dim, uint32_t* packed) {
    const T* from = (const T*)query + offset;
    for (int64_t d = 0; d < dim; d += LANES * Math::PER_STEP)
        istore((int32_t*)packed + d / Math::PER_STEP, Source<Math, T>::dwords(from, d, dim));
}
inline void pack_query(Fp32Math, Dtype dtype, const void* query, int64_t offset, int64_t dim, uint32_t* packed) {
    switch (dtype) {
        case Dtype::fp32: return pack_query_of<Fp32Math, float>(query, offset, dim, packed);
        case Dtype::bf16: return pack_query_of<Fp32Math, bf16>(query, offset, dim, packed);
        default: return pack_query_of<Fp32Math, fp16>(query, offset, dim, packed);
    }
}
#if MAINSPRING_BF16_DOT
inline void pack_query(Bf16Math, Dtype, const void* query, int64_t offset, int64_t dim, uint32_t* packed) {
    pack_query_of<Bf16Math, bf16>(query, offset, dim, packed);
}
#endif

}  // namespace mainspring
