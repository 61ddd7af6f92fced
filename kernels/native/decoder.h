// The whole stack of decoder layers, from embeddings to logits, by one team of threads that stays together.
//
// A layer is what core/model/run/stack.py says it is; here it is plain numbers. Phases that need each other's results meet at a
// barrier. What each adds to the residual stream is added in fp32 and rounded once.
//
// Clockwork: each row goes through the same operations whatever the other rows are; see linear.h and attention.h.
#pragma once

#include <chrono>

#include "attention.h"
#include "experts.h"
#include "mixer.h"

namespace mainspring {

// Made of 64-bit words, as decoder.py writes them.
struct CacheOf {
    CacheView keys, values;
    Dtype dtype;
    int64_t appends;  // 0: the keys and values are an earlier layer's
};
struct LayerOf {
    NormOf input_norm, query_norm, key_norm, attention_norm, mlp_norm, output_norm;
    LinearOf qkv, output, gate_up, down;  // qkv of a recurrent mixer: its first product. gate_up.N is 0: no MLP
    int64_t q_size, k_size, v_size, key_dim, value_dim;  // q_size with the gates
    int64_t gates;  // behind each head of the query comes the gate of its output
    int64_t rotary;  // which table of angles; -1: none
    int64_t interleaved;
    const float* sinks;
    Activation activation;
    int64_t gated;  // gate_up is interleaved
    double multiplier;
    CacheOf cache;
    MixerOf mixer;
    MixtureOf mixture;
};
struct DecoderOf {
    Dtype dtype;
    int64_t hidden, num_layers;
    NormOf norm;
    LinearOf head;
};

// What layers of one kind share in a step.
struct KindOfLayer {
    Plan* plan;
    const int32_t *blocks, *rows;  // of each token's place in the cache
};
struct AnglesOf {
    const float* table;  // [positions, rotary_dim]: cosines, then sines
    int64_t rotary_dim;
};
struct StepOf {
    int64_t rows;
    void* hidden;  // [rows, hidden]: embeddings; is overwritten
    const int64_t* positions;  // [rows]
    int64_t num_wanted;
    const int64_t* wanted;  // rows
    void* logits;  // [num_wanted, vocab]
    int64_t threads;
    const KindOfLayer* kinds;
    const int64_t* kind_of_layer;  // of each layer with attention
    const AnglesOf* angles;
    Sequences sequences;  // of recurrent mixers
};

struct RepeatOf;

enum Phase { NORM, QKV, HEADS, ATTENTION, MIXER, OUTPUT, GATE_UP, DOWN, EXPERTS, HEAD, CHOICE, PHASES };

void attend_in_team(const AttentionCall& call, Team& team, int rank);

class Decoder {
  public:
    Decoder(const DecoderOf& of, const LayerOf* layers) : of_(of), layers_(layers, layers + of.num_layers) {}
    void bind(const CacheOf* caches) {
        for (auto& layer : layers_)
            if (layer.mixer.form == Form::attention) layer.cache = *caches++;
    }
    // Of each recurrent mixer: state of the convolution, state of the scan.
    void bind_states(float* const* states) {
        for (auto& layer : layers_)
            if (layer.mixer.form != Form::attention) layer.mixer.conv_state = *states++, layer.mixer.state = *states++;
    }
    void run(const StepOf& step);
    int64_t repeat(const RepeatOf& of);  // repeat.h
    int64_t nanoseconds[PHASES] = {};  // spent in each phase since the decoder was made

  private:
    struct Buffer {  // grows, never shrinks; 64-byte aligned
        char* data = nullptr;
        size_t size = 0;
        ~Buffer() { std::free(data); }
        void reserve(size_t bytes) {
            if (bytes <= size) return;
            std::free(data);
            size = (bytes + 4095) / 4096 * 4096;
            data = (char*)std::aligned_alloc(4096, size);
        }
    };
    template <class T>
    friend class Forward;
    template <class T>
    friend class Repeated;
    void reserve(const StepOf& step);

    DecoderOf of_;
    std::vector<LayerOf> layers_;
    // What is never needed at once shares one.
    Buffer rows_, own_, joined_, activated_, added_, wanted_, mixed_, mixture_, workspace_;
    Buffer hidden_, logits_;  // of repeated steps
};

// A step in the eyes of one member of the team.
template <class T>
class Forward {
  public:
    // wanted: the plan of attention for the rows of which there are to be logits, if the last layer is to leave the
    // others out once their keys and values are in the cache; or null.
    Forward(Decoder& decoder, const StepOf& step, Plan* wanted, Team& team, int rank)
        : d_(decoder), step_(step), wanted_(wanted), team_(team), rank_(rank), width_(decoder.of_.hidden),
          hidden_((T*)step.hidden), share_(0, 0, 1) {
        turn_to(step.rows);
        if (rank_ == 0) began_ = now();
    }

    // Rows of which every member normalises all for itself, rather than waits for the others.
    static constexpr int64_t FEW = 8;
    static size_t own_bytes(int64_t width) { return (FEW * width * sizeof(T) + 4095) / 4096 * 4096; }

    void run() {
        const T* x = nullptr;
        const int64_t* kind_of_layer = step_.kind_of_layer;
        for (size_t i = 0; i < d_.layers_.size(); ++i) {
            const LayerOf& layer = d_.layers_[i];
            x = normed(layer.input_norm);
            product(layer.qkv, x, width_, joined(), layer.qkv.N, nullptr), done(QKV);
            if (layer.mixer.form == Form::attention) {
                const KindOfLayer& kind = step_.kinds[*kind_of_layer++];
                heads(layer, kind), done(HEADS);
                const bool last = wanted_ && i + 1 == d_.layers_.size();
                if (last) keep_wanted(layer), done(HEADS);
                attend(layer, last ? wanted_ : kind.plan), done(ATTENTION);
                if (layer.gates) gate(layer, !last), done(ATTENTION);
            } else {
                mix(layer), done(MIXER);
            }
            adds(layer.output, layer.attention_norm, layer.multiplier, attended(), layer.output.K, OUTPUT);
            if (!layer.gate_up.N && !layer.mixture.router.N) continue;
            x = normed(layer.mlp_norm);
            if (layer.gate_up.N) mlp(layer, x), done(GATE_UP);
            if (layer.mixture.router.N)
                mixture(layer, x);
            else
                adds(layer.down, layer.output_norm, layer.multiplier, activated(layer), layer.down.K, DOWN);
        }
        finish();
    }

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

  private:
    // The end of a phase: what was written may be read.
    void done(Phase phase) {
        team_.barrier();
        count(phase);
    }
    void count(Phase phase) {
        if (rank_) return;
        const int64_t at = now();
        d_.nanoseconds[phase] += at - began_;
        began_ = at;
    }

    T* hidden() const { return hidden_; }
    T* joined() const { return (T*)d_.joined_.data; }
    T* attended() const { return (T*)d_.rows_.data; }
    T* activated(const LayerOf& layer) const { return layer.gated ? joined() : (T*)d_.activated_.data; }
    T* added() const { return (T*)d_.added_.data; }

    void turn_to(int64_t rows) {
        rows_ = rows, own_ = rows <= FEW && team_.size > 1, share_ = Share(rows, rank_, team_.size);
    }

    // From here on there are only the rows that are wanted: `hidden` of them, and behind it their queries.
    void keep_wanted(const LayerOf& layer) {
        turn_to(step_.num_wanted);
        T* kept = (T*)d_.wanted_.data;
        for (int64_t i = share_.begin; i < share_.end; ++i) {
            const int64_t row = step_.wanted[i];
            std::memcpy(kept + i * width_, hidden_ + row * width_, width_ * sizeof(T));
            std::memcpy(queries(layer) + i * layer.q_size, joined() + row * layer.qkv.N, layer.q_size * sizeof(T));
        }
        hidden_ = kept;
    }
    T* queries(const LayerOf& layer) const { return (T*)d_.wanted_.data + step_.num_wanted * width_; }

    void norm_row(const NormOf& norm, const T* from, int64_t n, T* to) const {
        with_dtype(norm.dtype, [&](auto w) {
            rms_norm_row(from, (const decltype(w)*)norm.weight, n, float(norm.eps), float(norm.offset), to);
        });
    }

    // The residual stream, normalised, ready to be read.
    const T* normed(const NormOf& norm) {
        if (!norm.weight) return hidden();
        T* to = (T*)(own_ ? d_.own_.data + rank_ * own_bytes(width_) : d_.rows_.data);
        for (int64_t row = own_ ? 0 : share_.begin; row < (own_ ? rows_ : share_.end); ++row)
            norm_row(norm, hidden() + row * width_, width_, to + row * width_);
        if (!own_) team_.barrier();
        count(NORM);
        return to;
    }

    void product(const LinearOf& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride, const T* residual) {
        Product p = {linear.weight(), d_.of_.dtype, x, x_stride, int(rows_), y, y_stride, linear.bias, residual};
        multiply(p, d_.workspace_.data, team_, rank_);
    }

    // Query, key and value of each token: norms, rotation, into the cache.
    void heads(const LayerOf& layer, const KindOfLayer& kind) {
        const int64_t q_dim = layer.key_dim * (layer.gates ? 2 : 1);  // from a query's head to the next
        const int64_t q_heads = layer.q_size / q_dim, kv_heads = layer.k_size / layer.key_dim;
        const bool each_q = layer.query_norm.n == layer.key_dim, each_k = layer.key_norm.n == layer.key_dim;
        const bool whole_rows = (layer.query_norm.weight && !each_q) || (layer.key_norm.weight && !each_k);
        // Few tokens are shared out head by head: the heads of the query, then those of key and value.
        const int64_t pieces = whole_rows || rows_ >= 4 * team_.size ? 1 : q_heads + kv_heads;
        const Share share(rows_ * pieces, rank_, team_.size);
        const AnglesOf* angles = layer.rotary < 0 ? nullptr : &step_.angles[layer.rotary];
        for (int64_t i = share.begin; i < share.end; ++i) {
            const int64_t token = i / pieces, first = pieces == 1 ? 0 : i % pieces;
            const int64_t end = pieces == 1 ? q_heads + kv_heads : first + 1;
            T* row = joined() + token * layer.qkv.N;
            if (layer.query_norm.weight && !each_q) norm_row(layer.query_norm, row, layer.q_size, row);
            if (layer.key_norm.weight && !each_k) norm_row(layer.key_norm, row + layer.q_size, layer.k_size, row + layer.q_size);
            const float* cos_sin = angles ? angles->table + step_.positions[token] * angles->rotary_dim : nullptr;
            const int64_t half = angles ? angles->rotary_dim / 2 : 0;
            for (int64_t head = first; head < end; ++head) {
                T* x = row + (head < q_heads ? head * q_dim : layer.q_size + (head - q_heads) * layer.key_dim);
                const NormOf& norm = head < q_heads ? layer.query_norm : layer.key_norm;
                if (norm.weight && (head < q_heads ? each_q : each_k)) norm_row(norm, x, layer.key_dim, x);
                if (cos_sin) {
                    if (layer.interleaved)
                        rotate_pairs(x, cos_sin, cos_sin + half, half);
                    else
                        rotate_halves(x, cos_sin, cos_sin + half, half);
                }
                if (head < q_heads || !layer.cache.appends) continue;
                const T* value = row + layer.q_size + layer.k_size + (head - q_heads) * layer.value_dim;
                into_cache(layer, kind, token, head - q_heads, x, value);
            }
        }
    }

    void into_cache(const LayerOf& layer, const KindOfLayer& kind, int64_t token, int64_t head, const T* key, const T* value) {
        const int64_t block = kind.blocks[token], row = kind.rows[token];
        with_cache_dtype(layer.cache.dtype, [&](auto c) {
            using C = decltype(c);
            const auto put = [&](const CacheView& cache, const T* from, int64_t dim) {
                C* to = (C*)cache.data + block * cache.block + row * cache.row + head * cache.head;
                if constexpr (std::is_same_v<T, C>)
                    std::memcpy(to, from, dim * sizeof(T));
                else
                    for (int64_t i = 0; i < dim; i += LANES) store_up_to(to + i, load_up_to(from + i, dim - i), dim - i);
            };
            put(layer.cache.keys, key, layer.key_dim);
            put(layer.cache.values, value, layer.value_dim);
        });
    }

    void attend(const LayerOf& layer, Plan* plan) {
        const bool all = plan != wanted_;
        AttentionCall call;
        call.plan = plan;
        call.query = (const char*)(all ? joined() : queries(layer)), call.query_row = all ? layer.qkv.N : layer.q_size;
        call.query_head = layer.key_dim * (layer.gates ? 2 : 1);
        call.query_dtype = d_.of_.dtype, call.cache_dtype = layer.cache.dtype;
        call.keys = layer.cache.keys, call.values = layer.cache.values;
        call.sinks = layer.sinks;
        call.out = (char*)attended(), call.out_rows = rows_;
        attend_in_team(call, team_, rank_);
    }

    // What was attended to is multiplied by the sigmoid of its gate.
    void gate(const LayerOf& layer, bool all) {
        const int64_t dim = layer.key_dim, heads = layer.q_size / (2 * dim);
        const T* from = (all ? joined() : queries(layer)) + dim;
        const int64_t from_row = all ? layer.qkv.N : layer.q_size;
        const Share share(rows_ * heads, rank_, team_.size);
        for (int64_t i = share.begin; i < share.end; ++i) {
            const T* g = from + i / heads * from_row + i % heads * 2 * dim;
            T* to = attended() + i * dim;
            for (int64_t j = 0; j < dim; j += LANES)
                store_up_to(to + j, mul(load_up_to(to + j, dim - j), sigmoid(load_up_to(g + j, dim - j))), dim - j);
        }
    }

    void mix(const LayerOf& layer) {
        mix_in_team(
            {layer.mixer, step_.sequences, d_.of_.dtype, rows_, joined(), layer.qkv.N, attended(), (float*)d_.mixed_.data},
            team_, rank_
        );
    }

    void mlp(const LayerOf& layer, const T* x) {
        Product p = {layer.gate_up.weight(), d_.of_.dtype, x, width_, int(rows_)};
        p.bias = layer.gate_up.bias, p.activation = layer.activation, p.gated = layer.gated;
        const int64_t inner = layer.gate_up.N / 2;
        p.y = joined(), p.y_stride = p.gated ? inner : 2 * inner;
        multiply(p, d_.workspace_.data, team_, rank_);
        if (p.gated) return;
        team_.barrier();
        for (int64_t row = share_.begin; row < share_.end; ++row) {
            const T* gate = joined() + row * 2 * inner;
            T* to = activated(layer) + row * inner;
            switch (layer.activation) {
                case Activation::silu: act_and_mul_row<Activation::silu>(gate, gate + inner, inner, to); break;
                case Activation::gelu: act_and_mul_row<Activation::gelu>(gate, gate + inner, inner, to); break;
                default: act_and_mul_row<Activation::gelu_tanh>(gate, gate + inner, inner, to);
            }
        }
    }

    void mixture(const LayerOf& layer, const T* x) {
        const MixtureOf& m = layer.mixture;
        const MixtureMemory memory(m, d_.of_.dtype, rows_, width_, team_.size, d_.mixture_.data);
        const bool straight = adds_straight(layer.output_norm, layer.multiplier), shared = layer.gate_up.N;
        if (shared) product(layer.down, activated(layer), layer.down.K, added(), width_, nullptr), done(DOWN);
        std::vector<float> gates;
        for (int64_t row = share_.begin; shared && row < share_.end; ++row)
            gates.push_back(m.shared_gate ? shared_gate(x + row * width_, m.shared_gate, width_) : 1);
        mixture_in_team(
            m, d_.of_.dtype, layer.activation, x, width_, rows_, memory, d_.workspace_.data, team_, rank_,
            [&](int64_t row, int64_t d, F32 sums) {
                const int64_t at = row * width_ + d, n = width_ - d;
                T *residual = hidden() + at, *more = shared || !straight ? added() + at : nullptr;
                if (shared) sums = fma(set(gates[row - share_.begin]), load_up_to(more, n), sums);
                store_up_to(straight ? residual : more, straight ? add(sums, load_up_to(residual, n)) : sums, n);
            }
        );
        done(EXPERTS);
        if (!straight) add_added(layer.output_norm, layer.multiplier);
    }

    static bool adds_straight(const NormOf& norm, double multiplier) { return !norm.weight && multiplier == 1; }

    // hidden += multiplier * norm(x * weight)
    void adds(const LinearOf& linear, const NormOf& norm, double multiplier, const T* x, int64_t x_stride, Phase phase) {
        const bool straight = adds_straight(norm, multiplier);
        product(linear, x, x_stride, straight ? hidden() : added(), width_, straight ? hidden() : nullptr);
        done(phase);
        if (!straight) add_added(norm, multiplier);
    }

    // hidden += multiplier * norm(added)
    void add_added(const NormOf& norm, double multiplier) {
        for (int64_t row = share_.begin; row < share_.end; ++row) {
            T *from = added() + row * width_, *to = hidden() + row * width_;
            if (norm.weight) norm_row(norm, from, width_, from);
            for (int64_t i = 0; i < width_; i += LANES) {
                const int64_t n = width_ - i;
                store_up_to(to + i, fma(load_up_to(from + i, n), set(float(multiplier)), load_up_to(to + i, n)), n);
            }
        }
        done(NORM);
    }

    void finish() {
        const NormOf& norm = d_.of_.norm;
        const LinearOf& head = d_.of_.head;
        T* to = (T*)d_.rows_.data;
        const Share share(step_.num_wanted, rank_, team_.size);
        for (int64_t i = share.begin; i < share.end; ++i)
            norm_row(norm, hidden() + (wanted_ ? i : step_.wanted[i]) * width_, width_, to + i * width_);
        done(NORM);
        Product p = {head.weight(), d_.of_.dtype, to, width_, int(step_.num_wanted), step_.logits, head.N, head.bias};
        multiply(p, d_.workspace_.data, team_, rank_);
        count(HEAD);
    }

    Decoder& d_;
    const StepOf& step_;
    Plan* const wanted_;
    Team& team_;
    const int rank_;
    const int64_t width_;
    T* hidden_;
    int64_t rows_;
    bool own_;  // each member normalises all rows
    Share share_;  // of the rows
    int64_t began_ = 0;
};

// Memory for a step of so many rows.
inline void Decoder::reserve(const StepOf& step) {
    const int threads = int(step.threads);
    int64_t joined = 0, attended = 0, activated = 0, added = 0, mixed = 0;
    size_t workspace = workspace_bytes(of_.head.weight(), int(step.num_wanted), threads), mixture = 0;
    for (const auto& layer : layers_) {
        joined = std::max({joined, layer.qkv.N, layer.gated ? layer.down.K : layer.gate_up.N});
        attended = std::max(attended, layer.output.K);
        if (!layer.gated) activated = std::max(activated, layer.down.K);
        if (layer.attention_norm.weight || layer.output_norm.weight || layer.multiplier != 1) added = of_.hidden;
        if (layer.mixer.form != Form::attention) mixed = std::max(mixed, layer.mixer.numbers());
        std::vector<const LinearOf*> linears = {&layer.qkv, &layer.output, &layer.gate_up, &layer.down};
        if (const MixtureOf& m = layer.mixture; m.router.N) {
            linears.insert(linears.end(), {&m.router, &m.gate_up(m.widest_gate_up), &m.down(m.widest_down)});
            mixture = std::max(mixture, MixtureMemory(m, of_.dtype, step.rows, of_.hidden, threads, nullptr).bytes);
            if (layer.gate_up.N) added = of_.hidden;
        }
        for (const LinearOf* linear : linears)
            if (linear->N) workspace = std::max(workspace, workspace_bytes(linear->weight(), int(step.rows), threads));
    }
    const int64_t size = size_of(of_.dtype), bytes = step.rows * size;
    rows_.reserve(std::max({bytes * attended, bytes * of_.hidden, step.num_wanted * size * of_.hidden}));
    joined_.reserve(bytes * joined), activated_.reserve(bytes * activated), added_.reserve(bytes * added);
    mixed_.reserve(step.rows * mixed * sizeof(float));
    mixture_.reserve(mixture), workspace_.reserve(workspace);
    with_dtype(of_.dtype, [&](auto t) { own_.reserve(threads * Forward<decltype(t)>::own_bytes(of_.hidden)); });
}

inline void Decoder::run(const StepOf& step) {
    reserve(step);
    std::unique_ptr<Plan> wanted;
    const LayerOf& last = layers_.back();
    if (2 * step.num_wanted <= step.rows && last.mixer.form == Form::attention) {
        wanted_.reserve(step.num_wanted * size_of(of_.dtype) * (of_.hidden + last.q_size));
        const auto before = std::count_if(layers_.begin(), layers_.end() - 1, [](const LayerOf& layer) {
            return layer.mixer.form == Form::attention;
        });
        const Plan& plan = *step.kinds[step.kind_of_layer[before]].plan;
        wanted = plan_rows(plan, step.num_wanted, step.wanted, int(step.threads));
    }
    with_dtype(of_.dtype, [&](auto t) {
        run_team(int(step.threads), [&](Team& team, int rank) {
            Forward<decltype(t)>(*this, step, wanted.get(), team, rank).run();
        });
    });
}

}  // namespace mainspring
