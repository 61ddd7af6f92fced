// From scores to tokens: the largest score, the keyed Gumbel choice (gumbel.py's hash, bit for bit), and top-k, top-p and
// min-p without sorting the vocabulary (sampling.py's sets).
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
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

// ---------------------------------------------------------------- the largest

struct Best {
    float value = -INFINITE;
    int64_t token = 0;
    // Of equal values the lowest token wins.
    void meet(float other, int64_t at) {
        if (other > value || (other == value && at < token)) value = other, token = at;
    }
};

// The largest of scores[begin, end), with noise where there is a key.
template <class T>
inline Best largest_of(const T* scores, int64_t begin, int64_t end, const RowKey* key) {
    F32 best[2] = {set(-INFINITE), set(-INFINITE)};
    I32 where[2] = {iset(int(begin)), iset(int(begin))};
    int which = 0;
    for (int64_t i = begin; i < end; i += LANES, which ^= 1) {
        const I32 tokens = iadd(ramp(), iset(int(i)));
        F32 s = end - i >= LANES ? load(scores + i) : load_n(scores + i, int(end - i));
        if (key) s = add(gumbel_noise(keyed_hash(*key, tokens)), s);
        if (end - i < LANES) s = where_less(tokens, iset(int(end)), s, set(-INFINITE));
        where[which] = where_less_i(best[which], s, tokens, where[which]);
        best[which] = where_less(best[which], s, s, best[which]);
    }
    Best all;
    all.token = begin;
    for (int w = 0; w < 2; ++w) {
        float values[LANES];
        int32_t tokens[LANES];
        store(values, best[w]);
        istore(tokens, where[w]);
        for (int j = 0; j < LANES; ++j) all.meet(values[j], tokens[j]);
    }
    return all;
}

// Comparisons that take as long as it may take the team to wake up.
constexpr int64_t WORTH_WAKING = 1 << 18;

// The choice of each row: the largest score, plus noise where the row is sampled.
inline void choose(
    const void* scores, Dtype dtype, int64_t rows, int64_t vocab, int64_t stride, const int64_t* seeds,
    const int64_t* positions, const bool* sampled, int64_t* chosen, int threads
) {
    // Few rows are cut in pieces. What a piece's best is, and which piece has the best, does not depend on the cut.
    int64_t pieces = 1;
    while (rows * pieces < 2 * threads && vocab / pieces > 4096) pieces *= 2;
    std::vector<Best> bests(rows * pieces);
    with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        int64_t cost = 0;  // in scores that are only compared: noise takes some sixteen times as long
        for (int64_t row = 0; row < rows; ++row) cost += sampled && sampled[row] ? 16 * vocab : vocab;
        const int wanted = cost < WORTH_WAKING ? 1 : int(std::min<int64_t>(threads, rows * pieces));
        run_team(wanted, [&](Team& team, int) {
            for (int64_t i = team.take(); i < rows * pieces; i = team.take()) {
                const int64_t row = i / pieces, piece = i % pieces;
                const RowKey key(seeds ? seeds[row] : 0, positions ? positions[row] : 0);
                bests[i] = largest_of(
                    (const T*)scores + row * stride, vocab * piece / pieces, vocab * (piece + 1) / pieces,
                    sampled && sampled[row] ? &key : nullptr
                );
            }
        });
    });
    for (int64_t row = 0; row < rows; ++row) {
        Best best = bests[row * pieces];
        for (int64_t piece = 1; piece < pieces; ++piece) {
            const Best& other = bests[row * pieces + piece];
            best.meet(other.value, other.token);
        }
        chosen[row] = best.token;
    }
}

// ---------------------------------------------------------------- top-k, top-p, min-p

// Sorts a row's tokens into bins by how far below the largest score they lie: the bins are in order, so what is sought
// (the k-th, or the token at which the mass is complete) lies in one bin, and only that bin is sorted.
class RowMask {
  public:
    RowMask(const float* scores, int64_t vocab) : scores_(scores), vocab_(vocab) {
        F32 most = set(-INFINITE);
        for (int64_t i = 0; i < vocab; i += LANES) most = max(chunk(i), most);
        peak_ = largest(most);
        has_peak_ = std::isfinite(peak_);
    }

    void top_k(int64_t k) {
        if (!has_peak_ || k <= 0 || k >= vocab_) return;
        fill_bins(false);
        int bin = 0;
        int64_t before = 0;
        while (before + counts_[bin] < k) before += counts_[bin++];
        std::vector<float> in_bin = scores_in(bin);
        auto kth = in_bin.begin() + (k - before - 1);
        std::nth_element(in_bin.begin(), kth, in_bin.end(), std::greater<float>());
        floor_ = *kth;
    }

    // A token stays while those ranked before it hold less than `p` of what top-k left.
    void top_p(float p) {
        if (!has_peak_ || !(p < 1)) return;
        fill_bins(true);
        const int last_bin = bin_of(floor_);  // of what top-k left
        double total = 0;
        for (int bin = 0; bin < last_bin; ++bin) total += masses_[bin];
        for (float s : scores_in(last_bin))
            if (s >= floor_) total += mass(s);
        const double needed = double(p) * total;
        double before = 0;
        int bin = 0;
        while (bin < last_bin && before + masses_[bin] < needed) before += masses_[bin++];
        std::vector<float> in_bin = scores_in(bin);
        std::sort(in_bin.begin(), in_bin.end(), std::greater<float>());
        size_t kept = 0;
        while (kept < in_bin.size() && in_bin[kept] >= floor_ && (kept == 0 || before < needed))
            before += mass(in_bin[kept++]);
        const float smallest = in_bin[kept - 1];
        // Of scores equal to the smallest that stays, those of the lowest tokens stay.
        keep_equal_ = 0;
        for (size_t i = 0; i < kept; ++i) keep_equal_ += in_bin[i] == smallest;
        edge_ = smallest;
        floor_ = std::max(floor_, smallest);
    }

    void min_p(float p) {
        if (has_peak_ && p > 0) floor_ = std::max(floor_, peak_ + std::log(p));
    }

    void write(float* out) const {
        for (int64_t i = 0; i < vocab_; i += LANES) {
            const F32 s = chunk(i);
            const F32 kept = where_less(s, set(floor_), set(-INFINITE), s);
            store_n(out + i, kept, int(std::min<int64_t>(LANES, vocab_ - i)));
        }
        if (keep_equal_ < 0 || edge_ < floor_) return;
        int64_t seen = 0;
        for (int64_t i = 0; i < vocab_; i += LANES)
            for (unsigned equal = equal_bits(chunk(i), set(edge_)); equal; equal &= equal - 1)
                if (seen++ >= keep_equal_) out[i + __builtin_ctz(equal)] = -INFINITE;
    }

  private:
    static constexpr int BINS = 4096;
    static constexpr float BINS_PER_NAT = 128;  // the last bin has what is 32 and more below the peak

    F32 chunk(int64_t i) const {
        if (vocab_ - i >= LANES) return load(scores_ + i);
        const F32 s = load_n(scores_ + i, int(vocab_ - i));
        return where_less(ramp(), iset(int(vocab_ - i)), s, set(-INFINITE));
    }
    I32 bins_of(F32 s) const {
        return to_int(min(mul(sub(set(peak_), s), set(BINS_PER_NAT)), set(BINS - 1)));
    }
    int bin_of(float s) const {
        int32_t lanes[LANES];
        istore(lanes, bins_of(set(s)));
        return lanes[0];
    }
    F32 masses_of(F32 s) const { return exp(sub(s, set(peak_))); }
    double mass(float s) const {
        float lanes[LANES];
        store(lanes, masses_of(set(s)));
        return lanes[0];
    }

    void fill_bins(bool with_mass) {
        if (with_mass ? !masses_.empty() : !counts_.empty()) return;
        if (with_mass) masses_.assign(BINS, 0);
        counts_.assign(BINS, 0);
        for (int64_t i = 0; i < vocab_; i += LANES) {
            const F32 s = chunk(i);
            int32_t bins[LANES];
            float masses[LANES];
            istore(bins, bins_of(s));
            if (with_mass) store(masses, masses_of(s));
            const int n = int(std::min<int64_t>(LANES, vocab_ - i));
            for (int j = 0; j < n; ++j) ++counts_[bins[j]];
            if (with_mass)
                for (int j = 0; j < n; ++j) masses_[bins[j]] += masses[j];
        }
    }

    std::vector<float> scores_in(int bin) const {
        std::vector<float> found;
        found.reserve(counts_[bin]);
        const F32 wanted = set(float(bin));
        for (int64_t i = 0; i < vocab_; i += LANES) {
            const F32 s = chunk(i);
            const unsigned here = equal_bits(to_float(bins_of(s)), wanted);
            if (!here) continue;
            float lanes[LANES];
            store(lanes, s);
            for (unsigned bits = here; bits; bits &= bits - 1)
                if (const int j = __builtin_ctz(bits); i + j < vocab_) found.push_back(lanes[j]);
        }
        return found;
    }

    const float* scores_;
    const int64_t vocab_;
    float peak_, floor_ = -INFINITE, edge_ = -INFINITE;
    bool has_peak_;
    int64_t keep_equal_ = -1;  // how many scores equal to edge_ stay; -1: all
    std::vector<int32_t> counts_;
    std::vector<double> masses_;
};

// Limits are null where no row has one.
inline void mask(
    const float* scores, int64_t rows, int64_t vocab, int64_t stride, const int64_t* top_k, const float* top_p,
    const float* min_p, float* out, int threads
) {
    run_team(rows * vocab < (1 << 14) ? 1 : int(std::min<int64_t>(threads, rows)), [&](Team& team, int) {
        for (int64_t row = team.take(); row < rows; row = team.take()) {
            RowMask of_row(scores + row * stride, vocab);
            if (top_k) of_row.top_k(top_k[row]);
            if (top_p) of_row.top_p(top_p[row]);
            if (min_p) of_row.min_p(min_p[row]);
            of_row.write(out + row * vocab);
        }
    });
}

}  // namespace mainspring
