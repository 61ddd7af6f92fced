// A weight of bf16 on a processor with AMX; part of linear.h. Panels and packed x lie in memory as always: a line of packed
// rows is a tile of A, and 16 steps of a panel are two tiles of B.
#pragma once

#include "amx.h"

namespace mainspring {

template <>
struct Packed<bf16> {
    static constexpr int MAX_ROWS = 2 * TILE_ROWS;
    static constexpr int PANELS_AT_A_TIME = 4;  // of one row or two: as several streams they come faster from memory
    static constexpr int AHEAD = 4096;  // bytes of each that are fetched early
    static constexpr int ALONE = 32768;
    static constexpr int STEP_BYTES = 4 * PANEL, CHUNK_BYTES = PAIRS * STEP_BYTES;  // a chunk: TILE_K values of K
    // Chunks in a block of K. Those of a panel take a third of L1, where they stay while tiles of x come from L2: a core
    // multiplies twice as fast as L2 could give it both.
    static constexpr int CHUNKS_PER_BLOCK = 8;

    const bf16* data;  // as pack_panel left it
    int N, K;

    int chunks() const { return ceil_div(K, TILE_K); }
    size_t row_bytes() const { return (size_t)chunks() * 64; }
    size_t row_bytes_at_a_time() const { return row_bytes(); }
    bool keeps_sums() const { return chunks() > CHUNKS_PER_BLOCK || K % TILE_K; }
    size_t sums_bytes(int rows) const { return (keeps_sums() ? rows : MAX_ROWS) * PANEL * sizeof(float); }
    size_t piece_bytes() const { return std::max(PANELS_AT_A_TIME, std::min(chunks(), CHUNKS_PER_BLOCK)) * CHUNK_BYTES; }

    template <class X>
    void pack(const X* x, char* tile, int rows, int r) const {
        pack_row<Bf16Dot>(x, K, tile, rows, r);
    }

    template <class Done>
    void multiply(int p, int group, const Tiles& tiles, int first, int end, const char* packed, float* sums, char* piece,
                  const Done& done) const {
        if (group > 1 && tiles.rows == 1) return multiply_four(p, packed, sums, piece, done);
        if (group > 1) {
            for (int g = 0; g < group; g += 2) multiply_pair(p, g, tiles.rows, packed, sums, piece, done);
            return;
        }
        const int columns = std::min(PANEL, N - p * PANEL);
        const char* panel = (const char*)(data + (size_t)p * PANEL * K);
        TileShape shape;
        for (int chunk = 0, count; chunk < chunks(); chunk += count) {
            // A block of K: whole chunks of a whole panel are used where they lie, others are filled up with zeros.
            const int whole = K / TILE_K - chunk;
            count = whole > 0 ? std::min(whole, CHUNKS_PER_BLOCK) : 1;
            const char* w = panel + (size_t)chunk * PAIRS * columns * 4;
            Upcoming ahead;
            if (columns < PANEL || whole <= 0) {
                fill_up(panel, columns, chunk, count, piece);
                w = piece;
            } else {
                const size_t bytes = (size_t)count * CHUNK_BYTES;
                ahead = Upcoming(w + bytes, bytes, (end - first) * count);
            }
            for (int t = first; t < end; ++t) {
                const int row = tiles.begin(t), rows = tiles.begin(t + 1) - row;
                const char* x = packed + row * row_bytes() + (size_t)chunk * rows * 64;
                float* c = sums + (keeps_sums() ? (size_t)(row - tiles.begin(first)) * PANEL : 0);
                const int upper = rows <= TILE_ROWS ? rows : (rows + 1) / 2, lower = rows - upper;
                shape.set(upper, lower);
                (lower ? tile<true> : tile<false>)(w, x, upper, lower, count, c, chunk == 0, ahead);
                if (chunk + count == chunks())
                    for (int r = 0; r < rows; ++r) done(row + r, 0, c + r * PANEL);
            }
        }
    }

  private:
    // Four neighbouring panels times the only row: the sums that tiles would give, but tiles have no room for so many.
    template <class Done>
    void multiply_four(int p, const char* x, float* sums, char* piece, const Done& done) const {
        const size_t panel_bytes = sizeof(bf16) * PANEL * K;
        const char* panel = (const char*)data + p * panel_bytes;
        const I32 upper_half = iset(int(0xffff0000));
        F32 all[4][2];
        for (auto& of_panel : all) of_panel[0] = of_panel[1] = zero();
        const auto add_chunk = [&](const char* w, size_t other) {
            F32 parts[2][4][2];
            for (auto& part : parts)
                for (auto& of_panel : part) of_panel[0] = of_panel[1] = zero();
            for (int s = 0; s < PAIRS; ++s, w += STEP_BYTES, x += 4) {
                const uint32_t pair = *(const uint32_t*)x;
                const F32 x_even = from_bits(iset(int(pair << 16))), x_odd = from_bits(iset(int(pair & 0xffff0000)));
#pragma GCC unroll 4
                for (int g = 0; g < 4; ++g)
#pragma GCC unroll 2
                    for (int j = 0; j < 2; ++j) {
                        const char* from = w + g * other + j * 64;
                        prefetch(from + AHEAD / 2);
                        const I32 pairs = iload((const int32_t*)from);
                        parts[0][g][j] = fma(from_bits(_mm512_slli_epi32(pairs, 16)), x_even, parts[0][g][j]);
                        parts[1][g][j] = fma(from_bits(_mm512_and_si512(pairs, upper_half)), x_odd, parts[1][g][j]);
                    }
            }
            for (int g = 0; g < 4; ++g)
                for (int j = 0; j < 2; ++j) all[g][j] = add(all[g][j], add(parts[0][g][j], parts[1][g][j]));
        };
        {
            const FlushDenormals flush;
            const char* w = panel;
            for (int chunk = 0; chunk < K / TILE_K; ++chunk, w += CHUNK_BYTES) add_chunk(w, panel_bytes);
            if (K % TILE_K) {
                for (int g = 0; g < 4; ++g) fill_up(panel + g * panel_bytes, PANEL, K / TILE_K, 1, piece + g * CHUNK_BYTES);
                add_chunk(piece, CHUNK_BYTES);
            }
        }
        for (int g = 0; g < 4; ++g) {
            store(sums, all[g][0]), store(sums + LANES, all[g][1]);
            done(0, g, sums);
        }
    }

    // Panels p + of and the next one times all rows, of which there are one or two.
    template <class Done>
    void multiply_pair(int p, int of, int rows, const char* x, float* sums, char* piece, const Done& done) const {
        const size_t panel_bytes = sizeof(bf16) * PANEL * K;
        const char* panel = (const char*)data + (p + of) * panel_bytes;
        TileShape shape;
        shape.set(rows, rows);
        const auto add = [&](const char* w, size_t other) {
            tile_load<A0>(x, 64), x += rows * 64;
            tile_load<B0>(w, STEP_BYTES), tile_multiply<C00, A0, B0>();
            tile_load<B1>(w + 64, STEP_BYTES), tile_multiply<C01, A0, B1>();
            tile_load<B0>(w + other, STEP_BYTES), tile_multiply<C10, A0, B0>();
            tile_load<B1>(w + other + 64, STEP_BYTES), tile_multiply<C11, A0, B1>();
        };
        const char* w = panel;
        for (int chunk = 0; chunk < K / TILE_K; ++chunk, w += CHUNK_BYTES) {
            for (size_t of : {size_t(0), panel_bytes})
                for (int byte = 0; byte < CHUNK_BYTES; byte += 64) prefetch(w + of + AHEAD + byte);
            add(w, panel_bytes);
        }
        if (K % TILE_K) {
            for (int g = 0; g < 2; ++g) fill_up(panel + g * panel_bytes, PANEL, K / TILE_K, 1, piece + g * CHUNK_BYTES);
            add(piece, CHUNK_BYTES);
        }
        float* other = sums + rows * PANEL;
        tile_store<C00>(sums, STEP_BYTES), tile_store<C01>(sums + 16, STEP_BYTES);
        tile_store<C10>(other, STEP_BYTES), tile_store<C11>(other + 16, STEP_BYTES);
        for (int g = 0; g < 2; ++g)
            for (int r = 0; r < rows; ++r) done(r, of + g, sums + (g * rows + r) * PANEL);
    }

    // Chunks [chunk, chunk + count) of a panel, with zeros for the columns and the k that it does not have.
    void fill_up(const char* panel, int columns, int chunk, int count, char* piece) const {
        std::memset(piece, 0, (size_t)count * CHUNK_BYTES);
        const int begin = chunk * PAIRS, words = K / 2, end = std::min(words, begin + count * PAIRS);
        for (int s = begin; s < end; ++s)
            std::memcpy(piece + (s - begin) * STEP_BYTES, panel + (size_t)s * columns * 4, columns * 4);
        if (K % 2 && words < begin + count * PAIRS)  // the last k, alone in its word
            for (int n = 0; n < columns; ++n)
                std::memcpy(piece + (words - begin) * STEP_BYTES + n * 4, panel + ((size_t)words * columns * 2 + n) * 2, 2);
    }

    // c[rows][32] (+)= x[rows] * w, of `count` chunks; adds to what c holds unless this is the first block of K. LOWER: there
    // are lower rows.
    template <bool LOWER>
    MAINSPRING_NOINLINE static void tile(const char* w, const char* x, int upper, int lower, int count, float* c, bool first,
                                         Upcoming& ahead) {
        const size_t line = (upper + lower) * 64;  // bytes of x, a row of A for each row
        const char* x_lower = x + upper * 64;
        float* c_lower = c + upper * PANEL;
        constexpr int STRIDE = PANEL * 4;
        if (first) {
            tile_zero<C00>(), tile_zero<C01>();
            if (LOWER) tile_zero<C10>(), tile_zero<C11>();
        } else {
            tile_load<C00>(c, STRIDE), tile_load<C01>(c + 16, STRIDE);
            if (LOWER) tile_load<C10>(c_lower, STRIDE), tile_load<C11>(c_lower + 16, STRIDE);
        }
        for (; count; --count, w += CHUNK_BYTES, x += line, x_lower += line) {
            ahead.fetch();
            tile_load<A0>(x, 64), tile_load<B0>(w, STRIDE);
            tile_multiply<C00, A0, B0>();
            tile_load<B1>(w + 64, STRIDE);
            tile_multiply<C01, A0, B1>();
            if (LOWER) {
                tile_load<A1>(x_lower, 64);
                tile_multiply<C10, A1, B0>();
                tile_multiply<C11, A1, B1>();
            }
        }
        tile_store<C00>(c, STRIDE), tile_store<C01>(c + 16, STRIDE);
        if (LOWER) tile_store<C10>(c_lower, STRIDE), tile_store<C11>(c_lower + 16, STRIDE);
    }
};

}  // namespace mainspring
