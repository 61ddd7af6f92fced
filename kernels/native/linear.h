// Linear layers: y[M, N] = x[M, K] * W[N, K]^T, with what follows it (bias, residual, act(gate) * up) in the same pass.
//
// W is packed once. Sums are fp32; W and x are bf16, fp16 or fp32; W may also be int8 or 4-bit, in
// groups, of whole numbers or with a codebook.
//
// Clockwork: an element of y is ONE fp32 accumulator that takes the products of its row in order of K. No tile, split
// between threads, block of K or number of rows changes that order, so none changes a bit. (Which rows share a tile, and
// which thread does it, is then free to be whatever is fastest.)
//
// How it is laid out, from the inside out:
//
//   step    32 columns of W by one 32-bit word of K (2 bf16, or 1 fp32): 128 bytes, two AVX-512 registers. Times one
//           word of x, broadcast, of each row.
//   tile    up to 14 rows by 32 columns: 28 accumulators + 2 of W + 1 of x = 31 of 32 registers. 14 rows take 28
//           multiply-adds (14 cycles at two a cycle) for 16 loads (8 cycles), and W comes from L2 at 9 bytes a cycle,
//           so nothing but the multiplier is the limit: no blocking for L1 is needed. (AVX2 has 16 registers of half the
//           size: up to 6 rows by 16 columns, 12 accumulators + 2 of W + 1 of x + a mask; a panel is then done half by half.)
//   panel   32 columns by all of K, contiguous. The tiles of a block of rows pass over it one after the other; while they
//           do, they fetch the next panel into L2, so that reading memory and multiplying overlap.
//   block   rows whose x stays in L2 while all panels go by.
//
// The caller owns the threads: every function takes (thread, num_threads), is called by all threads of the team with the
// same arguments, and does that thread's share. `barrier()` waits for all of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "functions.h"
#include "six_rows.h"

namespace mainspring {

constexpr int PANEL = 32;                 // columns
constexpr int VECTORS = PANEL / LANES;    // vectors in a row of a tile: 2 with AVX-512, 4 with AVX2
constexpr int LINE = 16;                  // words of x in a cache line
constexpr int GATE = PANEL / 2;           // columns of gate, then as many of up, in a panel of an interleaved weight
// Steps in a block of K: a block of a panel takes at most 256 KiB, a quarter of Zen 5's L2; or 64 KiB, an eighth of Zen 3's.
constexpr int STEPS_PER_BLOCK = LANES == 16 ? 2048 : 512;
// Of packed x, beside this panel and the next.
#if MAINSPRING_AMX
constexpr size_t X_BLOCK_BYTES = 1 << 20;  // every processor that has it has 2 MiB of L2
#elif MAINSPRING_AVX512 && !MAINSPRING_BF16_DOT
constexpr size_t X_BLOCK_BYTES = 640 << 10;  // of at least 1 MiB; x is fp32, and more tiles share what is widened
#else
constexpr size_t X_BLOCK_BYTES = 384 << 10;
#endif

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where the thread's share of `count` things begins; it ends where the next thread's begins.
inline int share(int count, int thread, int num_threads) { return (int)((int64_t)count * thread / num_threads); }

// ---------------------------------------------------------------- packing W

// What a word of a panel is: K values that lie together because they are multiplied together.
//   bf16  [K/2][32][2]   pairs along K, as VDPBF16PS takes them; an odd last k as [32] alone
//   fp16  [K][32]
//   fp32  [K][32]
// The last panel of a weight whose N is no multiple of 32 is as narrow as it needs to be: [K/2][N % 32][2]. So a packed
// weight has exactly the bytes of the unpacked one, whatever N and K, and each panel those of the rows it is made of.
template <class T>
struct Word {
    using type = uint32_t;
};
template <>
struct Word<fp16> {
    using type = uint16_t;
};

// rows [columns, K] of a weight → their panel, of as many bytes.
template <class T>
void pack_panel(const T* rows, int columns, int K, T* panel) {
    using W = typename Word<T>::type;
    constexpr int per_word = sizeof(W) / sizeof(T);
    const int words = K / per_word, odd = K % per_word;
    int k = 0;
    if (sizeof(W) == 4)
        for (; columns == PANEL && k + LANES <= words; k += LANES)
            for (int n = 0; n < PANEL; n += LANES) {
                I32 square[LANES];
                for (int i = 0; i < LANES; ++i) square[i] = load_bytes(rows + (size_t)(n + i) * K + k * per_word);
                transpose(square);
                for (int i = 0; i < LANES; ++i) store_bytes(panel + ((size_t)(k + i) * PANEL + n) * per_word, square[i]);
            }
    // 16 words of each row at a time, which is a cache line of it
    for (; k < words; k += LINE)
        for (int n = 0; n < columns; ++n)
            for (int i = k; i < std::min(words, k + LINE); ++i)
                std::memcpy((W*)panel + (size_t)i * columns + n, rows + (size_t)n * K + i * per_word, sizeof(W));
    for (int n = 0; odd && n < columns; ++n) panel[(size_t)words * columns * per_word + n] = rows[(size_t)n * K + K - 1];
}

// ---------------------------------------------------------------- the multiply-add of each type of weight

// A kind says what a step is: how its 32 columns of W become registers, and how they take words of x.
//   WEIGHT        the type in memory
//   K_PER_STEP    values of K in a step; X_WORDS: words of packed x that it takes
//   MAX_ROWS      of a tile, by the registers there are
//   WIDENS        whether a step can also store W as fp32, [K][32], from `wide` on: with WIDE it does
//   step          acc[r][v] += W * x[r], for ROWS rows of which x holds a line (16 words) each, and VECS vectors of columns

#if MAINSPRING_BF16_DOT
// bf16 by VDPBF16PS or BFDOT. x is bf16 too, two to a word.
struct Bf16Dot {
    using WEIGHT = bf16;
    using INPUT = bf16;
    static constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;
    static constexpr int K_PER_STEP = 2, X_WORDS = 1, STEP_BYTES = 4 * PANEL;
    static constexpr bool WIDENS = false;

    template <bool WIDE, int ROWS, int VECS>
    MAINSPRING_INLINE static void step(F32 (&acc)[ROWS][VECS], const char* w, const char* x, float*) {
        I32 wv[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) wv[v] = load_bytes(w + 4 * LANES * v);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const I32 xr = set_int(*(const int*)(x + r * 64));
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = dot_bf16(acc[r][v], wv[v], xr);
        }
    }
};
#endif

// bf16 without VDPBF16PS: a pair is widened to two fp32 vectors by a shift and a mask; x is fp32, one to a word.
struct Bf16Shift {
    using WEIGHT = bf16;
    using INPUT = float;
    static constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;
    static constexpr int K_PER_STEP = 2, X_WORDS = 2, STEP_BYTES = 4 * PANEL;
    static constexpr bool WIDENS = LANES == 16;

    template <bool WIDE, int ROWS, int VECS>
    MAINSPRING_INLINE static void step(F32 (&acc)[ROWS][VECS], const char* w, const char* x, float* wide) {
#if MAINSPRING_AVX512
        // A word of x is loaded into a register once for both vectors. A core loads as many words a cycle as it multiplies
        // vectors, so multiply-adds that load a copy of x each would leave no load for W.
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            F32 wv[VECS];
#pragma GCC unroll 2
            for (int v = 0; v < VECS; ++v) {
                const char* pairs = w + 64 * v;
                wv[v] = _mm512_castsi512_ps(odd ? _mm512_maskz_loadu_epi16(0xaaaaaaaa, pairs)
                                                : _mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
                if (WIDE) store(wide + odd * PANEL + v * LANES, wv[v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const F32 xr = set(*(const float*)(x + r * 64 + 4 * odd));
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) acc[r][v] = fma(wv[v], xr, acc[r][v]);
            }
        }
#else
        constexpr int PART = VECS == VECTORS ? 1 : VECS;  // vectors of W in registers at a time: what there is room for
#pragma GCC unroll 4
        for (int v0 = 0; v0 < VECS; v0 += PART)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; ++odd) {
                F32 wv[PART];
#pragma GCC unroll 2
                for (int v = 0; v < PART; ++v) {
                    const I32 pairs = load_bytes(w + 32 * (v0 + v));
                    wv[v] = from_bits(odd ? iand(pairs, set_int((int)0xffff0000)) : ishl<16>(pairs));
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    const F32 xr = set(*(const float*)(x + r * 64 + 4 * odd));
#pragma GCC unroll 2
                    for (int v = 0; v < PART; ++v) acc[r][v0 + v] = fma(wv[v], xr, acc[r][v0 + v]);
                }
            }
#endif
    }
};

// fp32 and fp16: FMA in fp32, one k a step.
template <class T>
struct Fma {
    using WEIGHT = T;
    using INPUT = float;
    static constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;
    static constexpr int K_PER_STEP = 1, X_WORDS = 1, STEP_BYTES = sizeof(T) * PANEL;
    static constexpr bool WIDENS = LANES == 16 && sizeof(T) == 2;

    template <bool WIDE, int ROWS, int VECS>
    MAINSPRING_INLINE static void step(F32 (&acc)[ROWS][VECS], const char* w, const char* x, float* wide) {
        F32 wv[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
            wv[v] = load((const T*)w + v * LANES);
            if (WIDE) store(wide + v * LANES, wv[v]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const F32 xr = set(*(const float*)(x + r * 64));
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = fma(wv[v], xr, acc[r][v]);
        }
    }
};

// Which kind a weight of type T gets on this machine. One type, one kind: two kinds would differ in their bits.
template <class T>
struct KindOf {
    using type = Fma<T>;
};
template <>
struct KindOf<bf16> {
#if MAINSPRING_BF16_DOT
    using type = Bf16Dot;
#else
    using type = Bf16Shift;
#endif
};

// ---------------------------------------------------------------- packing x

// Rows are dealt into tiles of nearly equal size: 16 rows are 8 + 8, not 14 + 2, so that no number of rows is a cliff. Where a
// tile has at most 6 rows, one of 3 to 5 takes nearly as long as one of 6: it has too few sums that do not wait for each
// other. So if tiles of 6 leave 1 or 2 rows, these are the last tile: 8 rows are 6 + 2.
struct Tiles {
    int rows, count;
    bool sixes;
    Tiles(int rows, int max_rows)
        : rows(rows), count(ceil_div(rows, max_rows)), sixes(max_rows == 6 && rows > 6 && (rows % 6 == 1 || rows % 6 == 2)) {}
    int begin(int tile) const { return sixes ? std::min(rows, 6 * tile) : share(rows, tile, count); }
    int of(int row) const {
        if (sixes) return row / 6;
        int tile = (int)((int64_t)row * count / rows);
        while (begin(tile + 1) <= row) ++tile;
        return tile;
    }
};

// Packed x: for each tile [lines][rows of the tile][16 words]. A tile is read front to back by one pointer, with all rows
// of a word within a few neighbouring cache lines; rows that lie K apart would fall on each other in L1 wherever K is a
// power of 2 (2048 bf16 are 4096 bytes, the span of one way).
// Row `r` of the `rows` of a tile: [K] → its place in the tile. Beyond K: zeros.
template <class Kind, class X>
void pack_row(const X* x, int K, char* tile, int rows, int r) {
    using INPUT = typename Kind::INPUT;
    constexpr int per_line = 64 / sizeof(INPUT);
    char* to = tile + r * 64;
    for (int k = 0; k < K; k += per_line, to += rows * 64)
        if (k + per_line <= K) {
            if (std::is_same<X, INPUT>::value)
                std::memcpy(to, x + k, 64);
            else
                for (int i = 0; i < per_line; i += LANES) store((INPUT*)to + i, load(x + k + i));
        } else {
            std::memset(to, 0, 64);
            for (int i = 0; i < K - k; i += LANES) store_n((INPUT*)to + i, load_n(x + k + i, K - k - i), K - k - i);
        }
}

// ---------------------------------------------------------------- the tile

// The piece of W that is next, which tiles fetch into L2 while they multiply this one. It is fetched in several places at
// once, which is half as fast again as in order. The processor's own fetching ahead is as fast only while nothing else is
// read or written: one cache line of results between two panels ends it (seen).
class Upcoming {
  public:
    Upcoming() = default;
    // `bytes` from `at` on, in `turns` turns.
    Upcoming(const char* at, size_t bytes, int turns, bool in_each_half = false)
        : at_(at), apart_(bytes / PLACES / 64 * 64), lines_(ceil_div((int)(apart_ / 64), std::max(1, turns))), end_(at + apart_),
          in_each_half_(in_each_half) {}

    // Where a panel is multiplied in halves: fetch in both, not only in the first.
    bool in_each_half() const { return in_each_half_; }

    void fetch() {
        if (at_ >= end_) return;
        for (int i = 0; i < lines_; ++i, at_ += 64)
            for (int place = 0; place < PLACES; ++place) prefetch_far(at_ + place * apart_);
    }

  private:
    static constexpr int PLACES = 4;
    const char* at_ = nullptr;
    size_t apart_ = 0;  // of places, in bytes
    int lines_ = 0;     // of the cache, a turn and place
    const char* end_ = nullptr;
    bool in_each_half_ = false;
};

#if MAINSPRING_AVX2
// Six rows times half a panel of bf16 or fp32, for `lines` lines of x. (fp16 gains nothing: to widen it takes the time.)
template <class Kind>
MAINSPRING_INLINE void multiply_six(const char* w, const char* x, int lines, float* c, bool first, Upcoming& ahead) {
#define MAINSPRING_X(row, word) "64*" #row "+4*" #word "(%[x])"
#define MAINSPRING_ROWS(word) \
    MAINSPRING_ROW(a, MAINSPRING_X(0, word)) MAINSPRING_ROW(b, MAINSPRING_X(1, word)) MAINSPRING_ROW(c, MAINSPRING_X(2, word)) \
    MAINSPRING_ROW(d, MAINSPRING_X(3, word)) MAINSPRING_ROW(e, MAINSPRING_X(4, word)) MAINSPRING_ROW(f, MAINSPRING_X(5, word))
#define MAINSPRING_PAIR(step, even, odd) \
    MAINSPRING_PAIRS("128*" #step "(%[w])", "128*" #step "+32(%[w])", MAINSPRING_ROWS(even), MAINSPRING_ROWS(odd))
#define MAINSPRING_FP32(step) \
    "vmovups 128*" #step "(%[w]), %%ymm13\n vmovups 128*" #step "+32(%[w]), %%ymm14\n" MAINSPRING_ROWS(step)
#define MAINSPRING_STEPS(text) \
    asm(text : MAINSPRING_SIX_ROWS(sums) \
        : [mask] "x"(mask), [w] "r"(w), [x] "r"(words), "m"(*(const char(*)[7 * Kind::STEP_BYTES / 2])w), \
          "m"(*(const char(*)[5 * 64 + 16 * Kind::X_WORDS])words) \
        : MAINSPRING_SIX_ROWS_CLOBBERS)
    SixRows sums([&](int row, int v) { return first ? zero() : load(c + row * PANEL + v * LANES); });
    const I32 mask = iset((int)0xffff0000);
    for (int line = 0; line < lines; ++line, x += 6 * 64)
        for (int word = 0; word < LINE; word += 4 * Kind::X_WORDS, w += 4 * Kind::STEP_BYTES) {
            ahead.fetch();
            const char* words = x + 4 * word;
            if constexpr (std::is_same_v<Kind, Bf16Shift>)
                MAINSPRING_STEPS(MAINSPRING_PAIR(0, 0, 1) MAINSPRING_PAIR(1, 2, 3) MAINSPRING_PAIR(2, 4, 5) MAINSPRING_PAIR(3, 6, 7));
            else
                MAINSPRING_STEPS(MAINSPRING_FP32(0) MAINSPRING_FP32(1) MAINSPRING_FP32(2) MAINSPRING_FP32(3));
        }
    sums.store_to(c, PANEL);
#undef MAINSPRING_STEPS
#undef MAINSPRING_FP32
#undef MAINSPRING_PAIR
#undef MAINSPRING_ROWS
#undef MAINSPRING_X
}
#endif

// c[PANELS][ROWS][32] (+)= x[ROWS][steps] * w[PANELS][steps][32], x packed, panels `panel_bytes` apart. Adds to what c holds
// unless this is the first block of K. VECS vectors of each row, of which w and c are the first. Every 4 steps are a turn of
// `ahead`.
template <class Kind, int ROWS, int PANELS, int VECS = VECTORS, bool WIDE = false>
MAINSPRING_INLINE void multiply_tile(const char* w, size_t panel_bytes, const char* x, int steps, float* c, bool first,
                                     Upcoming& ahead, float* wide = nullptr) {
    constexpr int per_line = LINE / Kind::X_WORDS, WIDE_STEP = WIDE ? Kind::K_PER_STEP * PANEL : 0;
#if MAINSPRING_AVX2
    if constexpr (ROWS == 6 && PANELS == 1 && VECS == 2 && (std::is_same_v<Kind, Bf16Shift> || std::is_same_v<Kind, Fma<float>>)) {
        const int lines = steps / per_line;
        multiply_six<Kind>(w, x, lines, c, first, ahead);
        w += (size_t)lines * per_line * Kind::STEP_BYTES, x += (size_t)lines * ROWS * 64, steps -= lines * per_line;
        if (!steps) return;
        first = false;
    }
#endif
    F32 acc[PANELS][ROWS][VECS];
    for (int p = 0; p < PANELS; ++p)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) acc[p][r][v] = first ? zero() : load(c + (p * ROWS + r) * PANEL + v * LANES);

    for (; steps >= per_line; steps -= per_line, x += ROWS * 64)
        for (int word = 0; word < LINE; word += 4 * Kind::X_WORDS) {  // 4 steps at a time: enough to hide the loop
            ahead.fetch();
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, w += Kind::STEP_BYTES, wide += WIDE_STEP)
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; ++p)
                    Kind::template step<WIDE>(acc[p], w + p * panel_bytes, x + 4 * (word + i * Kind::X_WORDS), wide);
        }
    for (int word = 0; word < steps * Kind::X_WORDS; word += Kind::X_WORDS, w += Kind::STEP_BYTES, wide += WIDE_STEP)
        for (int p = 0; p < PANELS; ++p) Kind::template step<WIDE>(acc[p], w + p * panel_bytes, x + 4 * word, wide);

    for (int p = 0; p < PANELS; ++p)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECS; ++v) store(c + (p * ROWS + r) * PANEL + v * LANES, acc[p][r][v]);
}

// Whether a tile of so many rows takes a panel half by half.
constexpr bool in_halves(int rows) { return LANES == 8 && rows >= 3; }

// A whole tile. What AVX2's registers can't hold at once is done in parts that take turns, some steps each: the halves of a
// panel, so that a word of x is loaded for 2 multiply-adds and a vector of W for up to 6 (whole panels of 3 rows load more
// than they multiply); or several panels.
template <class Kind, int ROWS, int PANELS, bool WIDE = false>
MAINSPRING_NOINLINE void tile(const char* w, size_t panel_bytes, const char* x, int steps, float* c, bool first, Upcoming& ahead,
                              float* wide = nullptr) {
    constexpr bool HALVES = in_halves(ROWS);
    if (LANES == 16 || (PANELS == 1 && !HALVES))
        return multiply_tile<Kind, ROWS, PANELS, VECTORS, WIDE>(w, panel_bytes, x, steps, c, first, ahead, wide);
    constexpr int VECS = HALVES ? VECTORS / 2 : VECTORS, per_line = LINE / Kind::X_WORDS;
    Upcoming nothing;
    for (constexpr int turn = PANELS > 1 ? per_line : 256; steps > 0; steps -= turn, first = false) {
        const int count = std::min(steps, turn);
        for (int p = 0; p < PANELS; ++p)
            for (int v = 0; v < VECTORS; v += VECS) {
                const char* part = w + p * panel_bytes + v * Kind::STEP_BYTES / VECTORS;
                multiply_tile<Kind, ROWS, 1, VECS>(part, panel_bytes, x, count, c + p * ROWS * PANEL + v * LANES, first,
                                                   v == 0 || ahead.in_each_half() ? ahead : nothing);
            }
        w += (size_t)count * Kind::STEP_BYTES;
        x += (size_t)count / per_line * ROWS * 64;
    }
}

// The same for any number of rows, 1 to MAX_ROWS. One or two rows alone have too few accumulators to keep the multiplier
// busy while each waits for its last sum: they take GROUP panels side by side, as so many streams (with several streams the
// hardware fetches ahead well enough by itself). `wide`, if given, gets W as fp32.
constexpr int GROUP = 4;
template <class Kind, int ROWS = Kind::MAX_ROWS>
inline void tile_of(int rows, int group, const char* w, size_t panel_bytes, const char* x, int steps, float* c, bool first,
                    Upcoming& ahead, float* wide = nullptr) {
    if (rows == ROWS) {
        if constexpr (ROWS <= 2)
            if (group == GROUP) return tile<Kind, ROWS, GROUP>(w, panel_bytes, x, steps, c, first, ahead);
        if constexpr (Kind::WIDENS && 2 * ROWS > Kind::MAX_ROWS)  // of several tiles none has fewer
            if (wide) return tile<Kind, ROWS, 1, true>(w, panel_bytes, x, steps, c, first, ahead, wide);
        return tile<Kind, ROWS, 1>(w, panel_bytes, x, steps, c, first, ahead);
    }
    if constexpr (ROWS > 1) tile_of<Kind, ROWS - 1>(rows, group, w, panel_bytes, x, steps, c, first, ahead, wide);
}

// ---------------------------------------------------------------- what is done with the sums

// An epilogue is called as epilogue(row, column, sums, columns): the finished sums [32] of one row of a panel, which holds
// `columns` columns from `column` on. Any callable will do; these are what a decoder needs.

// y[row, column] = sum + bias[column] + residual[row, column], in fp32, rounded once. bias and residual may be null;
// residual may be y.
template <class Y, class B = Y>
struct Store {
    Y* y;
    ptrdiff_t stride;  // from row to row, in elements
    const B* bias = nullptr;
    const Y* residual = nullptr;

    void operator()(int row, int column, const float* sums, int columns) const {
        Y* to = y + row * stride + column;
        for (int i = 0; i < columns; i += LANES) {
            const int n = columns - i;
            F32 a = load(sums + i);
            if (bias) a = add(a, n >= LANES ? load(bias + column + i) : load_n(bias + column + i, n));
            if (residual) {
                const Y* from = residual + row * stride + column + i;
                a = add(a, n >= LANES ? load(from) : load_n(from, n));
            }
            n >= LANES ? store(to + i, a) : store_n(to + i, a, n);
        }
    }
};

// y[row, column / 2] = act(gate) * up, for a weight whose rows are 16 of gate, 16 of up, 16 of gate, …: the joined activation
// [M, 2 * I] never exists. bias is interleaved alike.
template <class Activation, class Y, class B = Y>
struct Gated {
    Y* y;
    ptrdiff_t stride;
    const B* bias = nullptr;

    void operator()(int row, int column, const float* sums, int) const {
        Y* to = y + row * stride + column / 2;
        for (int i = 0; i < GATE; i += LANES) {
            F32 gate = load(sums + i), up = load(sums + GATE + i);
            if (bias) {
                gate = add(gate, load(bias + column + i));
                up = add(up, load(bias + column + GATE + i));
            }
            store(to + i, mul(Activation()(gate), up));
        }
    }
};

// ---------------------------------------------------------------- a packed weight, and panels of it times tiles of x

// What `linear` asks of a weight: MAX_ROWS of a tile, bytes of a packed row of x (in all, and of those in use at a time), of
// sums for a block of `rows` rows, of room for a piece of a panel; `pack` and `multiply`.
template <class T>
struct Packed {
    using Kind = typename KindOf<T>::type;
    static constexpr int MAX_ROWS = Kind::MAX_ROWS;
    static constexpr int PANELS_AT_A_TIME = GROUP;
    static constexpr int ALONE = 32768;  // elements of x that a thread rather packs by itself than waits for the others
    // Steps in a block of K. Making fp32 of W takes a twelfth of a tile's time. Of MANY tiles, the first stores the fp32, up
    // to 128 KiB, for the others; with fewer that costs as much as it saves.
    static constexpr int BLOCK = Kind::WIDENS ? 1024 / Kind::K_PER_STEP : STEPS_PER_BLOCK, MANY = 5;

    const T* data;  // as pack_panel left it
    int N, K;

    int steps() const { return ceil_div(K, Kind::K_PER_STEP); }
    size_t row_bytes() const { return (size_t)ceil_div(steps() * Kind::X_WORDS, LINE) * 64; }
    size_t row_bytes_at_a_time() const { return std::min(row_bytes(), (size_t)STEPS_PER_BLOCK * Kind::X_WORDS * 4); }
    // Sums of a tile; or of a block's rows, where they wait for the next block of K (an odd last k is one of its own).
    bool keeps_sums() const { return steps() > BLOCK || K % Kind::K_PER_STEP; }
    size_t sums_bytes(int rows) const {
        return std::max(2 * GROUP, keeps_sums() ? rows : MAX_ROWS) * PANEL * sizeof(float);
    }
    size_t piece_bytes() const { return (size_t)std::max(GROUP, std::min(steps(), BLOCK)) * Kind::STEP_BYTES * (Kind::WIDENS ? 2 : 1); }

    template <class X>
    void pack(const X* x, char* tile, int rows, int r) const {
        pack_row<Kind>(x, K, tile, rows, r);
    }

    // The tiles [first, end) of packed x times `group` neighbouring panels, p and those after; done(row, g, sums) gets the
    // sums of each row with the g-th.
    template <class Done>
    void multiply(int p, int group, const Tiles& tiles, int first, int end, const char* packed, float* sums, char* piece,
                  const Done& done) const {
        const int columns = std::min(PANEL, N - p * PANEL);
        for (int step = 0; step < steps();) {
            // A block of K: whole steps of a whole panel are used where they lie. Those of a narrow panel are filled up, and
            // so is the step of an odd last k, whose other half is zero.
            const int whole = K / Kind::K_PER_STEP - step;
            const int count = whole > 0 ? std::min(whole, BLOCK) : 1;
            const size_t block_bytes = (size_t)count * Kind::STEP_BYTES;
            constexpr int column_bytes = Kind::STEP_BYTES / PANEL;
            size_t panel_bytes = sizeof(T) * PANEL * K;
            const char* w = (const char*)(data + (size_t)p * PANEL * K) + (size_t)step * columns * column_bytes;
            Upcoming ahead;
            float* wide = nullptr;
            if (columns < PANEL || whole == 0) {
                const int bytes = whole == 0 ? sizeof(T) : column_bytes;
                std::memset(piece, 0, group * block_bytes);
                for (int g = 0; g < group; ++g)
                    for (int s = 0; s < count; ++s)
                        for (int n = 0; n < columns; ++n)
                            std::memcpy(piece + g * block_bytes + (s * PANEL + n) * column_bytes,
                                        w + g * panel_bytes + (s * columns + n) * bytes, bytes);
                w = piece;
                panel_bytes = block_bytes;
            } else if (group == 1) {
                // A single tile reads so fast that memory would fall idle in every second half.
                const bool each_half = end - first == 1 && in_halves(tiles.begin(end) - tiles.begin(first));
                ahead = Upcoming(w + block_bytes, block_bytes, (end - first) * (count / 4) * (each_half ? 2 : 1), each_half);
                if (Kind::WIDENS && end - first >= MANY) wide = (float*)piece;
            }
            for (int t = first; t < end; ++t) {
                const int row = tiles.begin(t), rows = tiles.begin(t + 1) - row;
                const int word = step * Kind::X_WORDS;  // of a row of x; an odd last k finds it within a line
                const char* x = packed + row * row_bytes() + (size_t)(word / LINE) * rows * 64 + word % LINE * 4;
                float* c = sums + (keeps_sums() ? (size_t)(row - tiles.begin(first)) * PANEL : 0);
                if (wide && t > first)
                    tile_of<Fma<float>>(rows, 1, piece, 0, x, count * Kind::K_PER_STEP, c, step == 0, ahead);
                else
                    tile_of<Kind>(rows, group, w, panel_bytes, x, count, c, step == 0, ahead, wide);
                if (step + count == steps())
                    for (int g = 0; g < group; ++g)
                        for (int r = 0; r < rows; ++r) done(row + r, g, c + (g * rows + r) * PANEL);
            }
            step += count;
        }
    }
};

#if MAINSPRING_AMX
}  // namespace mainspring
#include "linear_amx.h"
namespace mainspring {
#endif

// ---------------------------------------------------------------- int8 and 4-bit weights

constexpr uint8_t TWICE_FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Groups of 32, 64, … values along K of one column share a scale; w = scale * (q - zero), q unsigned. 8 bits: zero is 128,
// so that w is symmetric. 4 bits: each group has a zero of its own (AWQ's form). x is quantized as it is packed: each row's
// each group to int8 with a scale of its own. Then the sums within a group are sums of whole numbers, exact in any order,
//
//   dot = sum q * x,   sum w * x = scale * x_scale * (dot - zero * sum x),
//
// and only the groups' sums are added up in fp32, in order of K. 64 products an instruction: one row runs near the memory's
// speed (4-bit weights as fp32 would need three instructions for 16), many rows 1.6 times as fast as bf16. The price is the
// rounding of x: about 0.6% of the product's size, as much as that of 8-bit weights. A group may be a whole row, of at most
// 2^17 values, so that sums of products fit in 32 bits and those of x in an fp32: coarser, but a tile multiplies without a pause.
//
// Packed: panels of 32 columns, narrow ones filled up with zeros, K likewise up to a whole group. A panel is, for each
// group,
//   8 bits  [group/4][32][4] uint8, then scales [32] fp16
//   4 bits  [group/8][32][4] uint8: the low halves are 4 values of K, the high halves the next 4;
//           then scales [32] and zeros [32], fp16
// FP4 (MXFP4): the 4 bits of q are a float of one sign bit, two bits of exponent and one of mantissa. `TWICE_FP4` has a
// whole number for each, by which x is multiplied: twice the float, plus 12. The zero is 12.
template <int BITS, bool FP4 = false>
struct Quantized {
    static_assert(BITS == 8 || BITS == 4, "8 or 4 bits");
    // Accumulators (24, 20), W (2, 4), x, the mask that takes a byte apart, and room for scales: measured, as fast as more.
    // AVX2: 8 accumulators, of 2 rows, or of half a panel of 4. AMX takes more than FEW rows by 8 bits.
#if MAINSPRING_AMX
    static constexpr bool AMX = BITS == 8;
#else
    static constexpr bool AMX = false;
#endif
    static constexpr int MAX_ROWS = LANES == 8 ? 4 : AMX ? 2 * TILE_ROWS : BITS == 8 ? 12 : 10;
    static constexpr int FEW = AMX ? 4 : MAX_ROWS;
    static constexpr int PANELS_AT_A_TIME = LANES == 16 || BITS == 8 ? GROUP : 1;  // AVX2 reads 4 bits as fast in one
    static constexpr int ALONE = 4096;
    static constexpr int X_BYTES = BITS == 8 && !AT_ONCE ? 2 : 1;  // of a value of packed x
    static constexpr int K_PER_STEP = 32 / BITS, X_WORDS = K_PER_STEP * X_BYTES / 4, STEP_BYTES = 4 * PANEL;
    static constexpr int TURN = FP4 && !AT_ONCE ? 2 : 4;  // steps done together: so many sums of products fit in int16

    const char* data;  // as `quantize_weight` or `pack_quantized` left it
    int N, K, group;   // group: a multiple of 32

    int groups() const { return ceil_div(K, group); }
    size_t group_bytes() const { return (size_t)group * PANEL * BITS / 8 + (BITS == 8 ? 1 : 2) * PANEL * sizeof(fp16); }
    size_t panel_bytes() const { return groups() * group_bytes(); }
    size_t bytes() const { return ceil_div(N, PANEL) * panel_bytes(); }

    // What a group of a row of x comes with. A sum of 8-bit products starts at -128 * sum x, of 4-bit ones it is taken off.
    struct Scale {
        float scale;
        union {
            int minus_zeros;
            float sum;
        };
    };
    // A packed row of x: whole lines of values, then the groups' scales. A tile: [lines][rows][64], then [groups][rows].
    size_t line_bytes() const { return (size_t)ceil_div(groups() * group * X_BYTES, 64) * 64; }
    static size_t place_of(size_t k, int rows) { return k * X_BYTES / 64 * rows * 64 + k * X_BYTES % 64; }
    size_t row_bytes() const { return line_bytes() + ceil_div(groups(), 8) * 64; }
    size_t row_bytes_at_a_time() const { return row_bytes(); }
    size_t sums_bytes(int) const { return std::max(2 * PANELS_AT_A_TIME, MAX_ROWS) * PANEL * sizeof(float); }
    size_t piece_bytes() const { return AMX ? MAX_ROWS * PANEL * sizeof(int32_t) : 0; }

    template <class X>
    void pack(const X* x, char* tile, int rows, int r) const {
        for (int g = 0; g < groups(); ++g) {
            const int k0 = g * group, here = std::min(group, K - k0);
            F32 size = zero(), bad = zero();  // bad: not a number if a value is none, for which `max` does not serve
            for (int i = 0; i < here; i += LANES) {
                const F32 values = here - i >= LANES ? load(x + k0 + i) : load_n(x + k0 + i, here - i);
                size = max(size, abs(values)), bad = add(bad, sub(values, values));
            }
            const float top = largest(size);
            const F32 inverse = set(top > 0 ? 127 / top : 0);
            I32 total = set_int(0);
            for (int i = 0; i < group; i += LANES) {
                const F32 values = here - i >= LANES ? load(x + k0 + i) : here > i ? load_n(x + k0 + i, here - i) : zero();
                const I32 q = nearest(mul(values, inverse));
                total = add(total, q);
                char* to = tile + place_of(k0 + i, rows) + r * 64;
                X_BYTES == 1 ? store_as_bytes(to, q) : store_as_shorts(to, q);
            }
            const float sum_x = sum(to_float(total));  // of whole numbers, far below 2^24: exact
            Scale& scale = ((Scale*)(tile + rows * line_bytes()))[g * rows + r];
            scale.scale = top / 127 + sum(bad);
            if (BITS == 8)
                scale.minus_zeros = -128 * (int)sum_x;
            else
                scale.sum = sum_x;
        }
    }

    // c[PANELS][ROWS][32] = the whole product, as `tile` above. Several panels take turns of 4 steps: as many streams, with
    // which the hardware fetches further ahead than we could ask it to.
    template <int ROWS, int PANELS>
    MAINSPRING_NOINLINE void tile(const char* w, const char* x, float* c, Upcoming& ahead) const {
        constexpr int VECS = LANES == 8 && ROWS > 2 ? VECTORS / 2 : VECTORS;  // at a time
        const Scale* x_scales = (const Scale*)(x + ROWS * line_bytes());
        const int length = group, total = groups() * length;
        const size_t values_bytes = (size_t)length / K_PER_STEP * STEP_BYTES, panel = panel_bytes();
        for (int i = 0; i < PANELS * ROWS * PANEL; i += LANES) store(c + i, zero());
        for (int k0 = 0; k0 < total; k0 += length, w += group_bytes(), x_scales += ROWS)
            for (int v0 = 0; v0 < VECTORS; v0 += VECS) {
                I32 acc[PANELS][ROWS][VECS];
#pragma GCC unroll 4
                for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                        for (int v = 0; v < VECS; ++v) acc[p][r][v] = set_int(BITS == 8 ? x_scales[r].minus_zeros : 0);

                const char* values = w + v0 * LANES * 4;
                for (size_t k = k0; k < size_t(k0 + length); k += TURN * K_PER_STEP, values += TURN * STEP_BYTES) {
                    if (v0 == 0) ahead.fetch();
                    const char* words = x + place_of(k, ROWS);
#pragma GCC unroll 1
                    for (int p = 0; p < PANELS; ++p) turn(acc[p], values + p * panel, words);
                }

#pragma GCC unroll 1
                for (int p = 0; p < PANELS; ++p) {
                    const fp16* parameters = (const fp16*)(w + p * panel + values_bytes) + v0 * LANES;
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) {
                        const F32 scale = load(parameters + v * LANES);
                        const F32 zero_point = BITS == 8 ? zero() : load(parameters + PANEL + v * LANES);
#pragma GCC unroll 16
                        for (int r = 0; r < ROWS; ++r) {
                            F32 exact = to_float(acc[p][r][v]);
                            if (BITS == 4) exact = fnma(zero_point, set(x_scales[r].sum), exact);
                            float* to = c + (p * ROWS + r) * PANEL + (v0 + v) * LANES;
                            store(to, fma(exact, mul(scale, set(x_scales[r].scale)), load(to)));
                        }
                    }
                }
                asm volatile("" ::: "memory");  // or gcc keeps all of c in registers, and spills them within the steps
            }
    }

    // `TURN` steps of a panel.
    template <int ROWS, int VECS>
    MAINSPRING_INLINE static void turn(I32 (&acc)[ROWS][VECS], const char* w, const char* x) {
        constexpr bool SHORT = BITS == 4 && !AT_ONCE;
        I32 sums[ROWS][VECS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) sums[r][v] = SHORT ? set_int(0) : acc[r][v];
#pragma GCC unroll 4
        for (int i = 0; i < TURN; ++i, w += STEP_BYTES, x += 4 * X_WORDS) {
            I32 first[VECS], second[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) {
                take_apart<BITS>(load_bytes(w + v * LANES * 4), first[v], second[v]);
                if (FP4) first[v] = look_up(TWICE_FP4, first[v]), second[v] = look_up(TWICE_FP4, second[v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const I32 b = set_int(*(const int*)(x + r * 64));
                const I32 c = X_WORDS == 2 ? set_int(*(const int*)(x + r * 64 + 4)) : b;
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) {
                    sums[r][v] = dot<BITS>(sums[r][v], first[v], second[v], b, c);
                    if (LANES == 8) settle(sums[r][v]);  // or gcc adds in an order of its own, and spills what has to wait
                }
            }
            if (LANES == 8) asm volatile("" ::: "memory");
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = SHORT ? add(acc[r][v], join_shorts(sums[r][v])) : sums[r][v];
    }

#if MAINSPRING_AMX
    // The same for more rows. dots [rows][32]: the sums of a group.
    void tile_of_many(TileShape& shape, int rows, const char* w, const char* x, float* c, int32_t* dots, Upcoming& ahead) const {
        const int upper = std::min(rows, TILE_ROWS), lower = rows - upper, step = group % 64 ? 32 : 64;
        const Scale* x_scales = (const Scale*)(x + rows * line_bytes());
        shape.set(upper, lower, step);
        for (int i = 0; i < rows * PANEL; i += LANES) store(c + i, zero());
        for (size_t k = 0; k < (size_t)groups() * group; x_scales += rows) {
            tile_zero<C00>(), tile_zero<C01>();
            if (lower) tile_zero<C10>(), tile_zero<C11>();
            for (const size_t end = k + group; k < end; k += step, w += step * PANEL) {
                for (int turn = 0; turn < step; turn += TURN * K_PER_STEP) ahead.fetch();
                const char* rows_of_x = x + place_of(k, rows);
                tile_load<A0>(rows_of_x, 64), tile_load<B0>(w, STEP_BYTES);
                tile_multiply_bytes<C00, A0, B0>();
                tile_load<B1>(w + 64, STEP_BYTES);
                tile_multiply_bytes<C01, A0, B1>();
                if (!lower) continue;
                tile_load<A1>(rows_of_x + upper * 64, 64);
                tile_multiply_bytes<C10, A1, B0>(), tile_multiply_bytes<C11, A1, B1>();
            }
            tile_store<C00>(dots, STEP_BYTES), tile_store<C01>(dots + LANES, STEP_BYTES);
            if (lower) tile_store<C10>(dots + upper * PANEL, STEP_BYTES), tile_store<C11>(dots + upper * PANEL + LANES, STEP_BYTES);
            const F32 scales[] = {load((const fp16*)w), load((const fp16*)w + LANES)};
            w += PANEL * sizeof(fp16);
            for (int r = 0; r < rows; ++r)
                for (int v = 0; v < VECTORS; ++v) {
                    const int at = r * PANEL + v * LANES;
                    const F32 exact = to_float(add(iload(dots + at), set_int(x_scales[r].minus_zeros)));
                    store(c + at, fma(exact, mul(scales[v], set(x_scales[r].scale)), load(c + at)));
                }
        }
    }
#endif

    template <int ROWS = FEW>
    void tile_of(int rows, int panels, const char* w, const char* x, float* c, Upcoming& ahead) const {
        if (rows == ROWS) {
            if constexpr (ROWS <= 2 && PANELS_AT_A_TIME > 1)
                if (panels > 1) return tile<ROWS, PANELS_AT_A_TIME>(w, x, c, ahead);
            return tile<ROWS, 1>(w, x, c, ahead);
        }
        if constexpr (ROWS > 1) tile_of<ROWS - 1>(rows, panels, w, x, c, ahead);
    }

    template <class Done>
    void multiply(int p, int panels, const Tiles& tiles, int first, int end, const char* packed, float* sums, char* piece,
                  const Done& done) const {
        const char* w = data + p * panel_bytes();
#if MAINSPRING_AMX
        TileShape shape;
#endif
        Upcoming ahead;
        if (panels == 1) ahead = Upcoming(w + panel_bytes(), panel_bytes(), (end - first) * groups() * (group / (TURN * K_PER_STEP)));
        for (int t = first; t < end; ++t) {
            const int row = tiles.begin(t), rows = tiles.begin(t + 1) - row;
            const char* x = packed + row * row_bytes();
#if MAINSPRING_AMX
            if (AMX && rows > FEW)
                tile_of_many(shape, rows, w, x, sums, (int32_t*)piece, ahead);
            else
#endif
                tile_of(rows, panels, w, x, sums, ahead);
            for (int g = 0; g < panels; ++g)
                for (int r = 0; r < rows; ++r) done(row + r, g, sums + (g * rows + r) * PANEL);
        }
    }
};

// q [N, K], scales and zeros [N, groups] → packed, `Quantized<BITS>::bytes()` long. zeros may be null for 8 bits; of FP4
// all are 12, and scales are half of what the floats are multiplied by. Panels are shared out between threads.
template <int BITS>
void pack_quantized(const uint8_t* q, const float* scales, const float* zeros, int N, int K, int group, char* packed,
                    int thread = 0, int num_threads = 1) {
    const Quantized<BITS> weight = {packed, N, K, group};
    const int panels = ceil_div(N, PANEL), groups = weight.groups();
    for (int p = share(panels, thread, num_threads); p < share(panels, thread + 1, num_threads); ++p)
        for (int g = 0; g < groups; ++g) {
            char* to = packed + p * weight.panel_bytes() + g * weight.group_bytes();
            std::memset(to, 0, weight.group_bytes());
            fp16* parameters = (fp16*)(to + (size_t)group * PANEL * BITS / 8);
            for (int n = 0; n < std::min(PANEL, N - p * PANEL); ++n) {
                const size_t row = (size_t)p * PANEL + n;
                for (int i = 0; i < std::min(group, K - g * group); ++i) {
                    const uint8_t value = q[row * K + g * group + i];
                    if (BITS == 8)
                        to[(i / 4 * PANEL + n) * 4 + i % 4] = value;
                    else
                        to[(i / 8 * PANEL + n) * 4 + i % 4] |= value << (i % 8 / 4 * 4);
                }
                store_one(parameters + n, scales[row * groups + g]);
                if (BITS == 4) store_one(parameters + PANEL + n, zeros[row * groups + g]);
            }
        }
}

// weight [N, K] of bf16, fp16 or fp32, row-major → packed, each group by rounding to nearest: 8 bits symmetric about 0;
// 4 bits from the smallest to the largest value, or of a somewhat narrower range if that has the smaller squared error.
template <int BITS, class T>
void quantize_weight(const T* weight, int N, int K, int group, char* packed, int thread = 0, int num_threads = 1) {
    const int panels = ceil_div(N, PANEL), groups = ceil_div(K, group);
    const size_t panel_bytes = Quantized<BITS>{packed, N, K, group}.panel_bytes();
    std::vector<uint8_t> q((size_t)PANEL * K);
    std::vector<float> scales(PANEL * groups), zeros(PANEL * groups), values(group), nearest(group);
    constexpr float top = (1 << BITS) - 1;
    for (int p = share(panels, thread, num_threads); p < share(panels, thread + 1, num_threads); ++p) {
        const int columns = std::min(PANEL, N - p * PANEL);
        for (int n = 0; n < columns; ++n)
            for (int g = 0; g < groups; ++g) {
                const int here = std::min(group, K - g * group);
                const T* from = weight + ((size_t)p * PANEL + n) * K + g * group;
                F32 lowest = zero(), highest = zero();  // 0 is always met exactly
                for (int i = 0; i < group; i += LANES) {
                    const F32 a = i + LANES <= here ? load(from + i) : i < here ? load_n(from + i, here - i) : zero();
                    store(values.data() + i, a);
                    lowest = max(lowest, sub(zero(), a)), highest = max(highest, a);
                }
                const float low = -largest(lowest), high = largest(highest);

                // The whole numbers nearest to the values under a scale and a zero; returns the squared error.
                const auto round_to = [&](float scale, float zero_point) {
                    const F32 inverse = set(scale > 0 ? 1 / scale : 0), middle = set(zero_point);
                    F32 error = zero();
                    for (int i = 0; i < group; i += LANES) {
                        const F32 a = load(values.data() + i);
                        const F32 whole = min(set(top), max(zero(), add(round(mul(a, inverse)), middle)));
                        store(nearest.data() + i, whole);
                        const F32 off = sub(mul(sub(whole, middle), set(scale)), a);
                        error = fma(off, off, error);
                    }
                    return sum(error);
                };
                float least = INFINITY, scale = 0, zero_point = 0;
                for (int step = 0; step < (BITS == 8 ? 1 : 8); ++step) {  // 4 bits: the range less 0 to 35%
                    const float range = (BITS == 8 ? 2 * std::max(-low, high) : high - low) * (1 - 0.05f * step);
                    fp16 stored;  // the scale as it will be read
                    store_one(&stored, range / (BITS == 8 ? 254 : top));
                    const float s = load_one(&stored);
                    float z = 128;
                    if (BITS == 4) z = s > 0 ? std::nearbyint(std::min(top, -low * (1 - 0.05f * step) / s)) : 0;
                    const float error = round_to(s, z);
                    if (error < least) least = error, scale = s, zero_point = z;
                }
                round_to(scale, zero_point);
                for (int i = 0; i < here; ++i) q[(size_t)n * K + g * group + i] = (uint8_t)nearest[i];
                scales[n * groups + g] = scale, zeros[n * groups + g] = zero_point;
            }
        pack_quantized<BITS>(q.data(), scales.data(), zeros.data(), columns, K, group, packed + p * panel_bytes);
    }
}

// ---------------------------------------------------------------- 4-bit weights with a codebook

// Groups of 16, 32, … values along K of one column share a scale; w = scale * codebook[q], 16 numbers of any kind. They are
// looked up in registers, and x, widened to fp32, is not rounded: two instructions for 16 weights (five for 8 with AVX2),
// then one for each row. The sum of a group is fp32, in order of K; the groups' sums, times their scales, are added up in
// order of K.
//
// Packed: panels of 32 columns, narrow ones filled up with zeros; K is a multiple of the group. A panel is the codebook,
// fp32 [16]; then for each group [group/8][32] words of 8 values of K, the first in the lowest bits, and scales [32] fp32.
struct Coded {
    static constexpr int MAX_ROWS = LANES == 16 ? 12 : 4;  // accumulators: 24, or 8 of half a panel
    static constexpr int PANELS_AT_A_TIME = 1;
    static constexpr int ALONE = 4096;
    static constexpr int PER_WORD = 8, CODES = 16;

    const char* data;  // as `pack_coded` left it
    int N, K, group;   // group: a multiple of 16, and K one of it

    int groups() const { return K / group; }
    size_t values_bytes() const { return (size_t)group / PER_WORD * PANEL * 4; }
    size_t group_bytes() const { return values_bytes() + PANEL * sizeof(float); }
    size_t panel_bytes() const { return CODES * sizeof(float) + groups() * group_bytes(); }
    size_t bytes() const { return ceil_div(N, PANEL) * panel_bytes(); }
    size_t row_bytes() const { return (size_t)K * sizeof(float); }
    size_t row_bytes_at_a_time() const { return row_bytes(); }
    size_t sums_bytes(int) const { return MAX_ROWS * PANEL * sizeof(float); }
    size_t piece_bytes() const { return 0; }

    template <class X>
    void pack(const X* x, char* tile, int rows, int r) const {
        pack_row<Fma<float>>(x, K, tile, rows, r);
    }

    // c[ROWS][32] = the whole product of a panel. x: [K/16][ROWS][16].
    template <int ROWS>
    MAINSPRING_NOINLINE void tile(const char* panel, const char* x, float* c, Upcoming& ahead) const {
        constexpr int VECS = LANES == 8 ? VECTORS / 2 : VECTORS;  // at a time
        const Codebook codebook((const float*)panel);
        const char* w = panel + CODES * sizeof(float);
        for (int i = 0; i < ROWS * PANEL; i += LANES) store(c + i, zero());
        for (int k0 = 0; k0 < K; k0 += group, w += group_bytes(), x += (size_t)group / LINE * ROWS * 64)
            for (int v0 = 0; v0 < VECTORS; v0 += VECS) {
                F32 acc[ROWS][VECS];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) acc[r][v] = zero();
                const char* words = w + v0 * LANES * 4;
                for (int k = 0; k < group; k += PER_WORD, words += PANEL * 4) {
                    const char* from = x + (size_t)(k / LINE) * ROWS * 64 + k % LINE * 4;
                    if (v0 == 0) ahead.fetch();
                    I32 q[VECS];
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) q[v] = load_bytes(words + v * LANES * 4);
#pragma GCC unroll 8
                    for (int i = 0; i < PER_WORD; ++i) {
                        F32 values[VECS];
#pragma GCC unroll 4
                        for (int v = 0; v < VECS; ++v) values[v] = codebook.at(q[v]), q[v] = shift_4(q[v]);
#pragma GCC unroll 16
                        for (int r = 0; r < ROWS; ++r) {
                            const F32 xr = set(*(const float*)(from + r * 64 + i * 4));
#pragma GCC unroll 4
                            for (int v = 0; v < VECS; ++v) acc[r][v] = fma(values[v], xr, acc[r][v]);
                        }
                    }
                }
                const float* scales = (const float*)(w + values_bytes()) + v0 * LANES;
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) {
                        float* to = c + r * PANEL + (v0 + v) * LANES;
                        store(to, fma(acc[r][v], load(scales + v * LANES), load(to)));
                    }
                asm volatile("" ::: "memory");  // or gcc keeps all of c in registers
            }
    }

    template <int ROWS = MAX_ROWS>
    void tile_of(int rows, const char* panel, const char* x, float* c, Upcoming& ahead) const {
        if (rows == ROWS) return tile<ROWS>(panel, x, c, ahead);
        if constexpr (ROWS > 1) tile_of<ROWS - 1>(rows, panel, x, c, ahead);
    }

    template <class Done>
    void multiply(int p, int, const Tiles& tiles, int first, int end, const char* packed, float* sums, char*,
                  const Done& done) const {
        const char* panel = data + p * panel_bytes();
        Upcoming ahead(panel + panel_bytes(), panel_bytes(), (end - first) * (K / PER_WORD));
        for (int t = first; t < end; ++t) {
            const int row = tiles.begin(t), rows = tiles.begin(t + 1) - row;
            tile_of(rows, panel, packed + row * row_bytes(), sums, ahead);
            for (int r = 0; r < rows; ++r) done(row + r, 0, sums + r * PANEL);
        }
    }
};

// q [columns, K], scales [columns, groups] and a codebook [16] → a panel.
inline void pack_coded(const uint8_t* q, const float* scales, const float* codebook, int columns, int K, int group, char* panel) {
    const Coded weight = {panel, columns, K, group};
    std::memset(panel, 0, weight.panel_bytes());
    std::memcpy(panel, codebook, Coded::CODES * sizeof(float));
    char* to = panel + Coded::CODES * sizeof(float);
    for (int g = 0; g < weight.groups(); ++g, to += weight.group_bytes())
        for (int n = 0; n < columns; ++n) {
            for (int i = 0; i < group; ++i)
                ((uint32_t*)to)[i / Coded::PER_WORD * PANEL + n] |= (uint32_t)q[(size_t)n * K + g * group + i]
                                                                    << (4 * (i % Coded::PER_WORD));
            ((float*)(to + weight.values_bytes()))[n] = scales[(size_t)n * weight.groups() + g];
        }
}

// NormalFloat of 4 bits: quantiles of a normal distribution, and 0 (Dettmers et al., 2023, appendix E).
constexpr float NF4[Coded::CODES] = {
    -1.0f,                 -0.6961928009986877f,  -0.5250730514526367f,  -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f,  0.16093020141124725f,  0.24611230194568634f,  0.33791524171829224f,
    0.44070982933044434f,  0.5626170039176941f,   0.7229568362236023f,   1.0f,
};

// rows [columns, K] → a panel of the nearest numbers of NF4. The scale of a block of 64 values of the flattened rows is the
// largest absolute one; so a block may end in the next row, and the last may be shorter. group: 32 where K is no multiple
// of 64, else 64; or more, which then is the block.
template <class T>
void quantize_nf4(const T* rows, int columns, int K, int group, char* panel) {
    const int block = std::max(64, group);
    const size_t total = (size_t)columns * K;
    std::vector<uint8_t> q(total);
    std::vector<float> scales(total / group), nearest(LANES);
    for (size_t first = 0, end; first < total; first = end) {
        end = std::min(total, first + block);
        F32 size = zero();
        for (size_t i = first; i < end; i += LANES) size = max(size, abs(load(rows + i)));
        const float top = largest(size);
        for (size_t i = first; i < end; i += group) scales[i / group] = top;
        const F32 inverse = set(top > 0 ? 1 / top : 0);
        for (size_t i = first; i < end; i += LANES) {
            const F32 value = mul(load(rows + i), inverse);
            F32 number = zero();  // of the codes whose middle with the one before lies below
            for (int code = 1; code < Coded::CODES; ++code)
                number = add(number, where_less(set((NF4[code - 1] + NF4[code]) / 2), value, set(1), zero()));
            store(nearest.data(), number);
            for (int lane = 0; lane < LANES; ++lane) q[i + lane] = (uint8_t)nearest[lane];
        }
    }
    pack_coded(q.data(), scales.data(), NF4, columns, K, group, panel);
}

// ---------------------------------------------------------------- linear

// How the work is divided. Tiles of x times panels of W are numbered block of rows by block of rows, in a block panel by
// panel, and cut into parts. Most of them are shared out from the beginning, in long stretches. The rest goes to whoever
// comes for it, which is less often a thread that others share its core with: all wait for the slowest.
struct LinearPlan {
    Tiles tiles;
    int panels, blocks;
    int grain;  // panels that go together
    int parts, own;  // for each thread; of these, its own
    bool alone;  // one tile and little of it: each thread packs x for itself, which is sooner done than waiting for others
    size_t x_bytes, sums_bytes, piece_bytes;

    template <class Weight>
    LinearPlan(const Weight& weight, int M, int num_threads) : tiles(M, Weight::MAX_ROWS), panels(ceil_div(weight.N, PANEL)) {
        // As few blocks of rows as leave x in L2, but more where there are not enough panels to keep all threads busy.
        const int block_tiles = std::max(1, (int)(X_BLOCK_BYTES / weight.row_bytes_at_a_time() / Weight::MAX_ROWS));
        const int fewest = ceil_div(tiles.count, block_tiles);
        int64_t least = INT64_MAX;
        for (int b = fewest; b <= std::min(tiles.count, fewest + 2 * num_threads); ++b) {
            const int block = ceil_div(tiles.count, b);  // what a thread takes at a time
            const int64_t longest = (int64_t)ceil_div(ceil_div(tiles.count * panels, num_threads), block) * block;
            if (longest < least - least / 10) least = longest, blocks = b;
        }
        grain = M <= 2 ? Weight::PANELS_AT_A_TIME : 1;
        parts = std::max(1, std::min(16, tiles.count * panels / (grain * num_threads)));
        own = num_threads == 1 ? parts : parts - parts / 4;
        alone = M <= 8 && M * weight.K <= Weight::ALONE;
        x_bytes = M * weight.row_bytes();
        sums_bytes = weight.sums_bytes(ceil_div(tiles.count, blocks) * Weight::MAX_ROWS);
        piece_bytes = weight.piece_bytes();
    }
    int first_tile(int block) const { return share(tiles.count, block, blocks); }

    // Where a part begins: at the block and panel before which the earlier parts' share of the tiles lies.
    struct Place {
        int block, panel;
    };
    Place begin(int part, int num_threads) const {
        const int before = share(tiles.count * panels, part, parts * num_threads);
        int block = 0;
        while (block < blocks && first_tile(block + 1) * panels <= before) ++block;
        if (block == blocks) return {blocks, 0};
        const int height = first_tile(block + 1) - first_tile(block);
        return {block, (before - first_tile(block) * panels) / (height * grain) * grain};
    }
    // The workspace: packed x of all, then each thread's own: sums, a piece of a panel, packed x where it packs alone.
    size_t thread_bytes() const { return sums_bytes + piece_bytes + (alone ? x_bytes : 0); }
};

// Bytes of workspace, 64-byte aligned, that suffice for `linear` with any number of rows up to M.
template <class Weight>
size_t linear_workspace(const Weight& weight, int M, int num_threads) {
    const size_t alone = std::min({M, 8, Weight::ALONE / std::max(1, weight.K)}) * weight.row_bytes();
    return M * weight.row_bytes() + num_threads * (weight.sums_bytes(M + 2 * Weight::MAX_ROWS) + weight.piece_bytes() + alone);
}

// epilogue(x[M, K] * W[N, K]^T). x: rows of bf16, fp16 or fp32, `x_stride` elements apart. weight: `Packed`, `Quantized` or
// `Coded`.
//
// `workspace` is shared by the team. Calls `barrier` at most once, inside; the caller sees to it that all threads have
// left one call before any enters another with the same workspace, and before any reads the result: a barrier after.
// `take` counts from 0, for all threads together, since the last barrier.
template <class Weight, class X, class Epilogue, class Barrier, class Take>
void linear(const X* x, ptrdiff_t x_stride, int M, const Weight& weight, const Epilogue& epilogue, void* workspace, int thread,
            int num_threads, Barrier&& barrier, Take&& take) {
    if (M == 0 || weight.N == 0) return;
    const LinearPlan plan(weight, M, num_threads);
    const Tiles& tiles = plan.tiles;

    char* mine = (char*)workspace + (plan.alone ? 0 : plan.x_bytes) + thread * plan.thread_bytes();
    char* piece = mine + plan.sums_bytes;
    char* packed = plan.alone ? piece + plan.piece_bytes : (char*)workspace;

    const int end_row = plan.alone ? M : share(M, thread + 1, num_threads);
    for (int row = plan.alone ? 0 : share(M, thread, num_threads); row < end_row; ++row) {
        const int t = tiles.of(row), first = tiles.begin(t);
        weight.pack(x + row * x_stride, packed + first * weight.row_bytes(), tiles.begin(t + 1) - first, row - first);
    }
    if (!plan.alone) barrier();

    constexpr int most = Weight::PANELS_AT_A_TIME;
    const auto multiply = [&](int part, int end_part) {
        const auto begin = plan.begin(part, num_threads), end = plan.begin(end_part, num_threads);
        for (int block = begin.block; block < plan.blocks && block <= end.block; ++block) {
            const int end_panel = block == end.block ? end.panel : plan.panels;
            for (int p = block == begin.block ? begin.panel : 0, group; p < end_panel; p += group) {
                group = M <= 2 && p + most <= end_panel && (p + most) * PANEL <= weight.N ? most : 1;
                const int columns = std::min(PANEL, weight.N - p * PANEL);
                weight.multiply(p, group, tiles, plan.first_tile(block), plan.first_tile(block + 1), packed, (float*)mine, piece,
                                [&](int row, int g, const float* sums) { epilogue(row, (p + g) * PANEL, sums, columns); });
            }
        }
    };
    multiply(thread * plan.own, (thread + 1) * plan.own);
    for (int part; (part = num_threads * plan.own + int(take())) < num_threads * plan.parts;) multiply(part, part + 1);
}

}  // namespace mainspring
