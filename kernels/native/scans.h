// Recurrent scans over the rows of several sequences; kernels/reference/reference_scans.py says what they compute. States are
// fp32. Each is worked through token by token, so a row has the same bits however its text was cut, whatever the other
// sequences are, and by however many threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "dtypes.h"
#include "fused.h"
#include "team.h"

namespace mainspring {

// The sequences of a step.
struct Sequences {
    int64_t count;
    const int32_t* starts;  // [count + 1]: rows
    const int32_t* slots;   // [count]: rows of the states
    const bool* fresh;      // [count]: the state begins as zeros
    int64_t threads;
};

// For a member of a team: runs work(sequence, piece) for its share of the pieces. Of the first sequences, as long as they have
// one row each, members take neighbours in memory, and of the others what nobody has taken.
template <class Work>
inline void share_pieces(const Sequences& of, int64_t pieces, Team& team, int rank, Work&& work) {
    int64_t singles = 0;
    while (singles < of.count && of.starts[singles + 1] - of.starts[singles] == 1) ++singles;
    const Share share(singles * pieces, rank, team.size);
    for (int64_t i = share.begin; i < share.end; ++i) work(i / pieces, i % pieces);
    for (int64_t i = team.take(); i < (of.count - singles) * pieces; i = team.take()) work(singles + i / pieces, i % pieces);
}

// Runs work(sequence, piece) for each piece of each sequence. cost: of a row, in multiply-adds.
template <class Work>
inline void for_pieces(const Sequences& of, int64_t pieces, int64_t cost, Work&& work) {
    constexpr int64_t WORTH_WAKING = 1 << 17;  // takes as long as it may take the team to wake up
    const bool alone = cost * of.starts[of.count] < WORTH_WAKING;
    run_team(alone ? 1 : int(std::min<int64_t>(of.threads, of.count * pieces)), [&](Team& team, int rank) {
        share_pieces(of, pieces, team, rank, work);
    });
}

// Memory of a thread, kept for its next piece.
inline float* scratch(size_t numbers) {
    static thread_local std::vector<float> kept;
    if (kept.size() < numbers) kept.resize(numbers);
    return kept.data();
}

// ---------------------------------------------------------------- causal convolution

struct ConvCall {
    Sequences sequences;
    Dtype dtype;
    int64_t channels, width;
    const void* x;        // [rows, x_row]
    int64_t x_row;
    const float* weight;  // [width, channels]: the last is of the token itself
    const float* bias;    // [channels]; null: none
    int64_t silu;
    float* state;  // [slots, width - 1, channels]: the inputs before, the oldest first
    void* y;       // [rows, channels]
};

template <class T>
void convolve(const ConvCall& c, int64_t sequence, int64_t first) {
    const int64_t width = c.width, n = std::min<int64_t>(LANES, c.channels - first), before = width - 1;
    const Sequences& of = c.sequences;
    float* state = c.state + of.slots[sequence] * before * c.channels + first;
    const bool there = n == LANES && !of.fresh[sequence];  // the state is worked on where it is
    float* past = there ? state : scratch(before * LANES);
    const int64_t stride = there ? c.channels : LANES;
    if (!there)
        for (int64_t i = 0; i < before; ++i)
            store(past + i * stride, of.fresh[sequence] ? zero() : load_up_to(state + i * c.channels, n));
    const F32 bias = c.bias ? load_up_to(c.bias + first, n) : zero();
    for (int64_t row = of.starts[sequence]; row < of.starts[sequence + 1]; ++row) {
        const F32 x = load_up_to((const T*)c.x + row * c.x_row + first, n);
        F32 total = bias;
        for (int64_t i = 0; i < before; ++i) {
            const F32 earlier = load(past + i * stride);
            total = fma(earlier, load_up_to(c.weight + i * c.channels + first, n), total);
            if (i) store(past + (i - 1) * stride, earlier);
        }
        total = fma(x, load_up_to(c.weight + before * c.channels + first, n), total);
        if (before) store(past + (before - 1) * stride, x);
        T* y = (T*)c.y + row * c.channels + first;
        if (c.silu) {  // of the rounded sum
            store_up_to(y, total, n);
            total = load_up_to(y, n);
            total = div(total, add(set(1), exp(sub(zero(), total))));
        }
        store_up_to(y, total, n);
    }
    if (!there)
        for (int64_t i = 0; i < before; ++i) store_up_to(state + i * c.channels, load(past + i * stride), n);
}

inline void convolve(const ConvCall& c) {
    with_dtype(c.dtype, [&](auto t) {
        for_pieces(c.sequences, (c.channels + LANES - 1) / LANES, c.channels * c.width, [&](int64_t sequence, int64_t piece) {
            convolve<decltype(t)>(c, sequence, piece * LANES);
        });
    });
}

// ---------------------------------------------------------------- gated delta rule

// With a decay for each head, or for each of its keys (Kimi delta attention).
struct DeltaCall {
    Sequences sequences;
    int64_t key_heads, heads, K, V;
    const float *q, *k;  // [rows, key_heads, K], a row every qk_row numbers
    const float* v;      // [rows, heads, V], a row every v_row
    const float* g;      // [rows, heads] or [rows, heads, K]: logarithms of the decay
    const float* beta;   // [rows, heads]
    float* state;        // [slots, heads, K, V]
    float* y;            // [rows, heads, V]
    double scale;        // of q
    int64_t l2norm;      // of q and k
    int64_t each_key;    // g is [rows, heads, K]
    int64_t qk_row, v_row;
};

// Columns of a state that a thread works on at once, in vectors: few fit in the nearest cache for all rows of a sequence;
// for a single row, many are read and written where they are, neighbours in memory one after another.
constexpr int NARROW = 2, WIDE = LANES == 16 ? 8 : 4;

// What a token multiplies its key or query by.
inline float norm_factor(const float* x, int64_t n, bool l2norm) {
    if (!l2norm) return 1;
    F32 squares = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        const F32 one = load_up_to(x + i, n - i);
        squares = fma(one, one, squares);
    }
    return 1 / std::sqrt(sum(squares) + 1e-6f);
}

template <int VECTORS>
inline void delta_columns(const DeltaCall& c, int64_t sequence, int64_t head, int64_t first) {
    constexpr int WIDTH = VECTORS * LANES;
    const Sequences& of = c.sequences;
    const int64_t K = c.K, n = std::min<int64_t>(WIDTH, c.V - first), key_head = head / (c.heads / c.key_heads);
    float* state = c.state + (of.slots[sequence] * c.heads + head) * K * c.V + first;
    const bool there = VECTORS == WIDE && !of.fresh[sequence];  // the state is worked on where it is
    float* memory = scratch(K * WIDTH + 3 * K);  // the columns, then key, query and decay of a token
    float *key = memory + K * WIDTH, *query = key + K, *decay = query + K;
    float* held = there ? state : memory;
    const int64_t stride = there ? c.V : WIDTH;
    if (!there)
        for (int64_t i = 0; i < K; ++i)
            for (int j = 0; j < WIDTH; j += LANES)
                store(held + i * WIDTH + j, of.fresh[sequence] || j >= n ? zero() : load_up_to(state + i * c.V + j, n - j));
    for (int64_t row = of.starts[sequence]; row < of.starts[sequence + 1]; ++row) {
        const float *q = c.q + row * c.qk_row + key_head * K, *k = c.k + row * c.qk_row + key_head * K;
        const F32 of_key = set(norm_factor(k, K, c.l2norm));
        const F32 of_query = set(norm_factor(q, K, c.l2norm)), scale = set(float(c.scale));
        const float* g = c.g + (row * c.heads + head) * (c.each_key ? K : 1);
        float one[LANES];
        if (!c.each_key) store(one, exp(set(*g)));
        for (int64_t i = 0; i < K; i += LANES) {
            store_up_to(key + i, mul(load_up_to(k + i, K - i), of_key), K - i);
            store_up_to(query + i, mul(mul(load_up_to(q + i, K - i), of_query), scale), K - i);
            store_up_to(decay + i, c.each_key ? exp(load_up_to(g + i, K - i)) : load(one), K - i);
        }
        // What the state has for the key, and then for the query, in two chains for each vector.
        F32 known[VECTORS], known_too[VECTORS], y[VECTORS], y_too[VECTORS], change[VECTORS];
        for (int j = 0; j < VECTORS; ++j) known[j] = known_too[j] = y[j] = y_too[j] = zero();
        const auto knows = [&](int64_t i, F32* sums) {
            for (int j = 0; j < VECTORS; ++j)
                sums[j] = fma(mul(load(held + i * stride + j * LANES), set(decay[i])), set(key[i]), sums[j]);
        };
        int64_t i = 0;
        for (; i + 2 <= K; i += 2) knows(i, known), knows(i + 1, known_too);
        if (i < K) knows(i, known);
        const float* v = c.v + row * c.v_row + head * c.V + first;
        const F32 beta = set(c.beta[row * c.heads + head]);
        for (int j = 0; j < VECTORS; ++j) {
            const F32 value = j * LANES < n ? load_up_to(v + j * LANES, n - j * LANES) : zero();
            change[j] = mul(sub(value, add(known[j], known_too[j])), beta);
        }
        const auto learns = [&](int64_t i, F32* sums) {
            for (int j = 0; j < VECTORS; ++j) {
                float* at = held + i * stride + j * LANES;
                const F32 now = fma(change[j], set(key[i]), mul(load(at), set(decay[i])));
                store(at, now);
                sums[j] = fma(now, set(query[i]), sums[j]);
            }
        };
        for (i = 0; i + 2 <= K; i += 2) learns(i, y), learns(i + 1, y_too);
        if (i < K) learns(i, y);
        float* out = c.y + (row * c.heads + head) * c.V + first;
        for (int j = 0; j < VECTORS && j * LANES < n; ++j)
            store_up_to(out + j * LANES, add(y[j], y_too[j]), n - j * LANES);
    }
    if (!there)
        for (int64_t i = 0; i < K; ++i)
            for (int j = 0; j < n; j += LANES) store_up_to(state + i * c.V + j, load(held + i * WIDTH + j), n - j);
}

inline int64_t delta_blocks(const DeltaCall& c) { return (c.V + NARROW * LANES - 1) / (NARROW * LANES); }

// Of a sequence: some columns of a head.
inline void delta_piece(const DeltaCall& c, int64_t sequence, int64_t piece, int64_t blocks) {
    const int64_t head = piece / blocks, first = piece % blocks * NARROW * LANES;
    const bool single = c.sequences.starts[sequence + 1] - c.sequences.starts[sequence] == 1;
    if (!single || c.V % (WIDE * LANES))
        delta_columns<NARROW>(c, sequence, head, first);
    else if (first % (WIDE * LANES) == 0)
        delta_columns<WIDE>(c, sequence, head, first);
}

inline void gated_delta(const DeltaCall& c) {
    const int64_t blocks = delta_blocks(c);
    for_pieces(c.sequences, c.heads * blocks, 3 * c.heads * c.K * c.V, [&](int64_t sequence, int64_t piece) {
        delta_piece(c, sequence, piece, blocks);
    });
}

// ---------------------------------------------------------------- Mamba

// state = decay * state + dt * x * B, y = state . C + D * x. Mamba 2: a head has P channels, one decay exp(dt * A) and
// its group's B and C. Mamba 1: a head is one channel, and A has a number for each of the N.
struct MambaCall {
    Sequences sequences;
    int64_t heads, groups, P, N;
    const float* x;       // [rows, heads, P], a row every x_row numbers
    const float* dt;      // [rows, heads]
    const float* A;       // [heads] or [heads, N]
    const float *B, *C;   // [rows, groups, N], a row every bc_row
    const float* D;       // [heads]; null: none
    float* state;         // [slots, heads, P, N]
    float* y;             // [rows, heads, P]
    int64_t each_number;  // A is [heads, N]
    int64_t x_row, bc_row;
};

// Neighbouring channels of a head, one token.
template <int CHANNELS>
inline void mamba_channels(
    const MambaCall& c, int64_t at, int64_t head, int64_t p, const float* x, float* state, const float* decay,
    const float* B, const float* C
) {
    F32 input[CHANNELS], total[CHANNELS];
    for (int i = 0; i < CHANNELS; ++i) input[i] = set(x[p + i] * c.dt[at]), total[i] = zero();
    const auto numbers = [&](int64_t n, auto load_some, auto store_some) {
        const F32 kept = load(decay + n), b = load_some(B + n), much = load_some(C + n);
        for (int i = 0; i < CHANNELS; ++i) {
            float* number = state + (p + i) * c.N + n;
            const F32 now = fma(load_some(number), kept, mul(input[i], b));
            store_some(number, now);
            total[i] = fma(now, much, total[i]);
        }
    };
    int64_t n = 0;
    for (; n + LANES <= c.N; n += LANES)
        numbers(n, [](const float* from) { return load(from); }, [](float* to, F32 x) { store(to, x); });
    if (const int rest = int(c.N - n))
        numbers(n, [=](const float* from) { return load_n(from, rest); }, [=](float* to, F32 x) { store_n(to, x, rest); });
    for (int i = 0; i < CHANNELS; ++i) {
        const float y = sum(total[i]);
        c.y[at * c.P + p + i] = c.D ? std::fma(c.D[head], x[p + i], y) : y;
    }
}

inline void mamba_head(const MambaCall& c, int64_t sequence, int64_t head) {
    const Sequences& of = c.sequences;
    const int64_t N = c.N, group = head / (c.heads / c.groups);
    float* state = c.state + (of.slots[sequence] * c.heads + head) * c.P * N;
    if (of.fresh[sequence]) std::fill(state, state + c.P * N, 0.0f);
    float* decay = scratch((N + LANES - 1) / LANES * LANES);
    for (int64_t row = of.starts[sequence]; row < of.starts[sequence + 1]; ++row) {
        const int64_t at = row * c.heads + head;
        const float *B = c.B + row * c.bc_row + group * N, *C = c.C + row * c.bc_row + group * N;
        const float* x = c.x + row * c.x_row + head * c.P;
        const F32 dt = set(c.dt[at]);
        for (int64_t n = 0; n < N; n += LANES)
            store(decay + n, exp(mul(c.each_number ? load_up_to(c.A + head * N + n, N - n) : set(c.A[head]), dt)));
        int64_t p = 0;
        for (; p + 4 <= c.P; p += 4) mamba_channels<4>(c, at, head, p, x, state, decay, B, C);
        for (; p < c.P; ++p) mamba_channels<1>(c, at, head, p, x, state, decay, B, C);
    }
}

inline void mamba(const MambaCall& c) {
    const int64_t few = std::max<int64_t>(1, 64 / c.P), pieces = (c.heads + few - 1) / few;  // heads of a piece
    for_pieces(c.sequences, pieces, 2 * c.heads * c.P * c.N, [&](int64_t sequence, int64_t piece) {
        for (int64_t head = piece * few; head < std::min(c.heads, (piece + 1) * few); ++head) mamba_head(c, sequence, head);
    });
}

}  // namespace mainspring
