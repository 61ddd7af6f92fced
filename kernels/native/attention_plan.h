// Who computes what in a step's attention: plain index arithmetic, once a step for all layers of a kind.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace mainspring {

// Part of a result's bits. Keys are looked at in tiles of TILE positions and tiles in ranges, both counted from a
// request's position 0: a range's sums are formed tile by tile, a row's result range by range.
constexpr int TILE = 64;
constexpr int TILES_PER_RANGE = 8;

// Tokens whose keys lie at even distances: block sizes are multiples of it.
constexpr int RUN = 8;

// Not part of them: a row's arithmetic is the same whatever rows it shares a unit with.
constexpr int UNIT_ROWS = 192;  // query rows (tokens x query heads of a KV head) that share a packed tile of keys

struct Spec {
    int q_heads, kv_heads, key_dim, value_dim;
    int64_t window;  // 0: none
    float scale, softcap;  // softcap 0: none
    // What is added to a score by the distance of query and key, in the natural unit; bias_columns 0: nothing, 1: bias
    // [q_heads] are slopes, and -slope x distance is added, more: bias [q_heads, bias_columns], whose last column holds
    // for longer distances too.
    const float* bias;
    int64_t bias_columns;
    int group() const { return q_heads / kv_heads; }
};

// Neighbouring tokens of a request, neighbouring KV heads and neighbouring tiles: what one thread does in one go. Or
// tokens of neighbouring requests, and tiles that lie in the same blocks for all of them.
struct Unit {
    int request;  // whose blocks these are
    int head_begin, head_end;  // KV heads
    int64_t row_begin, row_end;  // query rows (tokens) of the batch
    int64_t position;  // of row_begin
    int64_t last;  // position of the last key that any of its rows sees
    int64_t tile_begin, tile_end;
    int merge;  // -1: the unit ends with the result; else it ends with one range's sums
    int part;  // which of the merge's parts
    int64_t cost;
};

// Ranges that were computed apart, to be joined in order by whoever finishes last.
struct Merge {
    int parts, units;
    int head_begin, head_end;  // KV heads
    int64_t row_begin, row_end;  // tokens
    // Where its sums lie: [parts][heads][tokens][group][row_floats]. A row that has fewer parts has nothing in the last ones.
    int64_t at;
    std::atomic<int> open{0};  // units that are not done yet
    Merge(int parts, int units, int head_begin, int head_end, int64_t row_begin, int64_t row_end, int64_t at)
        : parts(parts), units(units), head_begin(head_begin), head_end(head_end), row_begin(row_begin), row_end(row_end),
          at(at), open(units) {}
    Merge(Merge&& other) noexcept
        : Merge(other.parts, other.units, other.head_begin, other.head_end, other.row_begin, other.row_end, other.at) {}
    int64_t tokens() const { return row_end - row_begin; }
    int64_t rows(int group) const { return (head_end - head_begin) * tokens() * group; }
};

struct Plan {
    Spec spec;
    int block_size;
    int64_t num_rows;  // query rows that belong to requests
    std::vector<int64_t> row_begin;  // per request
    std::vector<int64_t> position;  // per request, of its first row
    std::vector<int32_t> reach;  // per row: the position of the last key that it sees; empty: its own
    std::vector<int64_t> table_begin;  // per request, into blocks
    std::vector<int32_t> blocks;
    std::vector<Unit> units;  // the most expensive first
    std::vector<Merge> merges;
    std::vector<float> parts;  // sums of ranges that were computed apart
    int most_rows = 0;  // tokens x group x heads of the largest unit

    static constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // the largest score of a row without a part

    // Floats a row's sums take: the largest score, the sum of weights, the weighted values.
    static int64_t row_floats(const Spec& spec) { return 2 + (spec.value_dim + 31) / 32 * 32; }
};

inline std::unique_ptr<Plan> plan_attention(
    const Spec& spec, int requests, const int32_t* qo_indptr, const int32_t* kv_indptr, const int32_t* kv_indices,
    const int32_t* last_page_len, int block_size, int threads, const int32_t* reach = nullptr, const int64_t* own = nullptr
) {
    // reach: see Plan. own: the position of each request's first row; null: its rows are the last ones of its keys.
    auto plan = std::make_unique<Plan>();
    plan->spec = spec;
    plan->block_size = block_size;
    plan->num_rows = qo_indptr[requests];
    plan->blocks.assign(kv_indices, kv_indices + kv_indptr[requests]);
    if (reach) plan->reach.assign(reach, reach + plan->num_rows);
    const int group = spec.group();

    // What a tile costs for one KV head, in about cycles of one tile of keys packed: packing, then a bit for each row.
    const auto tile_cost = [&](int64_t tokens) { return 40 + 4 * tokens * group; };
    const auto first_tile = [&](int64_t position) {
        return spec.window ? std::max<int64_t>(0, position - spec.window + 1) / TILE : 0;
    };
    int64_t total = 0, items = 0;
    std::vector<int64_t> lengths(requests);
    for (int r = 0; r < requests; ++r) {
        plan->row_begin.push_back(qo_indptr[r]), plan->table_begin.push_back(kv_indptr[r]);
        lengths[r] = int64_t(kv_indptr[r + 1] - kv_indptr[r] - 1) * block_size + last_page_len[r];
        const int64_t tokens = qo_indptr[r + 1] - qo_indptr[r];
        const int64_t begin = own ? own[r] : lengths[r] - tokens;
        plan->position.push_back(begin);
        total += spec.kv_heads * ((lengths[r] - 1) / TILE - first_tile(begin) + 1) * tile_cost(std::min<int64_t>(tokens, 64));
        items += spec.kv_heads * ((tokens * group + UNIT_ROWS - 1) / UNIT_ROWS);
    }
    int unit_rows = UNIT_ROWS;
    while (items < 3 * threads && unit_rows > 12) unit_rows /= 2, items *= 2;
    const int64_t unit_tokens = std::max(1, unit_rows / group);
    const int64_t share = (total + threads - 1) / threads;

    int64_t parts_at = 0, room = share;  // in the share of whose turn it is
    const auto add_merge = [&](int parts, int units, int h0, int h1, int64_t row, int64_t end) {
        plan->merges.emplace_back(parts, units, h0, h1, row, end, parts_at);
        parts_at += parts * plan->merges.back().rows(group) * Plan::row_floats(spec);
        return int(plan->merges.size()) - 1;
    };

    const auto last_of = [&](int one) { return plan->position[one] + qo_indptr[one + 1] - qo_indptr[one] - 1; };
    const auto ranges_of = [&](int one) { return last_of(one) / TILE / TILES_PER_RANGE + 1; };
    // The ranges that lie in the same blocks for this request and the one before it, and come before all of its rows.
    const auto shared_ranges = [&](int r) -> int64_t {
        if (spec.window || spec.bias_columns || reach) return 0;
        const int32_t *mine = kv_indices + kv_indptr[r], *others = kv_indices + kv_indptr[r - 1];
        const int64_t most = std::min(kv_indptr[r + 1] - kv_indptr[r], kv_indptr[r] - kv_indptr[r - 1]);
        const int64_t blocks = std::mismatch(mine, mine + most, others).first - mine;
        const int64_t before = std::min(plan->position[r], plan->position[r - 1]);
        return std::min(blocks * block_size, before) / (TILE * TILES_PER_RANGE);
    };
    // Requests [r, end) whose first ranges are the same: those are computed once for all rows together.
    const auto plan_family = [&](int r, int end, int64_t ranges) {
        const int64_t row = qo_indptr[r], tokens = qo_indptr[end] - row, shared = ranges * TILES_PER_RANGE;
        const int64_t most_heads = UNIT_ROWS / std::max<int64_t>(1, tokens * group);
        const int step = int(std::max<int64_t>(1, std::min(most_heads, int64_t(spec.kv_heads / threads))));
        for (int h0 = 0, h1; h0 < spec.kv_heads; h0 = h1) {
            h1 = std::min(h0 + step, spec.kv_heads);
            int64_t units = ranges, parts = ranges;
            for (int one = r; one < end; ++one) units += ranges_of(one) - ranges, parts = std::max(parts, ranges_of(one));
            const int merge = add_merge(int(parts), int(units), h0, h1, row, row + tokens);
            plan->most_rows = std::max(plan->most_rows, int(tokens * group * (h1 - h0)));
            const auto add = [&](int one, int64_t from, int64_t to, int64_t position, int64_t last, int64_t range) {
                const int64_t t0 = range * TILES_PER_RANGE, t1 = std::min(last / TILE + 1, t0 + TILES_PER_RANGE);
                const int64_t cost = tile_cost(to - from) * (t1 - t0) * (h1 - h0);
                plan->units.push_back({one, h0, h1, from, to, position, last, t0, t1, merge, int(range), cost});
            };
            for (int64_t range = 0; range < ranges; ++range) add(r, row, row + tokens, shared * TILE, shared * TILE - 1, range);
            for (int one = r; one < end; ++one)
                for (int64_t range = ranges; range < ranges_of(one); ++range)
                    add(one, qo_indptr[one], qo_indptr[one + 1], plan->position[one], last_of(one), range);
        }
    };

    for (int r = 0; r < requests; ++r) {
        int64_t ranges = 0;
        int end = r + 1;
        for (; end < requests && qo_indptr[end + 1] - qo_indptr[r] <= unit_tokens; ++end) {
            const int64_t common = shared_ranges(end), wanted = ranges ? ranges : common;
            // The sums of every range of a family are kept until all are there: for much longer requests, too many.
            if (!common || common < wanted || std::max(ranges_of(r), ranges_of(end)) > 2 * wanted + 3) break;
            ranges = wanted;
        }
        if (ranges) {
            plan_family(r, end, ranges);
            r = end - 1;
            continue;
        }
        const int64_t tokens = qo_indptr[r + 1] - qo_indptr[r];
        const int64_t pieces = (tokens + unit_tokens - 1) / unit_tokens;
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const int64_t from = tokens * piece / pieces, to = tokens * (piece + 1) / pieces;
            const int64_t position = plan->position[r] + from, row = qo_indptr[r] + from;
            const int64_t last =
                reach ? *std::max_element(reach + row, reach + row + (to - from)) : position + (to - from) - 1;
            const int64_t begin = first_tile(position), end = last / TILE + 1;
            const int64_t cost = tile_cost(to - from) * (end - begin);  // of one head
            // Where heads are few, ranges are computed apart.
            const int64_t ranges = (end - 1) / TILES_PER_RANGE - begin / TILES_PER_RANGE + 1;
            const int64_t splits = threads > 1 && cost > share / 4 ? ranges : 1;
            // Rows of several heads share a unit where they are few: neighbouring heads lie side by side in the cache, and
            // to read on is faster than to begin anew. So they are parted only where a thread's share is full.
            const int64_t most_heads = std::max<int64_t>(1, UNIT_ROWS / ((to - from) * group));
            for (int h0 = 0, h1; h0 < spec.kv_heads; h0 = h1) {
                if (room <= cost / 2) room = std::max(room, -cost) + share;
                const int64_t fit = ((splits > 1 ? splits * share / 4 : room) + cost / 2) / cost;
                h1 = h0 + int(std::max<int64_t>(1, std::min({fit, most_heads, int64_t(spec.kv_heads - h0)})));
                room -= cost * (h1 - h0);
                const int rows = (to - from) * group * (h1 - h0);
                plan->most_rows = std::max(plan->most_rows, rows);
                const int merge = splits > 1 ? add_merge(int(splits), int(splits), h0, h1, row, row + (to - from)) : -1;
                for (int64_t split = 0; split < splits; ++split) {
                    int64_t t0 = begin, t1 = end;
                    if (splits > 1) {
                        const int64_t range = begin / TILES_PER_RANGE + split;
                        t0 = std::max(begin, range * TILES_PER_RANGE);
                        t1 = std::min(end, (range + 1) * TILES_PER_RANGE);
                    }
                    plan->units.push_back(
                        {r, h0, h1, row, row + (to - from), position, last, t0, t1,
                         merge, int(split), tile_cost(to - from) * (t1 - t0) * (h1 - h0)}
                    );
                }
            }
        }
    }
    plan->parts.assign(parts_at, Plan::NOTHING);
    std::stable_sort(plan->units.begin(), plan->units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
    return plan;
}

// The same for some of its rows alone: every one as a request of one token.
inline std::unique_ptr<Plan> plan_rows(
    const Plan& all, int64_t count, const int64_t* rows, int threads
) {
    std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0}, blocks, last_page_len, reach;
    std::vector<int64_t> own;
    for (int64_t i = 0; i < count; ++i) {
        const auto after = std::upper_bound(all.row_begin.begin(), all.row_begin.end(), rows[i]);
        const int64_t request = after - all.row_begin.begin() - 1;
        const auto table = all.blocks.begin() + all.table_begin[request];
        own.push_back(all.position[request] + rows[i] - all.row_begin[request]);
        const int64_t last = all.reach.empty() ? own.back() : all.reach[rows[i]];
        reach.push_back(int32_t(last));
        blocks.insert(blocks.end(), table, table + last / all.block_size + 1);
        qo_indptr.push_back(int32_t(i + 1)), kv_indptr.push_back(int32_t(blocks.size()));
        last_page_len.push_back(int32_t(last % all.block_size + 1));
    }
    return plan_attention(
        all.spec, int(count), qo_indptr.data(), kv_indptr.data(), blocks.data(), last_page_len.data(), all.block_size,
        threads, all.reach.empty() ? nullptr : reach.data(), own.data()
    );
}

}  // namespace mainspring
