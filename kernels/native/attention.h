// Paged attention for any mix of decode and prefill, on the plan of attention_plan.h.
//
// For each tile of 64 keys and each KV head: pack its keys and values once, then, for all query rows that see it, six rows
// at a time: scores = rows x keys, weights = 2^(score - largest so far), sums = sums x 2^(old - new largest) + weights x
// values (the online softmax of Milakov & Gimelshein 2018). Both products run in the same register kernel: a block of up
// to six rows by 64 columns, one number (or pair of bf16) of each row broadcast against a packed row of vectors.
//
// Clockwork: what happens to a row is a chain of operations on it alone, in the order of the tiles. A hidden key's weight
// is an exact 0, and tiles that a row does not see are left out. So it does not matter which rows share a unit, and a
// decode row has the bits it would have had as the last row of a prompt.
//
// Two kinds of arithmetic: pairs of bf16 with VDPBF16PS, where queries are bf16 and the cache is bf16 or fp8 (which is
// exact in bf16), weights rounded to bf16; else fp32.
#pragma once

#include "attention_plan.h"
#include "dtypes.h"
#include "fused.h"
#include "team.h"

namespace mainspring {

struct AttentionCall {
    Plan* plan;
    const char* query;  // [rows, q_heads, key_dim], strides in elements, the last dimension contiguous
    int64_t query_row, query_head;
    Dtype query_dtype, cache_dtype;
    CacheView keys, values;
    const float* sinks;  // [q_heads] or null
    char* out;  // [rows, q_heads, value_dim], contiguous, of the query's dtype
    int64_t out_rows;  // those beyond the plan's become zero
};

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

  private:
    int count_ = 0, at_ = 0, lines_ = 1;
    const char *row_[2 * TILE];
};

// ---------------------------------------------------------------- the register kernel

constexpr int BLOCK_ROWS = 6;
constexpr int MOST_DIRECT_ROWS = 3;  // so few that packing values would cost more than it saves

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
#pragma GCC unroll 3
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

// ---------------------------------------------------------------- one thread's work

// Grows, never shrinks; 64-byte aligned. One a thread, kept from call to call.
class Workspace {
  public:
    ~Workspace() { std::free(data_); }
    float* floats(size_t count) {
        if (count > size_) {
            std::free(data_);
            size_ = up_to_multiple(count, 1024);
            data_ = (float*)std::aligned_alloc(4096, size_ * sizeof(float));
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

template <class Math, class Cache>
class Attention {
  public:
    explicit Attention(const AttentionCall& call) : call_(call), plan_(*call.plan), spec_(plan_.spec) {
        key_steps_ = (spec_.key_dim + Math::PER_STEP - 1) / Math::PER_STEP;
        query_stride_ = up_to_multiple(key_steps_, LANES);
        columns_ = up_to_multiple(spec_.value_dim, LANES * Math::PER_STEP);
        row_floats_ = Plan::row_floats(spec_);
        longest_ = std::max<int64_t>(spec_.key_dim, spec_.value_dim);
    }

    void run(Team& team, int rank) {
        static thread_local Workspace workspace;
        lay_out(workspace);
        if (rank == 0) {
            const int64_t row = int64_t(spec_.q_heads) * spec_.value_dim * size_of(call_.query_dtype);
            std::memset(call_.out + plan_.num_rows * row, 0, (call_.out_rows - plan_.num_rows) * row);
        }
        const int64_t count = plan_.units.size();
        for (int64_t i = team.take(); i < count;) {
            const int64_t next = team.take();
            compute(plan_.units[i], next < count ? &plan_.units[next] : nullptr);
            i = next;
        }
    }

  private:
    struct Tile {  // where the keys and values of a tile lie, less the head; those before `first` nobody may see
        int first, count;
        int64_t keys[TILE], values[TILE];
    };

    void lay_out(Workspace& workspace) {
        const int64_t rows = plan_.most_rows;
        const int64_t sizes[] = {
            TILE * up_to_multiple(key_steps_, LANES),  // keys
            TILE / Math::PER_STEP * columns_,  // values
            rows * query_stride_,
            BLOCK_ROWS * TILE,  // scores
            BLOCK_ROWS * TILE,  // weights
            rows * columns_,  // sums of a range
            rows * columns_,  // sums of all ranges so far
            rows * LANES,  // sums of weights, lane by lane
            up_to_multiple(rows, 16), up_to_multiple(rows, 16), up_to_multiple(rows, 16),
            up_to_multiple(longest_, 32),  // zeros
        };
        size_t all = 0;
        for (int64_t size : sizes) all += up_to_multiple(size, 16);
        float* at = workspace.floats(all);
        const int64_t* size = sizes;
        const auto next = [&] {
            float* here = at;
            at += up_to_multiple(*size++, 16);
            return here;
        };
        keys_ = (uint32_t*)next(), values_ = (uint32_t*)next(), query_ = (uint32_t*)next();
        scores_ = next(), weights_ = (uint32_t*)next();
        sums_ = next(), all_sums_ = next(), weight_lanes_ = next();
        largest_ = next(), all_largest_ = next(), all_weights_ = next();
        zeros_ = next();
        std::memset(zeros_, 0, up_to_multiple(longest_, 32) * sizeof(float));
    }

    void compute(const Unit& unit, const Unit* next_unit) {
        const int group = spec_.group();
        const int64_t tokens = unit.row_end - unit.row_begin, head_rows = tokens * group;
        const int64_t rows = head_rows * (unit.head_end - unit.head_begin);
        pack_queries(unit);
        begin_range(rows);
        std::fill(all_largest_, all_largest_ + rows, -INFINITE);
        const bool one_range = unit.tile_begin / TILES_PER_RANGE == (unit.tile_end - 1) / TILES_PER_RANGE;

        Tile tiles[2];
        locate(unit, unit.tile_begin, tiles[unit.tile_begin & 1]);
        for (int64_t tile = unit.tile_begin; tile < unit.tile_end; ++tile) {
            const Tile& now = tiles[tile & 1];
            Tile& next = tiles[~tile & 1];
            const Unit* owner = tile + 1 < unit.tile_end ? &unit : next_unit;
            if (owner) locate(*owner, owner == &unit ? tile + 1 : owner->tile_begin, next);
            // Rows that see something of this tile: tokens [from, to).
            const int64_t start = tile * TILE;
            const int64_t from = std::max<int64_t>(0, start - unit.position);
            int64_t to = tokens;
            if (spec_.window) to = std::min(to, start + TILE - 1 + spec_.window - unit.position);
            for (int head = unit.head_begin; head < unit.head_end; ++head) {
                point(head, now);
                if (head + 1 < unit.head_end)
                    look_ahead(head + 1, now);
                else if (owner)
                    look_ahead(owner->head_begin, next);
                else
                    ahead_.clear();
                const bool directly = (to - from) * group <= MOST_DIRECT_ROWS;
                if (!directly) {
                    pack_keys<Math>(key_, now.count, spec_.key_dim, keys_, ahead_);
                    pack_values(Math(), value_, now.count, spec_.value_dim, values_, columns_, ahead_);
                }
                const int64_t base = (head - unit.head_begin) * head_rows;
                for (int64_t row = from * group; row < to * group; row += BLOCK_ROWS) {
                    const int block = int(std::min<int64_t>(BLOCK_ROWS, to * group - row));
                    meet(unit, start, base, row, block, now.count, directly);
                }
                ahead_.template ask<2 * TILE * 64>();
            }
            const bool range_ends = (tile + 1) % TILES_PER_RANGE == 0 || tile + 1 == unit.tile_end;
            if (range_ends && !one_range) {
                for (int64_t row = 0; row < rows; ++row)
                    join(all_largest_[row], all_weights_[row], all_sums_ + row * columns_, largest_[row],
                         sum(load(weight_lanes_ + row * LANES)), sums_ + row * columns_);
                begin_range(rows);
            }
        }
        if (unit.merge >= 0) return hand_in(unit, rows);
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            if (one_range)
                finish(token, head, largest_[row], sum(load(weight_lanes_ + row * LANES)), sums_ + row * columns_);
            else
                finish(token, head, all_largest_[row], all_weights_[row], all_sums_ + row * columns_);
        });
    }

    // The rows of a unit in the order they are kept in: body(row, token of the batch, query head).
    template <class Body>
    void for_each_row(const Unit& unit, Body&& body) {
        const int group = spec_.group();
        int64_t row = 0;
        for (int head = unit.head_begin; head < unit.head_end; ++head)
            for (int64_t token = unit.row_begin; token < unit.row_end; ++token)
                for (int g = 0; g < group; ++g) body(row++, token, head * group + g);
    }

    void pack_queries(const Unit& unit) {
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            pack_query(
                Math(), call_.query_dtype, call_.query, token * call_.query_row + head * call_.query_head, spec_.key_dim,
                query_ + row * query_stride_
            );
        });
    }

    void begin_range(int64_t rows) {
        std::fill(largest_, largest_ + rows, -INFINITE);
        std::memset(weight_lanes_, 0, rows * LANES * sizeof(float));
        std::memset(sums_, 0, rows * columns_ * sizeof(float));
    }

    // Where a tile's keys and values lie. Those that no row of the unit may see are never read, whatever they hold.
    void locate(const Unit& unit, int64_t tile, Tile& to) {
        const int64_t start = tile * TILE;
        const int64_t last = unit.position + (unit.row_end - unit.row_begin) - 1;
        const int64_t oldest = spec_.window ? std::max<int64_t>(0, unit.position - spec_.window + 1) : 0;
        to.first = int(std::max<int64_t>(0, oldest - start));
        to.count = int(std::min<int64_t>(TILE, last + 1 - start));
        const int32_t* table = plan_.blocks.data() + plan_.table_begin[unit.request];
        int64_t column = (start + to.first) / plan_.block_size, row = (start + to.first) % plan_.block_size;
        for (int i = to.first; i < to.count; ++i) {
            const int64_t block = table[column];
            to.keys[i] = block * call_.keys.block + row * call_.keys.row;
            to.values[i] = block * call_.values.block + row * call_.values.row;
            if (++row == plan_.block_size) row = 0, ++column;
        }
    }

    void look_ahead(int head, const Tile& tile) {
        ahead_.clear();
        const Cache* keys = (const Cache*)call_.keys.data + head * call_.keys.head;
        const Cache* values = (const Cache*)call_.values.data + head * call_.values.head;
        for (int i = tile.first; i < tile.count; ++i) ahead_.add(keys + tile.keys[i], spec_.key_dim * sizeof(Cache));
        for (int i = tile.first; i < tile.count; ++i) ahead_.add(values + tile.values[i], spec_.value_dim * sizeof(Cache));
    }

    // A head's keys and values; zeros in place of those that are not there.
    void point(int head, const Tile& tile) {
        const Cache* keys = (const Cache*)call_.keys.data + head * call_.keys.head;
        const Cache* values = (const Cache*)call_.values.data + head * call_.values.head;
        for (int i = 0; i < TILE; ++i) key_[i] = value_[i] = (const Cache*)zeros_;
        for (int i = tile.first; i < tile.count; ++i) key_[i] = keys + tile.keys[i], value_[i] = values + tile.values[i];
    }

    // A block of rows meets a tile. `row` counts within the head's rows, which begin at `base`.
    void meet(const Unit& unit, int64_t start, int64_t base, int64_t row, int rows, int count, bool directly) {
        // What lies behind the last row's own position is left out, a quarter of a tile at a time.
        const int64_t last = unit.position + int(row + rows - 1) / spec_.group() - start;
        count = int(std::min<int64_t>(count, last + 1));
        switch ((count + TILE / 4 - 1) / (TILE / 4)) {
            case 1: return meet_quarters<1>(unit, start, base, row, rows, count, directly);
            case 2: return meet_quarters<2>(unit, start, base, row, rows, count, directly);
            case 3: return meet_quarters<3>(unit, start, base, row, rows, count, directly);
            default: return meet_quarters<4>(unit, start, base, row, rows, count, directly);
        }
    }

    template <int QUARTERS>
    void meet_quarters(const Unit& unit, int64_t start, int64_t base, int64_t row, int rows, int count, bool directly) {
        constexpr int VECTORS = QUARTERS * (TILE / 4 / LANES), ALL_VECTORS = TILE / LANES;
        const int64_t at = base + row;
        score(rows, query_ + at * query_stride_, count, VECTORS, directly);
        // Scores count in powers of two: those of a row are its products times this.
        float unit_of_score = spec_.scale * LOG2_E;
        if (spec_.softcap != 0) {
            cap(rows, VECTORS);
            unit_of_score = 1;
        }
        float keep[BLOCK_ROWS];
        for (int r = 0; r < rows; ++r) {
            float* scores = scores_ + r * TILE;
            const int64_t last = unit.position + int(row + r) / spec_.group() - start;  // that this row sees
            const int64_t oldest = spec_.window ? last - spec_.window + 1 : 0;
            if (last < VECTORS * LANES - 1 || oldest > 0) hide(scores, oldest, last);
            F32 seen[VECTORS], most = seen[0] = load(scores);
            for (int j = 1; j < VECTORS; ++j) most = max(seen[j] = load(scores + j * LANES), most);
            if constexpr (QUARTERS == 4) ahead_.template ask<16>();
            const float before = largest_[at + r], now = std::max(before, largest(most) * unit_of_score);
            largest_[at + r] = now;
            F32 weights[ALL_VECTORS];
            for (int j = 0; j < VECTORS; ++j) weights[j] = Math::exp2_of(fma(seen[j], set(unit_of_score), set(-now)));
            for (int j = VECTORS; j < ALL_VECTORS; ++j) weights[j] = zero();
            const F32 kept = exp2(set(before - now));
            keep[r] = first_lane(kept);
            store_weights(Math(), weights_ + r * TILE, weights, ALL_VECTORS);
            for (int half = ALL_VECTORS / 2; half; half /= 2)
                for (int j = 0; j < half; ++j) weights[j] = add(weights[j], weights[j + half]);
            float* lanes = weight_lanes_ + (at + r) * LANES;
            store(lanes, fma(load(lanes), kept, weights[0]));
        }
        float* sums = sums_ + at * columns_;
        if (!directly)
            return product<Math>(
                rows, weights_, TILE, values_, columns_, (count + Math::PER_STEP - 1) / Math::PER_STEP, sums, columns_,
                int(columns_ / LANES), keep, ahead_
            );
        switch (rows) {
            case 1: return weigh_directly<Math, 1>(weights_, value_, count, spec_.value_dim, sums, columns_, keep, ahead_);
            case 2: return weigh_directly<Math, 2>(weights_, value_, count, spec_.value_dim, sums, columns_, keep, ahead_);
            default: return weigh_directly<Math, 3>(weights_, value_, count, spec_.value_dim, sums, columns_, keep, ahead_);
        }
    }

    void score(int rows, const uint32_t* query, int count, int vectors, bool directly) {
        if (!directly)
            return product<Math>(
                rows, query, query_stride_, keys_, TILE, key_steps_, scores_, TILE, vectors, nullptr, ahead_
            );
        switch (rows) {
            case 1: return score_directly<Math, 1>(key_, count, spec_.key_dim, query, query_stride_, scores_, ahead_);
            case 2: return score_directly<Math, 2>(key_, count, spec_.key_dim, query, query_stride_, scores_, ahead_);
            default: return score_directly<Math, 3>(key_, count, spec_.key_dim, query, query_stride_, scores_, ahead_);
        }
    }

    void cap(int rows, int vectors) {
        for (int r = 0; r < rows; ++r)
            for (int j = 0; j < vectors; ++j) {
                float* at = scores_ + r * TILE + j * LANES;
                const F32 capped = tanh_precise(mul(load(at), set(spec_.scale / spec_.softcap)));
                store(at, mul(capped, set(spec_.softcap * LOG2_E)));
            }
    }

    // Minus infinity for the keys that a row does not see: all but [oldest, last].
    static void hide(float* scores, int64_t oldest, int64_t last) {
        const I32 from = iset(int(std::max<int64_t>(oldest, 0))), to = iset(int(std::min<int64_t>(last, TILE)));
        for (int j = 0; j < TILE / LANES; ++j) {
            const I32 place = iadd(ramp(), iset(j * LANES));
            F32 s = where_less(to, place, set(-INFINITE), load(scores + j * LANES));
            store(scores + j * LANES, where_less(place, from, set(-INFINITE), s));
        }
    }

    // Adds a range's sums to those of the ranges before it. A range of which a row sees nothing changes nothing.
    void join(float& largest_so_far, float& weights, float* sums, float largest, float more_weights, const float* more) {
        if (largest == -INFINITE) return;
        if (largest_so_far == -INFINITE) {
            largest_so_far = largest, weights = more_weights;
            std::memcpy(sums, more, columns_ * sizeof(float));
            return;
        }
        const float now = std::max(largest_so_far, largest);
        const float keep = exp2_of(largest_so_far - now), take = exp2_of(largest - now);
        largest_so_far = now;
        weights = std::fma(weights, keep, more_weights * take);
        for (int64_t d = 0; d < columns_; d += LANES)
            store(sums + d, fma(load(sums + d), set(keep), mul(load(more + d), set(take))));
    }

    void hand_in(const Unit& unit, int64_t rows) {
        Merge& merge = plan_.merges[unit.merge];
        float* part = plan_.parts.data() + merge.at + unit.part * rows * row_floats_;
        for (int64_t row = 0; row < rows; ++row) {
            float* to = part + row * row_floats_;
            to[0] = largest_[row], to[1] = sum(load(weight_lanes_ + row * LANES));
            std::memcpy(to + 2, sums_ + row * columns_, columns_ * sizeof(float));
        }
        if (merge.open.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        merge.open.store(merge.parts, std::memory_order_relaxed);  // for the next layer
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            float most = -INFINITE, weights = 0;
            for (int p = 0; p < merge.parts; ++p) {
                const float* from = plan_.parts.data() + merge.at + (p * rows + row) * row_floats_;
                join(most, weights, all_sums_, from[0], from[1], from + 2);
            }
            finish(token, head, most, weights, all_sums_);
        });
    }

    void finish(int64_t token, int64_t head, float most, float weights, float* sums) {
        float keep = 1;
        if (call_.sinks) {
            const float sink = call_.sinks[head] * LOG2_E, now = std::max(most, sink);
            keep = exp2_of(most - now);
            weights = std::fma(weights, keep, exp2_of(sink - now));
        }
        natural_order(Math(), sums, columns_);
        const F32 factor = set(keep / weights);
        const int64_t out = (token * spec_.q_heads + head) * spec_.value_dim;
        for (int64_t d = 0; d < spec_.value_dim; d += LANES) {
            const F32 value = fma(load(sums + d), factor, zero());  // + 0: a sum that underflowed to -0 is 0
            store_as(
                call_.query_dtype, call_.out, out + d, value, int(std::min<int64_t>(LANES, spec_.value_dim - d))
            );
        }
    }

    const AttentionCall& call_;
    Plan& plan_;
    const Spec& spec_;
    int64_t key_steps_, query_stride_, columns_, row_floats_, longest_;
    Ahead ahead_;
    const Cache *key_[TILE], *value_[TILE];
    uint32_t *keys_, *values_, *query_, *weights_;
    float *scores_, *sums_, *all_sums_, *weight_lanes_, *largest_, *all_largest_, *all_weights_, *zeros_;
};

template <class Math, class Cache>
inline void attend_with(const AttentionCall& call, int threads) {
    const Attention<Math, Cache> attention(call);
    const int wanted = int(std::min<int64_t>(threads, call.plan->units.size()));
    run_team(wanted, [&](Team& team, int rank) {
        Attention<Math, Cache> mine(attention);
        mine.run(team, rank);
    });
}

inline void attend(const AttentionCall& call, int threads) {
#if MAINSPRING_BF16_DOT
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::bf16)
        return attend_with<Bf16Math, bf16>(call, threads);
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::fp8)
        return attend_with<Bf16Math, fp8>(call, threads);
#endif
    switch (call.cache_dtype) {
        case Dtype::fp32: return attend_with<Fp32Math, float>(call, threads);
        case Dtype::bf16: return attend_with<Fp32Math, bf16>(call, threads);
        case Dtype::fp16: return attend_with<Fp32Math, fp16>(call, threads);
        case Dtype::fp8: return attend_with<Fp32Math, fp8>(call, threads);
    }
}

}  // namespace mainspring
