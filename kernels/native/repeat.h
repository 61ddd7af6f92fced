// Decode steps one after another in one call, each over the tokens that the step before chose. A step is computed as
// Decoder::run computes it, and its tokens are chosen as `choose` chooses them: a token has the same bits either way.
#pragma once

#include "decoder.h"
#include "sample.h"

namespace mainspring {

// What layers of one kind share.
struct RepeatedKind {
    const Plan* plan;  // of the first step: for its spec and its block size
    const int32_t* tables;  // [rows, columns]: the blocks of each row's sequence
    int64_t columns;
};

// Where embeddings come from: the rows of `weight`, or of a plain table of the model's dtype.
struct EmbeddingOf {
    const void* table;  // [vocab, hidden]; null: `weight` has them
    LinearOf weight;
    double scales[2];  // are multiplied in turn, each with a rounding
};

struct RepeatOf {
    int64_t rows, threads, most;  // most: steps
    int64_t* tokens;  // [rows]: those that the next step computes
    int64_t* positions;  // [rows]: of these
    int64_t num_kinds;
    const RepeatedKind* kinds;
    const int64_t* kind_of_layer;  // [layers]
    const AnglesOf* angles;
    EmbeddingOf embedding;
    double scale;  // of logits
    void* logits;  // [rows, vocab] of the model's dtype: those of one step, of which no token is chosen; null: choose
    Choice choice;  // with `places`, but without scores; its counts grow. scored: [most, num_scored]
    int64_t num_stops;
    const int32_t* stops;  // [num_stops, 2]: a row and a token that ends the row's request, so no step follows
    const volatile int32_t* interrupt;  // no step follows if this is not 0
    int64_t* chosen;  // [most, rows]
    int64_t* stopped;  // 1: a row's request has ended
    const int32_t* state_slots;  // [rows]: of recurrent states
};

// native.cpp compiles it, with what else it has of sample.h. Members of the team share the rows.
void choose_in_team(const Choice& choice, int64_t* chosen, Team& team);

template <class T>
class Repeated {
  public:
    Repeated(Decoder& decoder, const RepeatOf& of) : d_(decoder), of_(of) {
        for (int64_t row = 0; row < of.rows; ++row) every_row_.push_back(row), one_each_.push_back(int32_t(row));
        one_each_.push_back(int32_t(of.rows));
        begun_.reset(new bool[of.rows]());
        kinds_.resize(of.num_kinds), plans_.resize(of.num_kinds), places_.resize(of.num_kinds);
        const int64_t hidden = d_.of_.hidden, vocab = d_.of_.head.N;
        d_.hidden_.reserve(of.rows * hidden * sizeof(T));
        if (!of.logits) d_.logits_.reserve(of.rows * vocab * sizeof(T));
        logits_ = of.logits ? of.logits : d_.logits_.data;
        step_ = {of.rows, d_.hidden_.data, of.positions, of.rows, every_row_.data(), logits_,
                 of.threads, kinds_.data(), of.kind_of_layer, of.angles,
                 {of.rows, one_each_.data(), of.state_slots, begun_.get(), of.threads}};
        choice_ = of.choice;
        choice_.scores = choice_.logits = logits_, choice_.dtype = choice_.logits_dtype = d_.of_.dtype;
        choice_.rows = of.rows, choice_.vocab = choice_.stride = choice_.logits_stride = vocab;
        d_.reserve(step_);
    }

    // Returns the number of steps made.
    int64_t run() {
        run_team(int(of_.threads), [&](Team& team, int rank) {
            for (bool more = true; more;) {
                if (rank == 0) begin();
                embed(team, rank);
                team.barrier();
                Forward<T>(d_, step_, nullptr, team, rank).run();
                team.barrier();
                const int64_t began = rank ? 0 : Forward<T>::now();
                if (of_.scale != 1) scale(Share(of_.rows, rank, team.size));
                team.barrier();
                if (!of_.logits) choose_in_team(choice_, of_.chosen + done_ * of_.rows, team);
                team.barrier();
                if (rank == 0) end(), d_.nanoseconds[CHOICE] += Forward<T>::now() - began;
                team.barrier();
                more = more_;
            }
        });
        return done_;
    }

  private:
    // The places of the tokens in the cache, and who computes what of their attention.
    void begin() {
        for (int64_t k = 0; k < of_.num_kinds; ++k) {
            const RepeatedKind& kind = of_.kinds[k];
            const int64_t size = kind.plan->block_size;
            std::vector<int32_t> kv_indptr = {0}, blocks, last_page_len;
            places_[k].resize(2 * of_.rows);
            for (int64_t row = 0; row < of_.rows; ++row) {
                const int32_t* table = kind.tables + row * kind.columns;
                const int64_t column = of_.positions[row] / size, offset = of_.positions[row] % size;
                places_[k][row] = table[column], places_[k][of_.rows + row] = int32_t(offset);
                blocks.insert(blocks.end(), table, table + column + 1);
                kv_indptr.push_back(int32_t(blocks.size())), last_page_len.push_back(int32_t(offset + 1));
            }
            plans_[k] = plan_attention(
                kind.plan->spec, int(of_.rows), one_each_.data(), kv_indptr.data(), blocks.data(), last_page_len.data(),
                int(size), int(of_.threads)
            );
            kinds_[k] = {plans_[k].get(), places_[k].data(), places_[k].data() + of_.rows};
        }
    }

    void embed(Team& team, int rank) {
        const EmbeddingOf& from = of_.embedding;
        const int64_t width = d_.of_.hidden;
        const Share share(of_.rows, rank, team.size);
        for (int64_t row = share.begin; row < share.end; ++row) {
            T* to = (T*)d_.hidden_.data + row * width;
            if (from.table) {
                std::memcpy(to, (const T*)from.table + of_.tokens[row] * width, width * sizeof(T));
            } else {
                with_weight_and_rows(from.weight.weight(), d_.of_.dtype, [&](const auto& weight, auto number) {
                    if constexpr (std::is_same<decltype(number), T>::value) read_row(weight, int(of_.tokens[row]), to);
                });
            }
            for (const double scale : from.scales) multiply_row(to, width, scale);
        }
    }

    void scale(const Share& share) {
        const int64_t vocab = choice_.vocab;
        for (int64_t row = share.begin; row < share.end; ++row)
            multiply_row((T*)logits_ + row * vocab, vocab, of_.scale);
    }

    static void multiply_row(T* row, int64_t n, double by) {
        if (by == 1) return;
        for (int64_t i = 0; i < n; i += LANES)
            store_up_to(row + i, mul(load_up_to(row + i, n - i), set(float(by))), n - i);
    }

    // The tokens, if they are chosen, are what the next step computes.
    void end() {
        for (int64_t row = 0; row < of_.rows; ++row) ++of_.positions[row];
        if (of_.logits) {
            ++done_, more_ = false;
            return;
        }
        const int64_t* chosen = of_.chosen + done_++ * of_.rows;
        for (int64_t row = 0; row < of_.rows; ++row) {
            of_.tokens[row] = chosen[row];
            if (choice_.places) ++((int64_t*)choice_.places)[row];
        }
        for (int64_t i = 0; i < choice_.num_penalized; ++i)
            ++((int32_t*)choice_.counts)[choice_.at[i] * choice_.vocab + chosen[choice_.penalized_rows[i]]];
        choice_.scored += choice_.num_scored;
        for (int64_t i = 0; i < of_.num_stops; ++i)
            if (chosen[of_.stops[2 * i]] == of_.stops[2 * i + 1]) *of_.stopped = 1;
        more_ = done_ < of_.most && !*of_.stopped && !*of_.interrupt;
    }

    Decoder& d_;
    const RepeatOf& of_;
    StepOf step_;
    Choice choice_;
    void* logits_;
    std::vector<int64_t> every_row_;
    std::vector<int32_t> one_each_;
    std::unique_ptr<bool[]> begun_;  // no state is to be zeros
    std::vector<KindOfLayer> kinds_;
    std::vector<std::unique_ptr<Plan>> plans_;
    std::vector<std::vector<int32_t>> places_;  // of each kind: blocks, then rows
    int64_t done_ = 0;
    bool more_ = true;
};

inline int64_t Decoder::repeat(const RepeatOf& of) {
    int64_t done = 0;
    with_dtype(of_.dtype, [&](auto t) { done = Repeated<decltype(t)>(*this, of).run(); });
    return done;
}

}  // namespace mainspring
