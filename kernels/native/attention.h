// Paged attention for any mix of decode and prefill, on the plan of attention_plan.h.
//
// For each tile of 64 keys, each KV head, and all query rows that see them, a block of rows at a time: scores = rows x keys,
// weights = 2^(score - largest so far), sums = sums x 2^(old - new largest) + weights x values (the online softmax of
// Milakov & Gimelshein 2018). A tile's keys are packed once for all its rows, its values where that pays
// (attention_tiles.h). Where neighbouring requests begin in the same blocks, the rows of all of them share a unit there.
//
// Clockwork: what happens to a row is a chain of operations on it alone, in the order of the tiles. A hidden key's weight
// is an exact 0, and tiles that a row does not see are left out. So it does not matter which rows share a unit, and a
// decode row has the bits it would have had as the last row of a prompt.
#pragma once

#include <array>

#include "attention_plan.h"
#include "attention_tiles.h"
#include "fused.h"
#include "team.h"

namespace mainspring {

struct AttentionCall {
    Plan* plan;
    const char* query;  // [rows, q_heads, key_dim], strides in elements, the last dimension contiguous
    int64_t query_row, query_head;
    Dtype query_dtype, cache_dtype;
    CacheView keys, values;
    const float* sinks;  // [q_heads] or null
    char* out;  // [rows, q_heads, value_dim], contiguous, of the query's dtype
    int64_t out_rows;  // those beyond the plan's become zero
};

// ---------------------------------------------------------------- one thread's work

// Grows, never shrinks; 64-byte aligned. One a thread, kept from call to call.
class Workspace {
  public:
    ~Workspace() { std::free(data_); }
    float* floats(size_t count) {
        if (count > size_) {
            std::free(data_);
            size_ = up_to_multiple(count, 1024);
            data_ = (float*)std::aligned_alloc(4096, size_ * sizeof(float));
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    size_t size_ = 0;
};

template <class Math, class Cache>
class Attention {
  public:
    explicit Attention(const AttentionCall& call) : call_(call), plan_(*call.plan), spec_(plan_.spec) {
        constexpr int OF_DWORD = Math::PER_STEP * Of::PARTS;
        key_dwords_ = (spec_.key_dim + OF_DWORD - 1) / OF_DWORD;
        query_stride_ = up_to_multiple(spec_.key_dim, Of::ELEMENTS) / Math::PER_STEP;
        columns_ = up_to_multiple(spec_.value_dim, Of::ELEMENTS);
        row_floats_ = Plan::row_floats(spec_);
        longest_ = std::max<int64_t>(spec_.key_dim, spec_.value_dim);
    }

    void run(Team& team, int rank) {
#if MAINSPRING_AMX
        const FlushDenormals flush;
#endif
        static thread_local Workspace workspace;
        lay_out(workspace);
        if (rank == 0) {
            const int64_t row = int64_t(spec_.q_heads) * spec_.value_dim * size_of(call_.query_dtype);
            std::memset(call_.out + plan_.num_rows * row, 0, (call_.out_rows - plan_.num_rows) * row);
        }
        const int64_t count = plan_.units.size();
        // Where there are many units, the next is taken early, so that its first keys can be asked for.
        const bool early = count > 8 * team.size;
        for (int64_t i = team.take(); i < count;) {
            const int64_t next = early ? team.take() : count;
            compute(plan_.units[i], next < count ? &plan_.units[next] : nullptr);
            i = early ? next : team.take();
        }
    }

  private:
    using Of = Source<Math, Cache>;
    static constexpr int BLOCK_ROWS = Math::BLOCK_ROWS;
    struct Tile {  // keys [first, count) are those that somebody may see
        int first, count;
        int64_t keys[TILE / RUN] = {}, values[TILE / RUN] = {};  // where its runs lie, less the head; others lie anywhere
    };

    void lay_out(Workspace& workspace) {
        const int64_t rows = plan_.most_rows;
        const int64_t sizes[] = {
            TILE * up_to_multiple(key_dwords_, LANES),  // keys
            TILE / Math::PER_STEP * columns_,  // values
            rows * query_stride_,
            BLOCK_ROWS * TILE,  // scores
            BLOCK_ROWS * TILE,  // weights
            Math::TILES ? BLOCK_ROWS * columns_ : 0,  // weighted values of a tile
            rows * columns_,  // sums of a range
            rows * columns_,  // sums of all ranges so far
            rows * LANES,  // sums of weights, lane by lane
            up_to_multiple(rows, 16), up_to_multiple(rows, 16), up_to_multiple(rows, 16),
            up_to_multiple(longest_, 32),  // zeros
        };
        size_t all = 0;
        for (int64_t size : sizes) all += up_to_multiple(size, 16);
        float* at = workspace.floats(all);
        const int64_t* size = sizes;
        const auto next = [&] {
            float* here = at;
            at += up_to_multiple(*size++, 16);
            return here;
        };
        keys_ = (uint32_t*)next(), values_ = (uint32_t*)next(), query_ = (uint32_t*)next();
        scores_ = next(), weights_ = (uint32_t*)next(), weighted_ = next();
        sums_ = next(), all_sums_ = next(), weight_lanes_ = next();
        largest_ = next(), all_largest_ = next(), all_weights_ = next();
        zeros_ = next();
        std::memset(zeros_, 0, up_to_multiple(longest_, 32) * sizeof(float));
    }

    void compute(const Unit& unit, const Unit* next_unit) {
        const int group = spec_.group();
        const int64_t tokens = unit.row_end - unit.row_begin, head_rows = tokens * group;
        const int64_t rows = head_rows * (unit.head_end - unit.head_begin);
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            Math::pack_query(
                call_.query_dtype, call_.query, query_at(token, head), spec_.key_dim, query_ + row * query_stride_
            );
        });
        if (next_unit) ask_for_queries(*next_unit);
        begin_range(rows);
        std::fill(all_largest_, all_largest_ + rows, -INFINITE);
        std::fill(all_weights_, all_weights_ + rows, NAN);  // of a row without a score that is a number
        const bool one_range = unit.tile_begin / TILES_PER_RANGE == (unit.tile_end - 1) / TILES_PER_RANGE;

        Tile tiles[2];
        locate(unit, unit.tile_begin, tiles[unit.tile_begin & 1]);
        for (int64_t tile = unit.tile_begin; tile < unit.tile_end; ++tile) {
            const Tile& now = tiles[tile & 1];
            Tile& next = tiles[~tile & 1];
            const Unit* owner = tile + 1 < unit.tile_end ? &unit : next_unit;
            if (owner) locate(*owner, owner == &unit ? tile + 1 : owner->tile_begin, next);
            // Rows that see something of this tile: tokens [from, to).
            const int64_t start = tile * TILE;
            int64_t from = plan_.reach.empty() ? std::max<int64_t>(0, start - unit.position) : 0;
            while (seen_to(unit, from) < start) ++from;
            int64_t to = tokens;
            if (spec_.window) to = std::min(to, start + TILE - 1 + spec_.window - unit.position);
            for (int head = unit.head_begin; head < unit.head_end; ++head) {
                const bool last = head + 1 == unit.head_end;
                key_ = rows_of(call_.keys, now.keys, head), value_ = rows_of(call_.values, now.values, head);
                const auto turn_to_next_keys = [&] {
                    if (last && !owner) return;
                    const Tile& then = last ? next : now;
                    const auto rows = rows_of(call_.keys, then.keys, last ? owner->head_begin : head + 1);
                    ahead_.turn_to(rows, then.first, then.count, spec_.key_dim);
                };
                ahead_.turn_to(value_, now.first, now.count, spec_.value_dim);
                pack_keys<Math>(key_, now.first, now.count, spec_.key_dim, keys_, ahead_);
                const bool packed = Of::PACKS_VALUES && (to - from) * group > MOST_DIRECT_ROWS;
                if (packed) {
                    turn_to_next_keys();
                    pack_values<Math>(
                        value_, now.first, now.count, spec_.value_dim, (const Cache*)zeros_, values_, columns_, ahead_
                    );
                }
                const int64_t base = (head - unit.head_begin) * head_rows;
                for (int64_t row = from * group; row < to * group; row += BLOCK_ROWS) {
                    const int block = int(std::min<int64_t>(BLOCK_ROWS, to * group - row));
                    int64_t last_seen = seen_to(unit, (row + block - 1) / group) - start;
                    if (!plan_.reach.empty())
                        for (int64_t token = row / group; token < (row + block - 1) / group; ++token)
                            last_seen = std::max(last_seen, seen_to(unit, token) - start);
                    const int count = int(std::min<int64_t>(now.count, last_seen + 1));
                    if (count <= 0) continue;
                    score(unit, start, base, row, block, count, packed);
                    if (row == from * group && !packed) turn_to_next_keys();
                    weigh(base + row, block, now.first, count, packed);
                }
            }
            const bool range_ends = (tile + 1) % TILES_PER_RANGE == 0 || tile + 1 == unit.tile_end;
            if (range_ends && !one_range) {
                for (int64_t row = 0; row < rows; ++row)
                    join(all_largest_[row], all_weights_[row], all_sums_ + row * columns_, largest_[row],
                         sum(load(weight_lanes_ + row * LANES)), sums_ + row * columns_);
                begin_range(rows);
            }
        }
        if (unit.merge >= 0) return hand_in(unit);
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            if (one_range)
                finish(token, head, largest_[row], sum(load(weight_lanes_ + row * LANES)), sums_ + row * columns_);
            else
                finish(token, head, all_largest_[row], all_weights_[row], all_sums_ + row * columns_);
        });
    }

    // The rows of a unit in the order they are kept in: body(row, token of the batch, query head).
    template <class Body>
    void for_each_row(const Unit& unit, Body&& body) {
        const int group = spec_.group();
        int64_t row = 0;
        for (int head = unit.head_begin; head < unit.head_end; ++head)
            for (int64_t token = unit.row_begin; token < unit.row_end; ++token)
                for (int g = 0; g < group; ++g) body(row++, token, head * group + g);
    }

    // The position of the last key that a row of the unit sees; `token` counts in the unit.
    int64_t seen_to(const Unit& unit, int64_t token) const {
        return plan_.reach.empty() ? unit.position + token : plan_.reach[unit.row_begin + token];
    }

    int64_t query_at(int64_t token, int64_t head) { return token * call_.query_row + head * call_.query_head; }

    // A prompt's queries of one head lie far apart.
    void ask_for_queries(const Unit& unit) {
        const int64_t size = size_of(call_.query_dtype);
        for_each_row(unit, [&](int64_t, int64_t token, int64_t head) {
            const char* query = call_.query + query_at(token, head) * size;
            for (int64_t at = 0; at < spec_.key_dim * size; at += 64) prefetch_far(query + at);
        });
    }

    void begin_range(int64_t rows) {
        std::fill(largest_, largest_ + rows, -INFINITE);
        std::memset(weight_lanes_, 0, rows * LANES * sizeof(float));
        std::memset(sums_, 0, rows * columns_ * sizeof(float));
    }

    // Blocks that no row of the unit may see are never read, whatever they hold.
    void locate(const Unit& unit, int64_t tile, Tile& to) {
        const int64_t start = tile * TILE;
        const int64_t oldest = spec_.window ? std::max<int64_t>(0, unit.position - spec_.window + 1) : 0;
        to.first = int(std::max<int64_t>(0, oldest - start));
        to.count = int(std::min<int64_t>(TILE, unit.last + 1 - start));
        const int begin = to.first / RUN, end = (to.count + RUN - 1) / RUN;
        const int32_t* table = plan_.blocks.data() + plan_.table_begin[unit.request];
        int64_t column = (start + begin * RUN) / plan_.block_size, row = (start + begin * RUN) % plan_.block_size;
        for (int i = begin; i < end; ++i) {
            const int64_t block = table[column];
            to.keys[i] = block * call_.keys.block + row * call_.keys.row;
            to.values[i] = block * call_.values.block + row * call_.values.row;
            if ((row += RUN) == plan_.block_size) row = 0, ++column;
        }
    }

    static Rows<Cache> rows_of(const CacheView& view, const int64_t* runs, int head) {
        Rows<Cache> rows;
        for (int i = 0; i < TILE / RUN; ++i) rows.run[i] = (const Cache*)view.data + runs[i] + head * view.head;
        rows.stride = view.row;
        return rows;
    }

    // A block of rows meets a tile's keys, of which none sees key `count`. `row` counts within the head's rows, which begin
    // at `base`.
    void score(const Unit& unit, int64_t start, int64_t base, int64_t row, int rows, int count, bool many) {
        switch ((count + TILE / 4 - 1) / (TILE / 4)) {
            case 1: return score_quarters<1>(unit, start, base, row, rows, many);
            case 2: return score_quarters<2>(unit, start, base, row, rows, many);
            case 3: return score_quarters<3>(unit, start, base, row, rows, many);
            default: return score_quarters<4>(unit, start, base, row, rows, many);
        }
    }

    template <int QUARTERS>
    void score_quarters(const Unit& unit, int64_t start, int64_t base, int64_t row, int rows, bool many) {
        constexpr int VECTORS = QUARTERS * (TILE / 4 / LANES), ALL_VECTORS = TILE / LANES;
        const int64_t at = base + row;
        const uint32_t* query = query_ + at * query_stride_;
#if MAINSPRING_AMX
        if constexpr (Math::TILES) {
            if (many) {
                shape_.set(rows, rows);
                tile_product<QUARTERS>(query, query_stride_, keys_, TILE, 0, int(query_stride_ / PAIRS), scores_, TILE);
            } else {
                with_rows<MOST_DIRECT_ROWS>(rows, [&](auto n) {
                    score_like_tiles<n.value>(query, query_stride_, keys_, VECTORS, scores_, ahead_);
                });
            }
        } else
#endif
            product<Math, Of::PARTS>(
                rows, query, query_stride_, keys_, TILE, key_dwords_, scores_, TILE, VECTORS, nullptr, ahead_
            );
        // Scores count in powers of two: those of a row are its products times this.
        float unit_of_score = spec_.scale * LOG2_E;
        if (spec_.softcap != 0) {
            cap(rows, VECTORS);
            unit_of_score = 1;
        }
        const bool biased = spec_.bias_columns != 0;
        const float unit_before_bias = unit_of_score;
        int64_t first_head = 0;  // of the query heads of these rows
        if (biased) {
            unit_of_score = 1;
            first_head = (unit.head_begin + base / ((unit.row_end - unit.row_begin) * spec_.group())) * spec_.group();
        }
        float bases[BLOCK_ROWS];  // what a row's scores count from
        int64_t token = int(row) / spec_.group();
        int of_group = int(row) % spec_.group();
        for (int r = 0; r < rows; ++r) {
            float* scores = scores_ + r * TILE;
            const int64_t own = unit.position + token - start, last = seen_to(unit, token) - start;
            if (biased) add_bias(scores, VECTORS, unit_before_bias, first_head + of_group, own);
            if (++of_group == spec_.group()) of_group = 0, ++token;
            const int64_t oldest = spec_.window ? own - spec_.window + 1 : 0;
            if (last < VECTORS * LANES - 1 || oldest > 0) hide(scores, oldest, last);
            F32 most = load(scores);
            for (int j = 1; j < VECTORS; ++j) most = max(load(scores + j * LANES), most);
            const float before = largest_[at + r], now = std::max(before, largest(most) * unit_of_score);
            largest_[at + r] = now;
            bases[r] = now == -INFINITE ? 0 : now;  // 0: the row has seen nothing of its range yet
            keep_[r] = before - bases[r];  // as a logarithm
        }
        for (int r = 0; r < rows; r += LANES) store(keep_ + r, exp2(load(keep_ + r)));
        // A second loop, because finding the largest score of a row is a chain of instructions that wait for each other.
        for (int r = 0; r < rows; ++r) {
            F32 weights[ALL_VECTORS];
            for (int j = 0; j < VECTORS; ++j)
                weights[j] = Math::exp2_of(fma(load(scores_ + r * TILE + j * LANES), set(unit_of_score), set(-bases[r])));
            for (int j = VECTORS; j < ALL_VECTORS; ++j) weights[j] = zero();
            Math::store_weights(weights_ + r * TILE, weights, ALL_VECTORS);
            for (int half = ALL_VECTORS / 2; half; half /= 2)
                for (int j = 0; j < half; ++j) weights[j] = add(weights[j], weights[j + half]);
            float* lanes = weight_lanes_ + (at + r) * LANES;
            store(lanes, fma(load(lanes), set(keep_[r]), weights[0]));
        }
    }

    // Its weights meet the tile's values [first, count).
    void weigh(int64_t at, int rows, int first, int count, bool packed) {
        float* sums = sums_ + at * columns_;
#if MAINSPRING_AMX
        if constexpr (Math::TILES) {
            if (packed) return weigh_by_tiles(rows, first, count, sums);
            return with_rows<MOST_DIRECT_ROWS>(rows, [&](auto n) {
                weigh_like_tiles<n.value>(
                    weights_, value_, first, count, spec_.value_dim, (const Cache*)zeros_, sums, columns_, keep_, ahead_
                );
            });
        }
#endif
        if (packed) {
            constexpr int STEP = Math::PER_STEP;
            const int begin = first / STEP, steps = (count + STEP - 1) / STEP - begin;
            return product<Math, 1>(
                rows, weights_ + begin, TILE, values_ + begin * columns_, columns_, steps, sums, columns_,
                int(columns_ / LANES), keep_, ahead_
            );
        }
        with_rows<Of::PACKS_VALUES ? MOST_DIRECT_ROWS : BLOCK_ROWS>(rows, [&](auto n) {
            weigh_directly<Math, n.value>(
                weights_, value_, first, count, spec_.value_dim, (const Cache*)zeros_, sums, columns_, keep_, ahead_
            );
        });
    }

#if MAINSPRING_AMX
    void weigh_by_tiles(int rows, int first, int count, float* sums) {
        const int begin = first / TILE_K, end = (count + TILE_K - 1) / TILE_K;
        int64_t d = 0;
        for (; d + 64 <= columns_; d += 64)
            tile_product<4>(weights_, TILE, values_ + d, columns_, begin, end, weighted_ + d, columns_);
        if (d < columns_) tile_product<2>(weights_, TILE, values_ + d, columns_, begin, end, weighted_ + d, columns_);
        for (int r = 0; r < rows; ++r)
            for (d = 0; d < columns_; d += LANES) {
                float* sum = sums + r * columns_ + d;
                store(sum, fma(load(sum), set(keep_[r]), load(weighted_ + r * columns_ + d)));
            }
    }
#endif

    void cap(int rows, int vectors) {
        for (int r = 0; r < rows; ++r)
            for (int j = 0; j < vectors; ++j) {
                float* at = scores_ + r * TILE + j * LANES;
                const F32 capped = tanh_precise(mul(load(at), set(spec_.scale / spec_.softcap)));
                store(at, mul(capped, set(spec_.softcap * LOG2_E)));
            }
    }

    // Scores times `unit`, plus what the query head adds to them; the query lies at place `own` of the tile or behind it.
    void add_bias(float* scores, int vectors, float unit, int64_t head, int64_t own) {
        const float* bias = spec_.bias + head * spec_.bias_columns;
        if (spec_.bias_columns == 1) {
            alignas(64) static constexpr auto PLACES = [] {
                std::array<float, TILE> places{};
                for (int i = 0; i < TILE; ++i) places[i] = float(i);
                return places;
            }();
            const F32 slope = set(-bias[0] * LOG2_E), query = set(float(own));
            for (int j = 0; j < vectors * LANES; j += LANES) {
                const F32 distance = sub(query, load(PLACES.data() + j));
                store(scores + j, fma(slope, distance, mul(load(scores + j), set(unit))));
            }
            return;
        }
        for (int j = 0; j < vectors * LANES; ++j) {
            const int64_t distance = std::min(std::max<int64_t>(own - j, 0), spec_.bias_columns - 1);
            scores[j] = std::fma(scores[j], unit, bias[distance] * LOG2_E);
        }
    }

    // Minus infinity for the keys that a row does not see: all but [oldest, last].
    static void hide(float* scores, int64_t oldest, int64_t last) {
        const I32 from = iset(int(std::max<int64_t>(oldest, 0))), to = iset(int(std::min<int64_t>(last, TILE)));
        for (int j = 0; j < TILE / LANES; ++j) {
            const I32 place = iadd(ramp(), iset(j * LANES));
            F32 s = where_less(to, place, set(-INFINITE), load(scores + j * LANES));
            store(scores + j * LANES, where_less(place, from, set(-INFINITE), s));
        }
    }

    // Adds a range's sums to those of the ranges before it. A range of which a row sees nothing changes nothing.
    void join(float& largest_so_far, float& weights, float* sums, float largest, float more_weights, const float* more) {
        if (largest == -INFINITE) {  // no key, or scores that are no numbers
            if (more_weights != more_weights) largest_so_far = weights = more_weights;
            return;
        }
        if (largest_so_far == -INFINITE) {
            largest_so_far = largest, weights = more_weights;
            std::memcpy(sums, more, columns_ * sizeof(float));
            return;
        }
        const float now = std::max(largest_so_far, largest);
        const float keep = exp2_of(largest_so_far - now), take = exp2_of(largest - now);
        largest_so_far = now;
        weights = std::fma(weights, keep, more_weights * take);
        for (int64_t d = 0; d < columns_; d += LANES)
            store(sums + d, fma(load(sums + d), set(keep), mul(load(more + d), set(take))));
    }

    void hand_in(const Unit& unit) {
        Merge& merge = plan_.merges[unit.merge];
        const int group = spec_.group();
        const auto part_of = [&](int64_t part, int64_t token, int64_t kv_head, int64_t of_group) {
            const int64_t row = ((kv_head - merge.head_begin) * merge.tokens() + token - merge.row_begin) * group + of_group;
            return plan_.parts.data() + merge.at + (part * merge.rows(group) + row) * row_floats_;
        };
        for_each_row(unit, [&](int64_t row, int64_t token, int64_t head) {
            float* to = part_of(unit.part, token, head / group, head % group);
            to[0] = largest_[row], to[1] = sum(load(weight_lanes_ + row * LANES));
            std::memcpy(to + 2, sums_ + row * columns_, columns_ * sizeof(float));
        });
        if (merge.open.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        merge.open.store(merge.units, std::memory_order_relaxed);  // for the next layer
        for (int64_t head = merge.head_begin * group; head < merge.head_end * group; ++head)
            for (int64_t token = merge.row_begin; token < merge.row_end; ++token) {
                float most = -INFINITE, weights = NAN;
                for (int p = 0; p < merge.parts; ++p) {
                    const float* from = part_of(p, token, head / group, head % group);
                    join(most, weights, all_sums_, from[0], from[1], from + 2);
                }
                finish(token, head, most, weights, all_sums_);
            }
    }

    void finish(int64_t token, int64_t head, float most, float weights, float* sums) {
        float keep = 1;
        if (call_.sinks) {
            const float sink = call_.sinks[head] * LOG2_E, now = std::max(most, sink);
            keep = exp2_of(most - now);
            weights = std::fma(weights, keep, exp2_of(sink - now));
        }
        Of::natural_order(sums, columns_);
        const F32 factor = set(keep / weights);
        const int64_t out = (token * spec_.q_heads + head) * spec_.value_dim;
        with_dtype(call_.query_dtype, [&](auto t) {
            for (int64_t d = 0; d < spec_.value_dim; d += LANES)  // + 0: a sum that underflowed to -0 is 0
                store_up_to((decltype(t)*)call_.out + out + d, fma(load(sums + d), factor, zero()), spec_.value_dim - d);
        });
    }

    const AttentionCall& call_;
    Plan& plan_;
    const Spec& spec_;
    int64_t key_dwords_, query_stride_, columns_, row_floats_, longest_;
    Ahead ahead_;
#if MAINSPRING_AMX
    TileShape shape_;
#endif
    Rows<Cache> key_, value_;
    float keep_[up_to_multiple(BLOCK_ROWS, LANES)] = {};  // what the sums so far of each row of a block are multiplied with
    uint32_t *keys_, *values_, *query_, *weights_;
    float *scores_, *weighted_, *sums_, *all_sums_, *weight_lanes_, *largest_, *all_largest_, *all_weights_, *zeros_;
};

template <class Math, class Cache>
inline void attend_with(const AttentionCall& call, int threads) {
    const Attention<Math, Cache> attention(call);
    const int wanted = int(std::min<int64_t>(threads, call.plan->units.size()));
    run_team(wanted, [&](Team& team, int rank) {
        Attention<Math, Cache> mine(attention);
        mine.run(team, rank);
    });
}

inline void attend(const AttentionCall& call, int threads) {
#if MAINSPRING_BF16_ATTENTION
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::bf16)
        return attend_with<Bf16Math, bf16>(call, threads);
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::fp8)
        return attend_with<Bf16Math, fp8>(call, threads);
#endif
    switch (call.cache_dtype) {
        case Dtype::fp32: return attend_with<Fp32Math, float>(call, threads);
        case Dtype::bf16: return attend_with<Fp32Math, bf16>(call, threads);
        case Dtype::fp16: return attend_with<Fp32Math, fp16>(call, threads);
        case Dtype::fp8: return attend_with<Fp32Math, fp8>(call, threads);
    }
}

}  // namespace mainspring
