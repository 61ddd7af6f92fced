// From logits to tokens: grammar masks and penalties, temperature, top-k, top-p and min-p (sampling.py's sets), the
// keyed Gumbel choice (gumbel.py's hash, bit for bit), and log probabilities. No vocabulary is sorted. One thread
// computes a row, so its result depends on no other row and not on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "dtypes.h"
#include "team.h"

namespace mainspring {

// ---------------------------------------------------------------- keyed noise

constexpr uint32_t ROUND_1 = 0x85EBCA6B, ROUND_2 = 0xC2B2AE35;  // MurmurHash3's 32-bit finaliser
constexpr uint32_t POSITION = 0x9E3779B1, TOKEN = 0x27D4EB2F, SECOND = 0x165667B1;  // of xxHash32

inline uint32_t mix(uint32_t x, uint32_t between = 0) {
    x = (x ^ x >> 16) * ROUND_1 ^ between;
    x = (x ^ x >> 13) * ROUND_2;
    return x ^ x >> 16;
}
inline I32 mix(I32 x, I32 between) {
    x = ixor(imul(ixor(x, ishr<16>(x)), iset((int)ROUND_1)), between);
    x = imul(ixor(x, ishr<13>(x)), iset((int)ROUND_2));
    return ixor(x, ishr<16>(x));
}

// The two words of a row; see gumbel.py's keyed_hash.
struct RowKey {
    uint32_t first, second;
    RowKey(int64_t seed, int64_t place) {
        const uint32_t low = uint32_t(seed), high = uint32_t(uint64_t(seed) >> 32), position = uint32_t(place);
        first = mix(mix(mix(low) ^ high) + position * POSITION);
        second = mix(mix(mix(high + SECOND) ^ low) ^ position * TOKEN);
    }
};

inline I32 keyed_hash(const RowKey& key, I32 tokens) {
    const I32 mixed = mix(imul(tokens, iset((int)TOKEN)), iset(0));
    return mix(iadd(iset((int)key.first), mixed), iset((int)key.second));
}

// -log(-log(1 - u)) for u from 32 bits.
inline F32 gumbel_noise(I32 hash) {
    F32 u = mul(add(unsigned_to_float(hash), set(0.5f)), set(0x1p-32f));
    u = min(u, set(1 - 0x1p-24f));
    return sub(zero(), log(minus_log_of_rest(u)));
}

// A cheap upper bound of the noise: -log(u), because -log(1 - u) >= u. The bits of a float, read as an integer, give its
// logarithm with straight lines between powers of two, which lie below it. 0.01 is a margin for rounding.
inline F32 noise_bound(I32 hash) {
    const F32 f = add(unsigned_to_float(hash), set(0.5f));  // u * 2^32
    constexpr float LOG_2 = 0.69314718056f;
    return fma(to_float(bits_of(f)), set(-LOG_2 * 0x1p-23f), set(LOG_2 * (127 + 32) + 0.01f));
}

// ---------------------------------------------------------------- the largest

// Runs work(row) for all rows. `cost` is that of all rows, in numbers that are only compared.
template <class Work>
inline void for_rows(int64_t rows, int64_t cost, int threads, Work&& work) {
    constexpr int64_t WORTH_WAKING = 1 << 18;  // takes as long as it may take the team to wake up
    run_team(cost < WORTH_WAKING ? 1 : int(std::min<int64_t>(threads, rows)), [&](Team& team, int) {
        for (int64_t row = team.take(); row < rows; row = team.take()) work(row);
    });
}

struct Best {
    float value = -INFINITE;
    int64_t token = 0;
    // Of equal values the lowest token wins.
    void meet(float other, int64_t at) {
        if (other > value || (other == value && at < token)) value = other, token = at;
    }
};

template <class T>
inline int64_t largest_of(const T* scores, int64_t vocab) {
    F32 best[2] = {set(-INFINITE), set(-INFINITE)};
    I32 where[2] = {iset(0), iset(0)};
    int which = 0;
    for (int64_t i = 0; i < vocab; i += LANES, which ^= 1) {
        const I32 tokens = iadd(ramp(), iset(int(i)));
        F32 s = vocab - i >= LANES ? load(scores + i) : load_n(scores + i, int(vocab - i));
        if (vocab - i < LANES) s = where_less(tokens, iset(int(vocab)), s, set(-INFINITE));
        where[which] = where_less_i(best[which], s, tokens, where[which]);
        best[which] = where_less(best[which], s, s, best[which]);
    }
    Best all;
    for (int w = 0; w < 2; ++w) {
        float values[LANES];
        int32_t tokens[LANES];
        store(values, best[w]);
        istore(tokens, where[w]);
        for (int j = 0; j < LANES; ++j) all.meet(values[j], tokens[j]);
    }
    return all.token;
}

// ---------------------------------------------------------------- a draw

constexpr int32_t IN_PROMPT = 1 << 30;  // is added to the count of a token that the prompt has

struct Penalties {
    float repetition, frequency, presence;
};

// A copy of a row's scores, which changes, as whole vectors: -inf follows the last.
class Row {
  public:
    template <class T>
    Row(const T* scores, int64_t vocab) : vocab_(vocab), size_(padded(vocab)) {
        scores_ = memory(2 * size_), masses_ = scores_ + size_;
        for (int64_t i = 0; i < size_; i += LANES) {
            F32 s = vocab - i >= LANES ? load(scores + i) : load_n(scores + i, int(vocab - i));
            if (vocab - i < LANES) s = where_less(ramp(), iset(int(vocab - i)), s, set(-INFINITE));
            store(scores_ + i, s);
        }
    }

    // Puts -inf in the place of each token whose bit is 0: bit t % 32 of word t / 32.
    void forbid(const int32_t* bits) {
        int32_t powers[LANES];
        for (int j = 0; j < LANES; ++j) powers[j] = 1 << j;
        const I32 lanes = iload(powers);
        for (int64_t i = 0; i < size_; i += LANES) {
            const uint32_t word = uint32_t(bits[i / 32]) >> i % 32;
            const I32 allowed = iand(iset(int(word)), lanes);
            store(scores_ + i, where_less(iset(0), allowed, load(scores_ + i), set(-INFINITE)));
        }
    }

    // For each token that occurs, a positive score is divided by `repetition`, and any other is multiplied by it. Then
    // frequency * c + presence is subtracted where a token occurs c > 0 times in the output. `counts` has each token's
    // occurrences in the output, plus IN_PROMPT.
    void penalize(const int32_t* counts, const Penalties& p) {
        for (int64_t i = 0; i < vocab_; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, vocab_ - i));
            int32_t some = 0;  // most tokens do not occur
            for (int j = 0; j < n; ++j) some |= counts[i + j];
            if (!some) continue;
            for (int j = 0; j < n; ++j) {
                if (counts[i + j] <= 0) continue;
                const int32_t times = counts[i + j] & (IN_PROMPT - 1);
                const float s = scores_[i + j], repeated = s > 0 ? s / p.repetition : s * p.repetition;
                scores_[i + j] = repeated - p.frequency * float(times) - p.presence * float(times > 0);
            }
        }
    }

    int64_t largest_score() const { return largest_of(scores_, vocab_); }

    // Divides the scores by the temperature, and prepares a draw.
    void divide(float temperature) {
        const F32 divisor = set(temperature);
        F32 most = set(-INFINITE);
        for (int64_t i = 0; i < size_; i += LANES) {
            const F32 s = max(div(load(scores_ + i), divisor), set(-INFINITE));  // NaN becomes -inf
            store(scores_ + i, s);
            most = max(s, most);
        }
        peak_ = largest(most);
    }

    // The token with the largest sum of score and noise, of those that stay. The tokens that stay are the first of a
    // ranking (by score, of equal ones the lowest token first). So the winner among all tokens is the result if it stays.
    // Otherwise it and all tokens behind it are dropped, and the winner among the others is the next candidate. Each
    // round halves the remaining probability on average.
    int64_t draw(const RowKey& key, int64_t top_k, float top_p, float min_p) {
        if (!std::isfinite(peak_)) return winner(key, {-INFINITE, size_});
        float floor = top_k > 0 && top_k < vocab_ ? kth(top_k) : -INFINITE;
        double needed = INFINITE;
        if (top_p < 1) needed = double(top_p) * weigh(floor);
        if (min_p > 0) floor = std::max(floor, peak_ + std::log(min_p));
        Place behind = {floor, size_};
        for (;;) {
            const int64_t token = winner(key, behind);
            behind = {scores_[token], token};
            if (!(top_p < 1)) return token;
            const double before = mass_before(behind);
            if (before == 0 || before < needed) return token;
        }
    }

  private:
    struct Place {
        float score;
        int64_t token;
    };
    static constexpr int BINS = 4096;
    static constexpr float BINS_PER_NAT = 128;  // the last bin has what is 32 and more below the peak

    // Kept by the thread, because the system zeroes each page of a new allocation.
    static float* memory(size_t numbers) {
        static thread_local std::vector<float> kept;
        if (kept.size() < numbers) kept.resize(numbers);
        return kept.data();
    }
    static int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
    static unsigned lanes_below(int64_t n) { return n >= LANES ? ~0u >> (32 - LANES) : n > 0 ? (1u << n) - 1 : 0; }

    int64_t winner(const RowKey& key, Place behind) const {
        Best best;
        F32 most = set(-INFINITE);
        const bool all = behind.score == -INFINITE;
        for (int64_t i = 0; i < size_; i += LANES) {
            const F32 s = load(scores_ + i);
            unsigned lanes = lanes_below(LANES);
            if (!all) {
                lanes = less_bits(set(behind.score), s);
                if (i < behind.token) lanes |= equal_bits(s, set(behind.score)) & lanes_below(behind.token - i);
                if (!lanes) continue;
            }
            const I32 hash = keyed_hash(key, iadd(ramp(), iset(int(i))));
            lanes &= less_bits(most, add(noise_bound(hash), s));
            if (!lanes) continue;
            float sums[LANES];
            store(sums, add(gumbel_noise(hash), s));
            for (; lanes; lanes &= lanes - 1)
                if (const int j = __builtin_ctz(lanes); sums[j] > best.value) best = {sums[j], i + j};
            most = set(best.value);
        }
        return best.token;
    }

    // Stores each token's mass, exp(score - peak), or 0 below `floor`, and returns their sum.
    double weigh(float floor) {
        const F32 peak = set(peak_), least = set(floor);
        return sum_of([&](int64_t i) {
            const F32 s = load(scores_ + i), mass = where_less(s, least, zero(), exp(sub(s, peak)));
            store(masses_ + i, mass);
            return mass;
        });
    }

    // The mass of the tokens that are ranked before a token.
    double mass_before(Place place) const {
        const F32 limit = set(place.score);
        const int64_t own = place.token / LANES * LANES;
        double mass = sum_of([&](int64_t i) {
            const F32 s = load(scores_ + i), m = load(masses_ + i);
            return i < own ? where_less(s, limit, zero(), m) : where_less(limit, s, m, zero());
        });
        for (int64_t i = own; i < place.token; ++i)
            if (scores_[i] == place.score) mass += masses_[i];
        return mass;
    }

    // The sum of value(i) over all vectors, in fp32 for some and in fp64 for all.
    template <class Value>
    double sum_of(Value&& value) const {
        double total = 0;
        for (int64_t begin = 0; begin < size_; begin += 64 * LANES) {
            const int64_t end = std::min<int64_t>(size_, begin + 64 * LANES);
            F32 sums[4] = {zero(), zero(), zero(), zero()};
            int64_t i = begin;
            for (; i + 4 * LANES <= end; i += 4 * LANES)
                for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], value(i + j * LANES));
            for (; i < end; i += LANES) sums[0] = add(sums[0], value(i));
            total += sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
        }
        return total;
    }

    // The k-th largest score. Tokens are counted in bins by how far below the largest score they lie: the bins are in
    // order, so the k-th lies in one bin, and only that bin is looked through.
    float kth(int64_t k) const {
        int32_t counts[BINS] = {};
        for (int64_t i = 0; i < size_; i += LANES) {
            int32_t bins[LANES];
            istore(bins, bins_of(load(scores_ + i)));
            const int n = int(std::min<int64_t>(LANES, vocab_ - i));
            for (int j = 0; j < n; ++j) ++counts[bins[j]];
        }
        int bin = 0;
        int64_t before = 0;
        while (before + counts[bin] < k) before += counts[bin++];
        std::vector<float> in_bin;
        in_bin.reserve(counts[bin]);
        const F32 wanted = set(float(bin));
        for (int64_t i = 0; i < size_; i += LANES)
            for (unsigned bits = equal_bits(to_float(bins_of(load(scores_ + i))), wanted); bits; bits &= bits - 1)
                if (const int64_t token = i + __builtin_ctz(bits); token < vocab_) in_bin.push_back(scores_[token]);
        const auto found = in_bin.begin() + (k - before - 1);
        std::nth_element(in_bin.begin(), found, in_bin.end(), std::greater<float>());
        return *found;
    }
    I32 bins_of(F32 s) const {
        return to_int(min(mul(sub(set(peak_), s), set(BINS_PER_NAT)), set(BINS - 1)));
    }

    const int64_t vocab_, size_;
    float *scores_, *masses_, peak_ = 0;
};

// ---------------------------------------------------------------- log probabilities

// Where the log probabilities of a row's token and of the row's `count` likeliest tokens go: 1 + count ids and numbers,
// the row's token first, and its rank, 1 + the number of likelier tokens. Of equally likely tokens the lowest are taken.
struct Scoring {
    int64_t row, count;
    int32_t* ids;
    float* logprobs;
    int32_t* rank;
};

template <class T>
inline void score_row(const T* logits, int64_t vocab, int64_t token, const Scoring& to) {
    using Scored = std::pair<float, int32_t>;
    const auto likelier = [](const Scored& a, const Scored& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    const auto chunk = [&](int64_t i) {
        if (vocab - i >= LANES) return load(logits + i);
        return where_less(ramp(), iset(int(vocab - i)), load_n(logits + i, int(vocab - i)), set(-INFINITE));
    };
    F32 most = set(-INFINITE);
    for (int64_t i = 0; i < vocab; i += LANES) most = max(chunk(i), most);
    const F32 peak = set(largest(most));
    double mass = 0;
    for (int64_t begin = 0; begin < vocab; begin += 64 * LANES) {
        F32 part = zero();
        for (int64_t i = begin; i < std::min(vocab, begin + 64 * LANES); i += LANES)
            part = add(part, exp(sub(chunk(i), peak)));
        mass += sum(part);
    }
    const F32 total = set(float(std::log(mass)));
    const auto logprob = [&](int64_t i) { return sub(sub(chunk(i), peak), total); };
    float lanes[LANES];
    store(lanes, logprob(token / LANES * LANES));
    const float own = lanes[token % LANES];
    std::vector<Scored> best;  // a heap, the least likely first
    best.reserve(to.count);
    int64_t rank = 1;
    F32 least = set(-INFINITE);
    for (int64_t i = 0; i < vocab; i += LANES) {
        const F32 mine = logprob(i);
        const unsigned here = vocab - i >= LANES ? ~0u >> (32 - LANES) : (1u << (vocab - i)) - 1;
        rank += __builtin_popcount(less_bits(set(own), mine) & here);
        unsigned bits = int64_t(best.size()) < to.count ? here : less_bits(least, mine) & here;
        if (!bits || !to.count) continue;
        store(lanes, mine);
        for (; bits; bits &= bits - 1) {
            const Scored found = {lanes[__builtin_ctz(bits)], int32_t(i + __builtin_ctz(bits))};
            if (int64_t(best.size()) == to.count) {
                if (!likelier(found, best.front())) continue;
                std::pop_heap(best.begin(), best.end(), likelier);
                best.pop_back();
            }
            best.push_back(found);
            std::push_heap(best.begin(), best.end(), likelier);
        }
        least = set(best.front().first);
    }
    std::sort_heap(best.begin(), best.end(), likelier);
    to.ids[0] = int32_t(token), to.logprobs[0] = own, *to.rank = int32_t(rank);
    for (int64_t i = 0; i < to.count; ++i) to.ids[1 + i] = best[i].second, to.logprobs[1 + i] = best[i].first;
}

constexpr int64_t SCORE_COST = 8;  // of a token, in numbers that are only compared

// Log probabilities of tokens that are given: [rows].
inline void score(
    const void* logits, Dtype dtype, int64_t rows, int64_t vocab, int64_t stride, const int64_t* tokens,
    const Scoring* to, int threads
) {
    with_dtype(dtype, [&](auto t) {
        for_rows(rows, SCORE_COST * rows * vocab, threads, [&](int64_t row) {
            score_row((const decltype(t)*)logits + row * stride, vocab, tokens[row], to[row]);
        });
    });
}

// ---------------------------------------------------------------- the choice

// How the tokens of rows are chosen. What is null or 0 is not asked for by any row. Made of 64-bit words, as choice.py
// writes them.
struct Choice {
    const void* scores;  // [rows, vocab]
    Dtype dtype;
    int64_t rows, vocab, stride;
    const bool* sampled;                 // [rows]; the largest score wins in the others
    const int64_t *seeds, *places;       // [rows], of sampled rows; a place is the index of the new token in its sequence
    const float* temperature;            // [rows], of sampled rows, like the limits below
    const int64_t* top_k;                // 0: all
    const float *top_p, *min_p;          // 1 and 0: all
    int64_t num_masked;                  // rows with a mask
    const int64_t* masked_rows;          // [num_masked]
    const int32_t* masks;                // [num_masked, ceil(vocab / 32)]; see Row::forbid
    int64_t num_penalized;               // rows with penalties
    const int64_t* penalized_rows;       // [num_penalized]
    const int32_t* counts;               // [any, vocab]
    const int64_t* at;                   // [num_penalized]: rows of the counts
    const Penalties* penalties;          // [num_penalized]
    const void* logits;                  // [rows, vocab]: the model's, for log probabilities
    Dtype logits_dtype;
    int64_t logits_stride, num_scored;
    const Scoring* scored;  // [num_scored]
};

// The token of each row → chosen[rows], and log probabilities to `scored`. Masks act before penalties, and these before
// the temperature.
class Choosing {
  public:
    Choosing(const Choice& c, int64_t* chosen)
        : c_(c), chosen_(chosen), mask_of_(c.rows, -1), penalties_of_(c.rows, -1), scoring_of_(c.rows, -1) {
        for (int64_t i = 0; i < c.num_masked; ++i) mask_of_[c.masked_rows[i]] = i;
        for (int64_t i = 0; i < c.num_penalized; ++i) penalties_of_[c.penalized_rows[i]] = i;
        for (int64_t i = 0; i < c.num_scored; ++i) scoring_of_[c.scored[i].row] = i;
    }

    // Of all rows, in numbers that are only compared.
    int64_t cost() const {
        int64_t cost = SCORE_COST * c_.num_scored * c_.vocab;  // noise takes some eight times as long as a comparison
        for (int64_t row = 0; row < c_.rows; ++row) cost += is_sampled(row) ? 8 * c_.vocab : c_.vocab;
        return cost;
    }

    void operator()(int64_t row) const {
        with_dtype(c_.dtype, [&](auto t) {
            chosen_[row] = choose_one(row, (const decltype(t)*)c_.scores + row * c_.stride);
        });
        if (scoring_of_[row] < 0) return;
        with_dtype(c_.logits_dtype, [&](auto t) {
            const auto* logits = (const decltype(t)*)c_.logits + row * c_.logits_stride;
            score_row(logits, c_.vocab, chosen_[row], c_.scored[scoring_of_[row]]);
        });
    }

  private:
    bool is_sampled(int64_t row) const { return c_.sampled && c_.sampled[row]; }

    template <class T>
    int64_t choose_one(int64_t row, const T* scores) const {
        const int64_t mask = mask_of_[row], i = penalties_of_[row];
        if (!is_sampled(row) && mask < 0 && i < 0) return largest_of(scores, c_.vocab);
        Row copy(scores, c_.vocab);
        if (mask >= 0) copy.forbid(c_.masks + mask * ((c_.vocab + 31) / 32));
        if (i >= 0) copy.penalize(c_.counts + c_.at[i] * c_.vocab, c_.penalties[i]);
        if (!is_sampled(row)) return copy.largest_score();
        copy.divide(c_.temperature ? c_.temperature[row] : 1);
        return copy.draw(
            RowKey(c_.seeds[row], c_.places[row]), c_.top_k ? c_.top_k[row] : 0, c_.top_p ? c_.top_p[row] : 1,
            c_.min_p ? c_.min_p[row] : 0
        );
    }

    const Choice& c_;
    int64_t* const chosen_;
    std::vector<int64_t> mask_of_, penalties_of_, scoring_of_;  // by row; -1: none
};

inline void choose(const Choice& c, int64_t* chosen, int threads) {
    const Choosing each(c, chosen);
    for_rows(c.rows, each.cost(), threads, each);
}

}  // namespace mainspring
