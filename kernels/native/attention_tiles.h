// The two products of attention, for a tile of keys and values and a block of query rows: up to 6, 12 or 16.
//
// Scores: one number (or pair of bf16) of each row, broadcast, times a vector of LANES keys: so keys are transposed, into a
// buffer. Weighted values: a weight (or the weights of two neighbouring keys), broadcast, times a vector along the value's
// dimension, straight from the cache; for many rows values are packed first where that pays (PACKS_VALUES). Each
// result is one chain of sums, over the dimension or over the keys, in ascending order, whichever way its factors came.
//
// With AMX both are products of tiles, up to 16 rows and 16 keys or columns at a time. Few rows can't fill them, and what
// lies between their short phases leaves memory idle; so these are computed by fp32 instructions, which do to each sum what
// the tiles would.
//
// Two kinds of arithmetic: pairs of bf16 with VDPBF16PS, where queries are bf16 and the cache is bf16 or fp8 (which is
// exact in bf16), weights rounded to bf16: twice the products of fp32 an instruction, and no widening. Else fp32; a cache
// of bf16 is then transposed in pairs, and a shift or a mask makes fp32 of half a pair.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "amx.h"
#include "attention_plan.h"
#include "dtypes.h"
#include "six_rows.h"

#define UNROLLED _Pragma("GCC unroll 16")  // or gcc keeps arrays in memory rather than in registers (seen: half the speed)

namespace mainspring {

constexpr int MOST_DIRECT_ROWS = 4;  // so few that packing values would cost more than it saves

constexpr int64_t up_to_multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

// ---------------------------------------------------------------- where keys and values lie

// A head's keys or values of a tile.
template <class T>
struct Rows {
    const T* run[TILE / RUN];
    int64_t stride;
    const T* row(unsigned i) const { return run[i / RUN] + i % RUN * stride; }
};

// Asks for what is read next (values while their keys are read, the next head's keys while values are), a few lines at a
// time and all the time: a core keeps some dozens of lines on the way, so memory falls idle wherever nobody asks, and
// asking for more at once only waits. No further ahead than that: what is asked for must still be in the first-level cache
// when its time comes, or fetching it from the second competes for the same dozens.
class Ahead {
  public:
    template <class T>
    void turn_to(const Rows<T>& rows, int first, int count, int64_t dim) {
        const int step = rows.stride == dim ? RUN : 1;  // rows that are one piece
        pieces_ = next_ = 0, bytes_ = step * dim * sizeof(T);
        for (int i = first / step * step; i < count; i += step) piece_[pieces_++] = (const char*)rows.row(i);
        forward();
    }
    template <int LINES>
    void ask() {
        if (at_ >= end_) return;
        UNROLLED for (int i = 0; i < LINES; ++i) prefetch(at_ + 64 * i);
        if ((at_ += 64 * LINES) >= end_) forward();
    }

  private:
    void forward() {
        if (next_ < pieces_) at_ = piece_[next_++], end_ = at_ + bytes_;
    }
    const char *at_ = nullptr, *end_ = nullptr, *piece_[TILE];
    int64_t bytes_ = 0;
    int next_ = 0, pieces_ = 0;
};

// ---------------------------------------------------------------- two kinds of arithmetic

// `step` adds to each lane one term (fp32) or two (bf16), from 32 bits of either factor.
struct Fp32Math {
    static constexpr bool TILES = false;  // of AMX
    static constexpr int PER_STEP = 1, BLOCK_ROWS = LANES == 16 ? 12 : 6;  // of more rows, a key or value is widened less often
    static F32 step(F32 sum, I32 a, I32 b) { return fma(from_bits(a), from_bits(b), sum); }
    static F32 exp2_of(F32 x) { return exp2(x); }
    static void store_weights(uint32_t* row, const F32* weights, int vectors) {
        for (int j = 0; j < vectors; ++j) store((float*)row + j * LANES, weights[j]);
    }
    // A head of the query → dwords, zeros up to a multiple of LANES of them.
    static void pack_query(Dtype dtype, const void* query, int64_t offset, int64_t dim, uint32_t* packed) {
        with_dtype(dtype, [&](auto t) {
            const auto* from = (const decltype(t)*)query + offset;
            for (int64_t d = 0; d < dim; d += LANES)
                store((float*)packed + d, dim - d >= LANES ? load(from + d) : load_n(from + d, int(dim - d)));
        });
    }
};

// Two bf16 to a lane, from element i on, those at or beyond n as zero.
inline I32 load_pairs(const bf16* p, int64_t i, int64_t n) {
    if (n - i >= 2 * LANES) return iload((const int32_t*)(p + i));
#if MAINSPRING_AVX512
    return _mm512_maskz_loadu_epi16((1u << (n - i)) - 1, p + i);
#else
    uint16_t halves[2 * LANES] = {};
    std::memcpy(halves, p + i, 2 * (n - i));
    return iload((const int32_t*)halves);
#endif
}
#if MAINSPRING_BF16_ATTENTION
struct Bf16Math {
#if MAINSPRING_AMX
    static constexpr bool TILES = true;
    static constexpr int PER_STEP = 2, BLOCK_ROWS = TILE_ROWS;
#else
    static constexpr bool TILES = false;
    static constexpr int PER_STEP = 2, BLOCK_ROWS = 6;
#endif
    static F32 step(F32 sum, I32 a, I32 b) { return dot_bf16(sum, a, b); }
    static F32 exp2_of(F32 x) { return exp2_coarse(x); }
    static void store_weights(uint32_t* row, const F32* weights, int vectors) {
        for (int j = 0; j < vectors; j += 2)
            _mm512_storeu_si512(row + j / 2 * LANES, (__m512i)_mm512_cvtne2ps_pbh(weights[j + 1], weights[j]));
    }
    static void pack_query(Dtype, const void* query, int64_t offset, int64_t dim, uint32_t* packed) {
        for (int64_t d = 0; d < dim; d += 2 * LANES)
            istore((int32_t*)packed + d / 2, load_pairs((const bf16*)query + offset, d, dim));
    }
};
#endif

// Dwords of PARTS steps' factors → the factor of one of these steps.
template <int PARTS>
inline I32 part_of(I32 dwords, int part) {
    return PARTS == 1 ? dwords : part ? iand(dwords, iset((int)0xffff0000)) : ishl<16>(dwords);  // a pair of bf16
}

// What a cache of T offers to either arithmetic. `dwords`: LANES of them, from element i on, those at or beyond n elements
// as zero; ELEMENTS elements, in each dword PARTS steps of a key. `columns`: of a value (or two) that many elements as
// vectors of one dword a column, in an order that `natural_order` undoes.
template <class Math, class T>
struct Source {
    static constexpr int PARTS = 1, ELEMENTS = LANES;
    static constexpr bool PACKS_VALUES = !std::is_same_v<T, float>;  // for many rows: widened once
    static I32 dwords(const T* p, int64_t i, int64_t n) {
        return bits_of(n - i >= LANES ? load(p + i) : load_n(p + i, int(n - i)));
    }
    static void columns(const T* p, const T*, int64_t i, int64_t n, I32* to) { *to = dwords(p, i, n); }
    static void natural_order(float*, int64_t) {}
};
template <>
struct Source<Fp32Math, bf16> {
    static constexpr int PARTS = 2, ELEMENTS = 2 * LANES;
    static constexpr bool PACKS_VALUES = LANES == 8;  // in the cache they lie apart and share few sets of L1
    static I32 dwords(const bf16* p, int64_t i, int64_t n) { return load_pairs(p, i, n); }
    static void columns(const bf16* p, const bf16*, int64_t i, int64_t n, I32* to) {  // even ones, odd ones
        const I32 pairs = dwords(p, i, n);
        to[0] = part_of<2>(pairs, 0), to[1] = part_of<2>(pairs, 1);
    }
    static void natural_order(float* row, int64_t columns) {
        for (int64_t d = 0; d < columns; d += 2 * LANES) {
            F32 even = load(row + d), odd = load(row + d + LANES);
            interleave(even, odd);
            store(row + d, even), store(row + d + LANES, odd);
        }
    }
};
#if MAINSPRING_BF16_ATTENTION
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

template <class T>
struct Source<Bf16Math, T> {
    static constexpr int PARTS = 1, ELEMENTS = 2 * LANES;
    static constexpr bool PACKS_VALUES = true;  // pairs of neighbouring keys
    static I32 dwords(const bf16* p, int64_t i, int64_t n) { return load_pairs(p, i, n); }
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
    static void columns(const T* even_key, const T* odd_key, int64_t i, int64_t n, I32* to) {
        const __m512i even = dwords(even_key, i, n), odd = dwords(odd_key, i, n);
        to[0] = _mm512_unpacklo_epi16(even, odd), to[1] = _mm512_unpackhi_epi16(even, odd);
    }
    static void natural_order(float* row, int64_t columns) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        for (int64_t d = 0; d < columns; d += 32) {
            const F32 low = load(row + d), high = load(row + d + 16);
            store(row + d, _mm512_permutex2var_ps(low, first, high));
            store(row + d + 16, _mm512_permutex2var_ps(low, iadd(first, iset(8)), high));
        }
    }
};
#endif

// ---------------------------------------------------------------- scores

// Keys [first, count) → [dwords][TILE]. Columns that are not there, and the last rows of an odd dimension, hold rubbish.
template <class Math, class T>
MAINSPRING_NOINLINE void pack_keys(
    const Rows<T>& keys, int first, int count, int64_t dim, uint32_t* packed, Ahead& ahead
) {
    using S = Source<Math, T>;
    // In about the share that this has of the time until the values' turn.
    constexpr int LINES = LANES * S::ELEMENTS * int(sizeof(T)) / 64;
    constexpr int ASKED = std::max(1, LANES == 16 ? LINES * 3 / 4 : LINES / 2);
    for (unsigned column = first / LANES * LANES; column < unsigned(count); column += LANES) {
        int32_t* to = (int32_t*)packed + column;
        for (int64_t d = 0; d < dim; d += S::ELEMENTS, to += LANES * TILE) {
            ahead.ask<ASKED>();
            const int64_t whole = d + S::ELEMENTS;
            I32 square[LANES];
            UNROLLED for (int run = 0; run < LANES / RUN; ++run) {
                const T* from = keys.run[column / RUN + run];
                I32* to_run = square + run * RUN;
                if (whole <= dim)
                    UNROLLED for (int i = 0; i < RUN; ++i) to_run[i] = S::dwords(from + i * keys.stride, d, whole);
                else
                    for (int i = 0; i < RUN; ++i) to_run[i] = S::dwords(from + i * keys.stride, d, dim);
            }
            transpose(square);
            UNROLLED for (int i = 0; i < LANES; ++i) istore(to + i * TILE, square[i]);
        }
    }
}

#if MAINSPRING_AVX2
// `product_block` of six rows by two vectors, where a dword of b is a pair of bf16.
MAINSPRING_INLINE void product_of_six(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t dwords, float* c, int64_t c_row,
    const float* keep
) {
#define MAINSPRING_ROWS(at) \
    MAINSPRING_ROW(a, at "(%[x])") MAINSPRING_ROW(b, at "(%[x],%[row])") MAINSPRING_ROW(c, at "(%[x],%[row],2)") \
    MAINSPRING_ROW(d, at "(%[x3])") MAINSPRING_ROW(e, at "(%[x3],%[row])") MAINSPRING_ROW(f, at "(%[x3],%[row],2)")
    SixRows sums([&](int r, int j) { return keep ? mul(load(c + r * c_row + j * LANES), set(keep[r])) : zero(); });
    const I32 mask = iset((int)0xffff0000);
    for (int64_t s = 0; s < dwords; ++s, a += 2, b += b_row)
        asm(MAINSPRING_PAIRS("(%[w])", "32(%[w])", MAINSPRING_ROWS(""), MAINSPRING_ROWS("4"))
            : MAINSPRING_SIX_ROWS(sums)
            : [mask] "x"(mask), [w] "r"(b), [x] "r"(a), [x3] "r"(a + 3 * a_row), [row] "r"(a_row * sizeof(*a))
            : MAINSPRING_SIX_ROWS_CLOBBERS, "memory");
    sums.store_to(c, c_row);
#undef MAINSPRING_ROWS
}
#endif

// c[r][:] = c[r][:] * keep[r] + sum over s of a[r][s] * b[s][:], for ROWS rows and COLUMNS vectors; keep null: from zero.
// A dword of b holds PARTS steps. Never inlined: inside `product`, gcc may keep the sums of 3 or 4 rows in memory (seen).
template <class Math, int PARTS, int ROWS, int COLUMNS>
MAINSPRING_NOINLINE void product_block(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t dwords, float* c, int64_t c_row,
    const float* keep, Ahead& ahead
) {
#if MAINSPRING_AVX2
    if constexpr (PARTS == 2 && ROWS == 6 && COLUMNS == 2)
        return product_of_six(a, a_row, b, b_row, dwords, c, c_row, keep);
#endif
    // Of b, as many vectors at a time as there are registers left.
    constexpr int WIDE = LANES == 16 ? COLUMNS : ROWS <= 2 ? 1 : std::min(2, COLUMNS);
    F32 sums[ROWS][COLUMNS];
    UNROLLED for (int r = 0; r < ROWS; ++r)
        UNROLLED for (int j = 0; j < COLUMNS; ++j)
            sums[r][j] = keep ? mul(load(c + r * c_row + j * LANES), set(keep[r])) : zero();
    for (int64_t s = 0; s < dwords; ++s) {
        if constexpr (ROWS <= MOST_DIRECT_ROWS) ahead.ask<(COLUMNS + 3) / 4>();
        UNROLLED for (int j = 0; j < COLUMNS; j += WIDE)
            UNROLLED for (int part = 0; part < PARTS; ++part) {
                I32 of_b[WIDE];
                UNROLLED for (int w = 0; w < WIDE; ++w)
                    of_b[w] = part_of<PARTS>(iload((const int32_t*)b + s * b_row + (j + w) * LANES), part);
                UNROLLED for (int r = 0; r < ROWS; ++r) {
                    const I32 of_a = iset((int)a[r * a_row + s * PARTS + part]);
                    UNROLLED for (int w = 0; w < WIDE; ++w) sums[r][j + w] = Math::step(sums[r][j + w], of_a, of_b[w]);
                }
            }
    }
    UNROLLED for (int r = 0; r < ROWS; ++r)
        UNROLLED for (int j = 0; j < COLUMNS; ++j) store(c + r * c_row + j * LANES, sums[r][j]);
}

// The same for `columns` vectors, COLUMNS at a time and then what is left.
template <class Math, int PARTS, int ROWS, int COLUMNS>
inline void product_rows(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t dwords, float* c, int64_t c_row,
    int columns, const float* keep, Ahead& ahead
) {
    int j = 0;
    for (; j + COLUMNS <= columns; j += COLUMNS)
        product_block<Math, PARTS, ROWS, COLUMNS>(a, a_row, b + j * LANES, b_row, dwords, c + j * LANES, c_row, keep, ahead);
    if constexpr (COLUMNS > 1)
        if (j < columns)
            product_rows<Math, PARTS, ROWS, COLUMNS / 2>(
                a, a_row, b + j * LANES, b_row, dwords, c + j * LANES, c_row, columns - j, keep, ahead
            );
}

// Calls body with `rows`, 1 to MOST, as a constant.
template <int MOST, class Body>
inline void with_rows(int rows, Body&& body) {
    if constexpr (MOST > 1)
        if (rows < MOST) return with_rows<MOST - 1>(rows, body);
    body(std::integral_constant<int, MOST>());
}

template <class Math, int PARTS>
MAINSPRING_NOINLINE void product(
    int rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t dwords, float* c, int64_t c_row,
    int columns, const float* keep, Ahead& ahead
) {
    with_rows<Math::BLOCK_ROWS>(rows, [&](auto n) {
        constexpr int COLUMNS = LANES == 16 && n.value <= 6 ? 4 : n.value == 1 ? 8 : n.value == 2 ? 4 : 2;
        product_rows<Math, PARTS, n.value, COLUMNS>(a, a_row, b, b_row, dwords, c, c_row, columns, keep, ahead);
    });
}

// ---------------------------------------------------------------- weighted values

// Values [first, count) → [steps][columns] dwords. Where a step takes two keys, zeros follow the last.
template <class Math, class T>
inline void pack_values(
    const Rows<T>& values, int first, int count, int64_t dim, const T* zeros, uint32_t* packed, int64_t columns, Ahead& ahead
) {
    using S = Source<Math, T>;
    for (int k = first & -Math::PER_STEP; k < count; k += Math::PER_STEP) {
        const T *row = values.row(k), *other = k + 1 < count ? values.row(k + 1) : zeros;
        for (int64_t d = 0; d < dim; d += S::ELEMENTS) {
            I32 vectors[S::ELEMENTS / LANES];
            S::columns(row, other, d, dim, vectors);
            for (int j = 0; j < S::ELEMENTS / LANES; ++j)
                istore((int32_t*)packed + k / Math::PER_STEP * columns + d + j * LANES, vectors[j]);
            ahead.ask<1>();
        }
    }
    if constexpr (Math::TILES) {  // products are of whole chunks of keys
        const auto clear = [&](int64_t from, int64_t to) {
            if (from < to) std::memset(packed + from * columns, 0, (to - from) * columns * sizeof(*packed));
        };
        clear(first / TILE_K * PAIRS, first / 2);
        clear((count + 1) / 2, up_to_multiple((count + 1) / 2, PAIRS));
    }
}

// What `pack_values` and `product` do together, straight from the cache: columns [from, dim) of the sums, LOADS times
// ELEMENTS at a time and then what is left.
template <class Math, int ROWS, int LOADS, class T>
inline void weigh_columns(
    const uint32_t* weights, const Rows<T>& values, int first, int count, int64_t from, int64_t dim, const T* zeros,
    float* sums, int64_t sums_row, const float* keep, Ahead& ahead
) {
    using S = Source<Math, T>;
    constexpr int OF_LOAD = S::ELEMENTS / LANES, STEP = Math::PER_STEP, WIDTH = LOADS * S::ELEMENTS;
    constexpr int BYTES = WIDTH * STEP * int(sizeof(T)), EVERY = std::max(1, 128 / BYTES) * STEP;
    const auto pass = [&](auto whole) {
        F32 of_row[ROWS][LOADS * OF_LOAD];
        UNROLLED for (int r = 0; r < ROWS; ++r)
            UNROLLED for (int j = 0; j < LOADS * OF_LOAD; ++j)
                of_row[r][j] = mul(load(sums + r * sums_row + from + j * LANES), set(keep[r]));
        for (int k = first & -STEP; k < count;) {
            const int end = std::min(count, (k | (RUN - 1)) + 1);
            for (const T* row = values.row(k) + from; k < end; k += STEP, row += STEP * values.stride) {
                if (k % EVERY == 0) ahead.ask<std::max(2, BYTES / 64)>();
                const T* other = STEP == 1 || k + 1 < count ? row + values.stride : zeros;
                UNROLLED for (int l = 0; l < LOADS; ++l) {
                    const int64_t d = l * S::ELEMENTS;
                    I32 vectors[OF_LOAD];
                    S::columns(row, other, d, whole.value ? d + S::ELEMENTS : dim - from, vectors);
                    UNROLLED for (int r = 0; r < ROWS; ++r) {
                        const I32 weight = iset((int)weights[r * TILE + k / STEP]);
                        UNROLLED for (int j = 0; j < OF_LOAD; ++j) {
                            F32& sum = of_row[r][l * OF_LOAD + j];
                            sum = Math::step(sum, weight, vectors[j]);
                        }
                    }
                }
            }
        }
        UNROLLED for (int r = 0; r < ROWS; ++r)
            UNROLLED for (int j = 0; j < LOADS * OF_LOAD; ++j) store(sums + r * sums_row + from + j * LANES, of_row[r][j]);
    };
    for (; from + WIDTH <= dim; from += WIDTH) pass(std::true_type());
    if (from == dim) return;
    if constexpr (LOADS > 1)
        weigh_columns<Math, ROWS, LOADS / 2>(
            weights, values, first, count, from, dim, zeros, sums, sums_row, keep, ahead
        );
    else
        pass(std::false_type());
}

template <class Math, int ROWS, class T>
MAINSPRING_NOINLINE void weigh_directly(
    const uint32_t* weights, const Rows<T>& values, int first, int count, int64_t dim, const T* zeros, float* sums,
    int64_t sums_row, const float* keep, Ahead& ahead
) {
    constexpr int FIT = (LANES == 16 ? 24 : 8) / ROWS / (Source<Math, T>::ELEMENTS / LANES);  // sums in registers
    constexpr int LOADS = FIT >= 8 && LANES == 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
    weigh_columns<Math, ROWS, LOADS>(weights, values, first, count, 0, dim, zeros, sums, sums_row, keep, ahead);
}

// ---------------------------------------------------------------- both by tiles of AMX

#if MAINSPRING_AMX
// One of a pair of bf16, in every lane.
inline F32 half_of(uint32_t pair, int part) { return from_bits(iset(int(part ? pair & 0xffff0000 : pair << 16))); }

// c[row][:] = sum over chunks [begin, end) of a[row] * b, of NUM times 16 columns. a: [rows] of dwords, 16 in a chunk; b:
// [dwords][columns]; rows lie `a_row`, `b_row` and `c_row` dwords apart. The shape: as many rows above as below.
template <int NUM>
inline void tile_product(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int begin, int end, float* c, int64_t c_row
) {
    tile_zero<C00>();
    if constexpr (NUM > 1) tile_zero<C01>();
    if constexpr (NUM > 2) tile_zero<C10>();
    if constexpr (NUM > 3) tile_zero<C11>();
    for (int chunk = begin; chunk < end; ++chunk) {
        const uint32_t* of_b = b + chunk * PAIRS * b_row;
        tile_load<A0>(a + chunk * PAIRS, a_row * 4);
        tile_load<B0>(of_b, b_row * 4);
        tile_multiply<C00, A0, B0>();
        if constexpr (NUM > 1) tile_load<B1>(of_b + 16, b_row * 4), tile_multiply<C01, A0, B1>();
        if constexpr (NUM > 2) tile_load<B0>(of_b + 32, b_row * 4), tile_multiply<C10, A0, B0>();
        if constexpr (NUM > 3) tile_load<B1>(of_b + 48, b_row * 4), tile_multiply<C11, A0, B1>();
    }
    tile_store<C00>(c, c_row * 4);
    if constexpr (NUM > 1) tile_store<C01>(c + 16, c_row * 4);
    if constexpr (NUM > 2) tile_store<C10>(c + 32, c_row * 4);
    if constexpr (NUM > 3) tile_store<C11>(c + 48, c_row * 4);
}

// The same for up to MOST_DIRECT_ROWS rows, COLUMNS times 16 columns. Denormals must become 0 (`FlushDenormals`).
template <int ROWS, int COLUMNS>
inline void like_tiles(
    const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int chunks, float* c, int64_t c_row, Ahead& ahead
) {
    F32 sums[ROWS][COLUMNS];
    UNROLLED for (int r = 0; r < ROWS; ++r)
        UNROLLED for (int j = 0; j < COLUMNS; ++j) sums[r][j] = zero();
    for (int chunk = 0; chunk < chunks; ++chunk, a += PAIRS) {
        F32 parts[2][ROWS][COLUMNS];
        UNROLLED for (int part = 0; part < 2; ++part)
            UNROLLED for (int r = 0; r < ROWS; ++r)
                UNROLLED for (int j = 0; j < COLUMNS; ++j) parts[part][r][j] = zero();
        for (int s = 0; s < PAIRS; ++s, b += b_row) {
            ahead.ask<(COLUMNS + 3) / 4>();
            UNROLLED for (int j = 0; j < COLUMNS; ++j) {
                const I32 pairs = iload((const int32_t*)b + j * LANES);
                UNROLLED for (int part = 0; part < 2; ++part) {
                    const F32 of_b = from_bits(part_of<2>(pairs, part));
                    UNROLLED for (int r = 0; r < ROWS; ++r)
                        parts[part][r][j] = fma(half_of(a[r * a_row + s], part), of_b, parts[part][r][j]);
                }
            }
        }
        UNROLLED for (int r = 0; r < ROWS; ++r)
            UNROLLED for (int j = 0; j < COLUMNS; ++j)
                sums[r][j] = add(sums[r][j], add(parts[0][r][j], parts[1][r][j]));
    }
    UNROLLED for (int r = 0; r < ROWS; ++r)
        UNROLLED for (int j = 0; j < COLUMNS; ++j) store(c + r * c_row + j * LANES, sums[r][j]);
}

template <int ROWS>
MAINSPRING_NOINLINE void score_like_tiles(
    const uint32_t* query, int64_t query_row, const uint32_t* keys, int vectors, float* scores, Ahead& ahead
) {
    constexpr int COLUMNS = ROWS <= 2 ? 4 : 2;  // 24 sums at most
    const int chunks = int(query_row / PAIRS);
    int j = 0;
    for (; j + COLUMNS <= vectors; j += COLUMNS)
        like_tiles<ROWS, COLUMNS>(query, query_row, keys + j * LANES, TILE, chunks, scores + j * LANES, TILE, ahead);
    for (; j < vectors; ++j)
        like_tiles<ROWS, 1>(query, query_row, keys + j * LANES, TILE, chunks, scores + j * LANES, TILE, ahead);
}

// sums = sums x keep + weights x values [first, count), straight from the cache; LOADS times 32 columns at a time.
template <int ROWS, int LOADS, class T>
inline void weigh_columns_like_tiles(
    const uint32_t* weights, const Rows<T>& values, int first, int count, int64_t from, int64_t dim, const T* zeros,
    float* sums, int64_t sums_row, const float* keep, Ahead& ahead
) {
    using S = Source<Bf16Math, T>;
    constexpr int WIDTH = LOADS * S::ELEMENTS, LINES = std::max(1, WIDTH * int(sizeof(T)) / 32);
    const I32 nothing = iset(0);
    const auto pass = [&](auto whole) {
        F32 weighted[ROWS][2 * LOADS];
        UNROLLED for (int r = 0; r < ROWS; ++r)
            UNROLLED for (int j = 0; j < 2 * LOADS; ++j) weighted[r][j] = zero();
        for (int k = first & -2; k < count;) {
            F32 parts[2][ROWS][2 * LOADS];
            UNROLLED for (int part = 0; part < 2; ++part)
                UNROLLED for (int r = 0; r < ROWS; ++r)
                    UNROLLED for (int j = 0; j < 2 * LOADS; ++j) parts[part][r][j] = zero();
            for (const int end = std::min(count, (k | (TILE_K - 1)) + 1); k < end; k += 2) {
                ahead.ask<LINES>();
                UNROLLED for (int part = 0; part < 2; ++part) {
                    const T* row = k + part < count ? values.row(k + part) + from : zeros;
                    UNROLLED for (int l = 0; l < LOADS; ++l) {
                        const int64_t d = l * S::ELEMENTS;
                        const I32 halves = S::dwords(row, d, whole.value ? d + S::ELEMENTS : dim - from);
                        const F32 low = from_bits(_mm512_unpacklo_epi16(nothing, halves));
                        const F32 high = from_bits(_mm512_unpackhi_epi16(nothing, halves));
                        UNROLLED for (int r = 0; r < ROWS; ++r) {
                            const F32 weight = half_of(weights[r * TILE + k / 2], part);
                            F32* to = parts[part][r] + 2 * l;
                            to[0] = fma(weight, low, to[0]), to[1] = fma(weight, high, to[1]);
                        }
                    }
                }
            }
            UNROLLED for (int r = 0; r < ROWS; ++r)
                UNROLLED for (int j = 0; j < 2 * LOADS; ++j)
                    weighted[r][j] = add(weighted[r][j], add(parts[0][r][j], parts[1][r][j]));
        }
        UNROLLED for (int r = 0; r < ROWS; ++r)
            UNROLLED for (int j = 0; j < 2 * LOADS; ++j) {
                float* sum = sums + r * sums_row + from + j * LANES;
                store(sum, fma(load(sum), set(keep[r]), weighted[r][j]));
            }
    };
    for (; from + WIDTH <= dim; from += WIDTH) pass(std::true_type());
    if (from == dim) return;
    if constexpr (LOADS > 1)
        weigh_columns_like_tiles<ROWS, LOADS / 2>(
            weights, values, first, count, from, dim, zeros, sums, sums_row, keep, ahead
        );
    else
        pass(std::false_type());
}

template <int ROWS, class T>
MAINSPRING_NOINLINE void weigh_like_tiles(
    const uint32_t* weights, const Rows<T>& values, int first, int count, int64_t dim, const T* zeros, float* sums,
    int64_t sums_row, const float* keep, Ahead& ahead
) {
    weigh_columns_like_tiles<ROWS, ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1>(
        weights, values, first, count, 0, dim, zeros, sums, sums_row, keep, ahead
    );
}
#endif

}  // namespace mainspring

#undef UNROLLED
