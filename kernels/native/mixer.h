// A mixer that keeps a state, from its first product to its second: short convolution, scan, gated norm. What it computes is
// `Scans.mix` of kernels/contract.py. All arithmetic is fp32; a row has the same bits however its text was cut, whatever the
// other sequences are, and by however many threads.
#pragma once

#include <cstring>

#include "scans.h"

namespace mainspring {

struct NormOf {
    const void* weight;  // null: there is none
    Dtype dtype;
    int64_t n;
    double eps, offset;
};

enum class Form : int64_t { attention = 0, gated_delta = 1, mamba2 = 2 };

struct MixerOf {
    Form form;  // attention: this is no such mixer
    int64_t groups, heads, K, V, width;  // of Mamba 2, K is N and V is P
    int64_t num_runs;
    const int64_t* runs;  // [num_runs, 2]: first column and length of pieces of the product; see `columns`
    const float* taps;  // [width, channels]
    const float* bias;  // [channels]; null: none
    int64_t silu;  // after the convolution
    const float *A, *dt_bias;  // [heads]
    const float* D;  // [heads]; null: none
    NormOf norm;
    int64_t norm_size;  // numbers that are normalised together
    int64_t gate_first, sigmoid;
    double scale;
    int64_t l2norm;
    float* conv_state;  // [slots, width - 1, channels]
    float* state;  // [slots, heads, K, V], of Mamba 2 [slots, heads, V, K]

    int64_t channels() const { return 2 * groups * K + heads * V; }
    int64_t inner() const { return heads * V; }
    // The product's columns in order: channels, gate, input of the decay for each head, of the strength for each head.
    int64_t columns() const { return channels() + inner() + heads * (form == Form::gated_delta ? 2 : 1); }
    // Numbers that a row takes in the workspace.
    int64_t numbers() const { return 2 * columns() + inner(); }
};

struct MixCall {
    MixerOf mixer;
    Sequences sequences;
    Dtype dtype;
    int64_t rows;
    const void* product;  // [rows, product_row]
    int64_t product_row;
    void* out;  // [rows, inner]
    float* workspace;  // [rows, numbers]
};

template <class T>
class Mixing {
  public:
    explicit Mixing(const MixCall& call)
        : c_(call), m_(call.mixer), used_(call.sequences.starts[call.sequences.count]), columns_(m_.columns()),
          channels_(m_.channels()), arranged_(call.workspace), mixed_(arranged_ + c_.rows * columns_),
          decays_(mixed_ + c_.rows * channels_), strengths_(decays_ + c_.rows * m_.heads), y_(arranged_ + 2 * c_.rows * columns_) {}

    // For all members of the team. The output is complete when they have met again.
    void run(Team& team, int rank) {
        const Share rows(c_.rows, rank, team.size);
        for (int64_t row = rows.begin; row < std::min(rows.end, used_); ++row) arrange(row);
        for (int64_t row = std::max(rows.begin, used_); row < rows.end; ++row)
            std::memset((T*)c_.out + row * m_.inner(), 0, m_.inner() * sizeof(T));
        team.barrier();
        const ConvCall conv = convolution();
        share_pieces(c_.sequences, (channels_ + LANES - 1) / LANES, team, rank, [&](int64_t sequence, int64_t piece) {
            convolve<float>(conv, sequence, piece * LANES);
        });
        team.barrier();
        if (m_.form == Form::gated_delta) {
            const DeltaCall call = delta();
            const int64_t blocks = delta_blocks(call);
            share_pieces(c_.sequences, call.heads * blocks, team, rank, [&](int64_t sequence, int64_t piece) {
                delta_piece(call, sequence, piece, blocks);
            });
        } else {
            const MambaCall call = mamba();
            share_pieces(c_.sequences, call.heads, team, rank, [&](int64_t sequence, int64_t head) {
                mamba_head(call, sequence, head);
            });
        }
        team.barrier();
        const int64_t parts = m_.inner() / m_.norm_size;
        const Share norms(used_ * parts, rank, team.size);
        for (int64_t i = norms.begin; i < norms.end; ++i) normalise(i / parts, i % parts * m_.norm_size);
    }

  private:
    // The row's columns in order, in fp32, and what they say about decay and strength.
    void arrange(int64_t row) {
        const T* from = (const T*)c_.product + row * c_.product_row;
        float* to = arranged_ + row * columns_;
        for (int64_t i = 0; i < m_.num_runs; ++i) {
            const int64_t first = m_.runs[2 * i], n = m_.runs[2 * i + 1];
            for (int64_t j = 0; j < n; j += LANES) store_up_to(to + j, load_up_to(from + first + j, n - j), n - j);
            to += n;
        }
        const float* decay = arranged_ + row * columns_ + channels_ + m_.inner();
        const bool delta = m_.form == Form::gated_delta;
        for (int64_t head = 0; head < m_.heads; ++head) {
            const float x = decay[head] + m_.dt_bias[head];
            const float soft = x > 20 ? x : std::log1p(std::exp(x));
            decays_[row * m_.heads + head] = delta ? m_.A[head] * soft : soft;
            if (delta) strengths_[row * m_.heads + head] = 1 / (1 + std::exp(-decay[m_.heads + head]));
        }
    }

    ConvCall convolution() const {
        return {c_.sequences, Dtype::fp32, channels_, m_.width, arranged_, columns_, m_.taps, m_.bias, m_.silu,
                m_.conv_state, mixed_};
    }

    DeltaCall delta() const {
        const float *q = mixed_, *k = q + m_.groups * m_.K, *v = k + m_.groups * m_.K;
        return {c_.sequences, m_.groups, m_.heads, m_.K, m_.V, q, k, v, decays_, strengths_, m_.state, y_,
                m_.scale, m_.l2norm, 0, channels_, channels_};
    }

    MambaCall mamba() const {
        const float *x = mixed_, *B = x + m_.inner(), *C = B + m_.groups * m_.K;
        return {c_.sequences, m_.heads, m_.groups, m_.V, m_.K, x, decays_, m_.A, B, C, m_.D, m_.state, y_, 0,
                channels_, channels_};
    }

    F32 gate(const float* z, int64_t n) const {
        const F32 x = load_up_to(z, n);
        return m_.sigmoid ? sigmoid(x) : silu(x);
    }

    void normalise(int64_t row, int64_t first) {
        float* y = y_ + row * m_.inner() + first;
        const float* z = arranged_ + row * columns_ + channels_ + first;
        const int64_t size = m_.norm_size;
        if (m_.gate_first)
            for (int64_t i = 0; i < size; i += LANES)
                store_up_to(y + i, mul(load_up_to(y + i, size - i), gate(z + i, size - i)), size - i);
        const F32 scale = set(1.0f / std::sqrt(sum_of_squares(y, size) / float(size) + float(m_.norm.eps)));
        T* out = (T*)c_.out + row * m_.inner() + first;
        with_dtype(m_.norm.dtype, [&](auto w) {
            const auto* weight = (const decltype(w)*)m_.norm.weight + first % m_.norm.n;
            for (int64_t i = 0; i < size; i += LANES) {
                const int64_t n = size - i;
                const F32 normed = mul(mul(load_up_to(y + i, n), scale), load_up_to(weight + i, n));
                store_up_to(out + i, m_.gate_first ? normed : mul(normed, gate(z + i, n)), n);
            }
        });
    }

    const MixCall& c_;
    const MixerOf& m_;
    const int64_t used_;  // rows that belong to a sequence
    const int64_t columns_, channels_;
    float *arranged_, *mixed_, *decays_, *strengths_, *y_;
};

inline void mix_in_team(const MixCall& call, Team& team, int rank) {
    with_dtype(call.dtype, [&](auto t) { Mixing<decltype(t)>(call).run(team, rank); });
}

}  // namespace mainspring
