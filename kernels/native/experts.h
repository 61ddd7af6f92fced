// The experts of a mixture, gated MLPs of which each row goes through a few, and the router that chooses them. All rows may
// go through one more, the shared expert, which decoder.h computes like any MLP.
//
// Rows are put together by expert, and each expert's are one product. A member of the team takes whole experts, for which
// it waits for nobody; only where these are too few to keep all busy do all share each product. A row's bits are the same
// either way, and do not depend on the other rows: see linear.h.
#pragma once

#include <numeric>

#include "products.h"

namespace mainspring {

// Made of 64-bit words, as decoder.py writes them.
struct LinearOf {
    WeightKind kind;
    const void* data;
    int64_t N, K, group;
    const void* bias;
    Weight weight() const { return {kind, data, int(N), int(K), int(group)}; }
};
struct MixtureOf {
    LinearOf router;  // N: experts; 0: there is no mixture
    const LinearOf* weights;  // of each expert gate and up, and down
    int64_t top_k, normalise, widened;
    int64_t gated;  // rows of gate and up are interleaved
    const float* shared_gate;  // [hidden]: its product with a row is the gate of the shared expert's output; or null
    int64_t sigmoid;  // scores are sigmoids of the logits, else their softmax
    int64_t precise;  // logits are fp32, and the router lies as in the checkpoint
    int64_t groups, kept;  // groups of experts, and from how many of them experts are chosen
    double scale;  // of shares
    const float* correction;  // [experts], added to the scores that choose; or null
    int64_t widest_gate_up, widest_down;  // experts for which packed rows of x take the most memory: kinds may differ
    const LinearOf& gate_up(int64_t expert) const { return weights[2 * expert]; }
    const LinearOf& down(int64_t expert) const { return weights[2 * expert + 1]; }
    int64_t pairs(int64_t rows) const { return rows * top_k; }
};

// Memory of a step of so many rows. `of` gives the parts of one piece, 64-byte aligned.
struct MixtureMemory {
    char *logits, *gathered, *inner, *outputs, *workspaces;
    float* shares;
    int32_t* chosen;
    size_t own_bytes, bytes = 0;  // own_bytes: of a member's own workspace

    MixtureMemory(const MixtureOf& m, Dtype dtype, int64_t rows, int64_t hidden, int threads, char* at) {
        const auto part = [&](size_t size) { return bytes += (size + 63) / 64 * 64, at + bytes - (size + 63) / 64 * 64; };
        const size_t size = size_of(dtype), pairs = m.pairs(rows);
        const Weight gate_up = m.gate_up(m.widest_gate_up).weight(), down = m.down(m.widest_down).weight();
        logits = part(rows * m.router.N * (m.precise ? sizeof(float) : size));
        shares = (float*)part(pairs * sizeof(float)), chosen = (int32_t*)part(pairs * sizeof(int32_t));
        gathered = part(pairs * hidden * size), inner = part(pairs * (m.gated ? gate_up.N / 2 : gate_up.N) * size);
        outputs = part(pairs * hidden * size);
        own_bytes = (std::max(workspace_bytes(gate_up, int(rows), 1), workspace_bytes(down, int(rows), 1)) + 63) / 64 * 64;
        workspaces = part(threads * own_bytes);
    }
};

// Logits [rows, experts] of rows of x by some of the experts, in fp32.
template <class T>
void precise_logits(const MixtureOf& m, const T* x, int64_t hidden, int64_t rows, float* logits, Share mine) {
    const auto of_rows = [&](int64_t first, auto count) {
        for (int64_t e = mine.begin; e < mine.end; ++e) {
            F32 sums[count.value];
            for (auto& each : sums) each = zero();
            const T* weight = (const T*)m.router.data + e * hidden;
            for (int64_t d = 0; d < hidden; d += LANES) {
                const F32 w = load_up_to(weight + d, hidden - d);
#pragma GCC unroll 8
                for (int r = 0; r < count.value; ++r)
                    sums[r] = fma(load_up_to(x + (first + r) * hidden + d, hidden - d), w, sums[r]);
            }
            for (int r = 0; r < count.value; ++r) logits[(first + r) * m.router.N + e] = sum(sums[r]);
        }
    };
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) of_rows(row, std::integral_constant<int, 8>());
    for (; row < rows; ++row) of_rows(row, std::integral_constant<int, 1>());
}

// Leaves of `places`, by which experts are chosen, those of the best groups: where the two highest have the highest sum.
inline void keep_groups(const MixtureOf& m, float* places) {
    const int size = int(m.router.N / m.groups);
    std::vector<float> best;
    for (float* group = places; int(best.size()) < m.groups; group += size) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = 0; e < size; ++e) second = std::max(second, std::min(first, group[e])), first = std::max(first, group[e]);
        best.push_back(std::isnan(first + second) ? -INFINITY : first + second);
    }
    std::vector<int> order(best.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return best[a] > best[b]; });
    for (size_t i = m.kept; i < order.size(); ++i) std::fill_n(places + order[i] * size, size, -INFINITY);
}

// The experts of a row that have the highest scores by the router's logits [n], and their shares; of equal ones the first.
template <class T, class L>
void route_row(const L* logits, const MixtureOf& m, int32_t* chosen, float* shares) {
    const int n = int(m.router.N), k = int(m.top_k);
    std::vector<float> x((n + LANES - 1) / LANES * LANES, -INFINITY), scores(x.size());
    for (int i = 0; i < n; i += LANES) store_up_to(x.data() + i, load_up_to(logits + i, n - i), n - i);
    F32 top = load(x.data()), total = zero();
    for (size_t i = LANES; i < x.size(); i += LANES) top = max(top, load(x.data() + i));
    const F32 most = set(largest(top)), one = set(1);
    for (size_t i = 0; i < x.size(); i += LANES) {
        const F32 logit = load(x.data() + i), each = exp(m.sigmoid ? sub(zero(), logit) : sub(logit, most));
        store(scores.data() + i, m.sigmoid ? div(one, add(one, each)) : each), total = add(total, each);
    }
    const float whole = m.sigmoid ? 1 : sum(total);
    for (int e = 0; e < n; ++e) scores[e] /= whole;
    if (m.sigmoid || m.correction || m.groups > 1)  // else logits are in the order of scores
        for (int e = 0; e < n; ++e) x[e] = scores[e] + (m.correction ? m.correction[e] : 0);
    if (m.groups > 1) keep_groups(m, x.data());
    float sum_of_chosen = 0;
    std::vector<bool> taken(n);  // none twice, also where all are NaN
    for (int i = 0; i < k; ++i) {
        int best = -1;
        for (int e = 0; e < n; ++e)
            if (!taken[e] && (best < 0 || x[e] > x[best])) best = e;
        chosen[i] = best, shares[i] = scores[best], sum_of_chosen += shares[i];
        taken[best] = true;
    }
    for (int i = 0; i < k; ++i) {
        if (m.normalise) shares[i] /= sum_of_chosen + 1e-20f;
        shares[i] *= float(m.scale);
        if (!m.widened) {
            T rounded;
            store_one(&rounded, shares[i]), shares[i] = load_one(&rounded);
        }
    }
}

// The gate of a shared expert's output.
template <class T>
float shared_gate(const T* x, const float* weight, int64_t hidden) {
    F32 total = zero();
    for (int64_t d = 0; d < hidden; d += LANES)
        total = fma(load_up_to(x + d, hidden - d), load_up_to(weight + d, hidden - d), total);
    return 1 / (1 + std::exp(-sum(total)));
}

// Pairs of a row and one of its experts, in the order of experts.
struct PairsByExpert {
    std::vector<int32_t> order, place;  // the pair in each place, the place of each pair
    std::vector<int32_t> first;  // of each expert, and the end
    std::vector<int32_t> used;  // experts that have pairs, those with most before

    PairsByExpert(const int32_t* chosen, int64_t pairs, int64_t experts) : order(pairs), place(pairs), first(experts + 1) {
        for (int64_t i = 0; i < pairs; ++i) ++first[chosen[i] + 1];
        std::partial_sum(first.begin(), first.end(), first.begin());
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (int64_t i = 0; i < pairs; ++i) place[i] = next[chosen[i]]++, order[place[i]] = int32_t(i);
        for (int64_t e = 0; e < experts; ++e)
            if (count(e)) used.push_back(int32_t(e));
        std::stable_sort(used.begin(), used.end(), [&](int a, int b) { return count(a) > count(b); });
    }
    int32_t count(int64_t expert) const { return first[expert + 1] - first[expert]; }
};

// `rows` rows of x [rows, hidden] through their experts. Every member calls it with the same rows, perhaps in memory of its
// own where they are few. add(row, columns, sum) is called for each vector of the sums, by the member whose share of the
// rows it is. All of it is done after a barrier.
template <class T, class Add>
void mixture_in_team(const MixtureOf& m, Dtype dtype, Activation activation, const T* x, int64_t hidden, int64_t rows,
                     const MixtureMemory& memory, void* workspace, Team& team, int rank, const Add& add) {
    const int64_t experts = m.router.N, k = m.top_k;
    if (m.precise)
        precise_logits(m, x, hidden, rows, (float*)memory.logits, Share(experts, rank, team.size));
    else
        multiply(
            {m.router.weight(), dtype, x, hidden, int(rows), memory.logits, experts, m.router.bias}, workspace, team, rank
        );
    team.barrier();
    const Share mine(rows, rank, team.size);
    const auto route_rows = [&](const auto* logits) {
        for (int64_t row = mine.begin; row < mine.end; ++row)
            route_row<T>(logits + row * experts, m, memory.chosen + row * k, memory.shares + row * k);
    };
    m.precise ? route_rows((const float*)memory.logits) : route_rows((const T*)memory.logits);
    team.barrier();
    const PairsByExpert pairs(memory.chosen, m.pairs(rows), experts);

    const int64_t inner = m.down(0).K, inner_stride = m.gated ? inner : 2 * inner;
    const auto gather = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy((T*)memory.gathered + i * hidden, x + pairs.order[i] / k * hidden, hidden * sizeof(T));
    };
    const auto activate_rows = [&](int64_t begin, int64_t end) {  // in place
        for (int64_t i = begin; i < end; ++i) {
            T* row = (T*)memory.inner + i * inner_stride;
            switch (activation) {
                case Activation::silu: act_and_mul_row<Activation::silu>(row, row + inner, inner, row); break;
                case Activation::gelu: act_and_mul_row<Activation::gelu>(row, row + inner, inner, row); break;
                case Activation::clamped: clamped_row(row, inner, row); break;
                default: act_and_mul_row<Activation::gelu_tanh>(row, row + inner, inner, row);
            }
        }
    };
    const auto products = [&](int32_t expert, void* space, Team& by, int member) {
        const int64_t first = pairs.first[expert];
        const int count = pairs.count(expert);
        T *in = (T*)memory.inner + first * inner_stride, *out = (T*)memory.outputs + first * hidden;
        Product p = {m.gate_up(expert).weight(), dtype, (T*)memory.gathered + first * hidden, hidden, count, in, inner_stride};
        p.gated = m.gated, p.activation = activation, p.bias = m.gate_up(expert).bias;
        multiply(p, space, by, member);
        by.barrier();
        if (!m.gated) {
            const Share some(count, member, by.size);
            activate_rows(first + some.begin, first + some.end);
            by.barrier();
        }
        const LinearOf& down = m.down(expert);
        multiply({down.weight(), dtype, in, inner_stride, count, out, hidden, down.bias}, space, by, member);
    };
    if (int(pairs.used.size()) >= 4 * team.size) {
        for (size_t i; (i = team.take()) < pairs.used.size();) {
            const int32_t expert = pairs.used[i];
            gather(pairs.first[expert], pairs.first[expert + 1]);
            Team alone(1);
            products(expert, memory.workspaces + rank * memory.own_bytes, alone, 0);
        }
    } else {
        const Share some(m.pairs(rows), rank, team.size);
        gather(some.begin, some.end);
        for (const int32_t expert : pairs.used) team.barrier(), products(expert, workspace, team, rank);
    }
    team.barrier();
    for (int64_t row = mine.begin; row < mine.end; ++row)
        for (int64_t d = 0; d < hidden; d += LANES) {
            F32 total = zero();
            for (int64_t i = row * k; i < (row + 1) * k; ++i) {
                const T* output = (const T*)memory.outputs + pairs.place[i] * hidden + d;
                total = fma(set(memory.shares[i]), load_up_to(output, hidden - d), total);
            }
            add(row, d, total);
        }
}

}  // namespace mainspring
