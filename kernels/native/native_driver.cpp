// Every kernel on small and odd shapes, for the sanitizers (tests/test_native_build.py builds it with each of them). Arrays
// have exactly the size they must have, so that a read or write past an end is seen. Exits with 0 where all is finite, and
// prints a digest of all outputs: the same for instruction sets that must give the same bits (AVX2 and NEON).
#include <cstdio>
#include <cstdlib>

#include "native.cpp"

extern "C" {
void* mainspring_decoder_new(const int64_t*);
void mainspring_decoder_forget(void*, const void*);
void mainspring_decoder_bind(void*, const int64_t*);
void mainspring_decoder_run(void*, const int64_t*);
int64_t mainspring_decoder_repeat(void*, const int64_t*);
int64_t mainspring_weight_bytes(const int64_t*);
void mainspring_weight_pack(const int64_t*);
void mainspring_weight_quantize(const int64_t*);
void mainspring_weight_rows(const int64_t*);
}

namespace {

uint64_t digest = 14695981039346656037u;  // FNV-1a
uint32_t state = 1;
float draw() {
    state = state * 1664525 + 1013904223;
    return float(int32_t(state)) * 0x1p-31f;
}

// n numbers of a dtype, up to `size`, on the heap.
struct Array {
    Dtype dtype;
    int64_t n;
    std::unique_ptr<char[]> bytes;
    Array(Dtype dtype, int64_t n, float size = 1) : dtype(dtype), n(n), bytes(new char[n * size_of(dtype)]) {
        for (int64_t i = 0; i < n; ++i) store_as(dtype, bytes.get(), i, set(size * draw()), 1);
    }
    int64_t address() const { return (int64_t)bytes.get(); }
    void must_be_finite(const char* what) const {
        for (int64_t i = 0; i < n * size_of(dtype); ++i) digest = (digest ^ uint8_t(bytes[i])) * 1099511628211u;
        with_cache_dtype(dtype, [&](auto t) {
            for (int64_t i = 0; i < n; ++i)
                if (!std::isfinite(first_lane(load_n((decltype(t)*)bytes.get() + i, 1)))) {
                    std::printf("%s: not finite at %ld\n", what, (long)i);
                    std::exit(1);
                }
        });
    }
};

int64_t words(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

template <class T>
int64_t address(const std::vector<T>& x) {
    return (int64_t)x.data();
}

void attention(Dtype query_dtype, Dtype cache_dtype, int kv_heads, int group, int key_dim, int value_dim, int window, int threads, int bias_columns = 0, bool reaches = false) {
    const int block_size = 8, heads = kv_heads * group;
    const std::vector<int> lengths = {1, 9, 600, 70, 130}, rows = {1, 1, 1, 33, 130};
    std::vector<int32_t> qo = {0}, kv = {0}, table, last;
    for (size_t i = 0; i < lengths.size(); ++i) {
        const int blocks = (lengths[i] + block_size - 1) / block_size;
        for (int b = 0; b < blocks; ++b) table.push_back(kv.back() + blocks - 1 - b);
        qo.push_back(qo.back() + rows[i]), kv.push_back(kv.back() + blocks), last.push_back((lengths[i] - 1) % block_size + 1);
    }
    std::vector<int32_t> reach;  // of the rows: all keys, or their own
    for (size_t i = 0; i < lengths.size(); ++i)
        for (int row = 0; row < rows[i]; ++row) reach.push_back(row % 3 ? lengths[i] - rows[i] + row : lengths[i] - 1);
    const int64_t out_rows = qo.back() + 3;
    const Array query(query_dtype, out_rows * heads * key_dim), out(query_dtype, out_rows * heads * value_dim);
    const int64_t row = kv_heads * key_dim, value_row = kv_heads * value_dim;
    const Array keys(cache_dtype, kv.back() * block_size * row), values(cache_dtype, kv.back() * block_size * value_row);
    const std::vector<float> sinks(heads, 0.5f), bias(heads * std::max(1, bias_columns), 0.1f);
    const int64_t plan_words[] = {
        heads, kv_heads, key_dim, value_dim, window, words(0.2), words(window ? 5.0 : 0.0), (int64_t)lengths.size(),
        address(qo), address(kv), address(table), address(last), block_size, threads, bias_columns ? address(bias) : 0, bias_columns, reaches ? address(reach) : 0,
    };
    void* plan = mainspring_attention_plan(plan_words);
    const int64_t call[] = {
        (int64_t)plan, query.address(), heads * key_dim, key_dim, (int64_t)query_dtype, (int64_t)cache_dtype,
        keys.address(), block_size * row, row, key_dim, values.address(), block_size * value_row, value_row, value_dim,
        address(sinks), out.address(), out_rows, threads,
    };
    for (int layer = 0; layer < 2; ++layer) mainspring_attention(call);
    mainspring_attention_forget(plan);
    out.must_be_finite("attention");
}

void elementwise(Dtype dtype, int64_t rows, int64_t width, int threads) {
    const Array x(dtype, rows * width), more(dtype, rows * width), weight(dtype, width), out(dtype, rows * width);
    const int64_t norm[] = {
        x.address(), rows, 1, width, 0, (int64_t)dtype, weight.address(), (int64_t)dtype, width, words(1e-6), words(1), out.address(), threads,
    };
    mainspring_rms_norm(norm);
    out.must_be_finite("rms_norm");
    const int64_t added[] = {
        x.address(), more.address(), (int64_t)dtype, weight.address(), (int64_t)dtype, rows, width, words(1e-6), words(0), threads,
    };
    mainspring_add_rms_norm(added);
    for (int64_t activation = 0; activation < 4; ++activation) {
        const Array half(dtype, rows * (width / 2));
        const int64_t act[] = {x.address(), width, (int64_t)dtype, activation, rows, width / 2, half.address(), threads};
        mainspring_act_and_mul(act);
        half.must_be_finite("act_and_mul");
    }
}

void tokens(Dtype dtype, Dtype cache_dtype, int64_t dim, int64_t rotary_dim, int64_t interleaved, int threads) {
    const int64_t count = 40, heads = 3, block_size = 8;
    const Array query(dtype, count * heads * dim), key(dtype, count * dim), value(dtype, count * dim);
    const Array angles(Dtype::fp32, count * rotary_dim), keys(cache_dtype, count * dim), values(cache_dtype, count * dim);
    std::vector<int32_t> blocks, rows;
    for (int64_t i = 0; i < count; ++i) blocks.push_back(i / block_size), rows.push_back(i % block_size);
    const int64_t call[] = {
        count, (int64_t)dtype, query.address(), heads, heads * dim, dim, key.address(), 1, dim, dim, value.address(), 1, dim,
        dim, dim, dim, angles.address(), rotary_dim, rotary_dim, interleaved, keys.address(), block_size * dim, dim, dim,
        values.address(), block_size * dim, dim, dim, (int64_t)cache_dtype, address(blocks), address(rows), threads,
    };
    mainspring_rotate_and_append(call);
    keys.must_be_finite("append");
}

void sampling(Dtype dtype, int64_t rows, int64_t vocab, int threads) {
    const Array logits(dtype, rows * vocab);
    const int64_t k = std::min<int64_t>(vocab, 5), words = (vocab + 31) / 32;
    std::vector<int64_t> seeds(rows, -5), places(rows, 7), chosen(rows, -1), top_k(rows, 3), index;
    std::vector<float> temperature(rows, 0.7f), top_p(rows, 0.5f), min_p(rows, 0.01f), penalties(rows * 3, 1.2f);
    std::vector<float> logprobs(rows * (1 + k));
    std::vector<int32_t> bits(rows * words, 0x55555555), counts(rows * vocab), ids(rows * (1 + k)), ranks(rows);
    for (int64_t i = 0; i < rows; ++i) index.push_back(rows - 1 - i);
    for (size_t i = 0; i < counts.size(); i += 7) counts[i] = int32_t(i % 3) + (i % 2 << 30);
    const std::unique_ptr<bool[]> sampled(new bool[rows]());
    for (int64_t i = 0; i < rows; i += 2) sampled[i] = true;
    std::vector<Scoring> scored;
    for (int64_t i = 0; i < rows; ++i)
        scored.push_back({i, k, &ids[i * (1 + k)], &logprobs[i * (1 + k)], &ranks[i]});
    const auto must_be_tokens = [&] {
        for (int64_t token : chosen)
            if (token < 0 || token >= vocab) std::printf("choose: %ld of %ld\n", (long)token, (long)vocab), std::exit(1);
    };
    for (const int64_t limited : {0, 1})
        for (const int64_t amended : {int64_t(0), rows}) {
            const int64_t choice[] = {
                logits.address(), (int64_t)dtype, rows, vocab, vocab, (int64_t)sampled.get(), address(seeds),
                address(places), address(temperature), limited * address(top_k), limited * address(top_p),
                limited * address(min_p), amended, address(index), address(bits), amended, address(index),
                address(counts), address(index), address(penalties), logits.address(), (int64_t)dtype, vocab, amended,
                address(scored), address(chosen), threads,
            };
            mainspring_choose(choice);
            must_be_tokens();
        }
    const int64_t given[] = {
        logits.address(), (int64_t)dtype, rows, vocab, vocab, address(chosen), address(scored), threads,
    };
    mainspring_score(given);
    for (int32_t rank : ranks)
        if (rank < 1 || rank > vocab) std::printf("score: rank %d of %ld\n", rank, (long)vocab), std::exit(1);
}

// ---------------------------------------------------------------- a whole model

// A linear layer, packed.
struct PackedLinear {
    Array bias;
    std::unique_ptr<char[]> bytes;
    LinearOf of;
    PackedLinear(WeightKind kind, Dtype dtype, int64_t N, int64_t K, bool gated = false) : bias(dtype, N) {
        const bool quantized = kind == WeightKind::int8 || kind == WeightKind::int4;
        int64_t words[] = {int64_t(kind), 0, N, K, quantized ? 32 : 0, gated, 0, int64_t(dtype), 1};
        bytes.reset(new char[mainspring_weight_bytes(words)]);
        const Array plain(dtype, N * K, 0.25f);
        words[1] = (int64_t)bytes.get(), words[6] = plain.address();
        (quantized ? mainspring_weight_quantize : mainspring_weight_pack)(words);
        of = {kind, bytes.get(), N, K, words[4], bias.bytes.get()};
    }
};

// Three layers that differ in all they can differ in (the last has experts, one of them shared), and an output layer that is the embedding too: the logits of steps
// of one row, a few and many, one after another.
std::vector<std::vector<char>> decode(Dtype dtype, WeightKind kind, Dtype cache_dtype, int threads) {
    constexpr int64_t HIDDEN = 40, HEADS = 4, KV_HEADS = 2, KEY = 10, VALUE = 6, VOCAB = 50, BLOCK = 8, BLOCKS = 16, ROTARY = 6;
    constexpr int64_t SIZES[] = {HEADS * KEY, KV_HEADS * KEY, KV_HEADS * VALUE};
    state = 1;
    if (kind == WeightKind::fp32) kind = WeightKind(dtype);
    std::vector<Array> vectors;  // of norms
    vectors.reserve(20);
    const auto norm = [&](int64_t n) -> NormOf {
        vectors.emplace_back(dtype, n);
        return {vectors.back().bytes.get(), dtype, n, 1e-6, 1};
    };
    std::vector<PackedLinear> linears;
    linears.reserve(60);
    const auto linear = [&](int64_t N, int64_t K, bool gated = false) {
        return linears.emplace_back(kind, dtype, N, K, gated).of;
    };
    const auto layer = [&](int64_t inner, bool gated) {
        LayerOf of = {};
        of.qkv = linear(SIZES[0] + SIZES[1] + SIZES[2], HIDDEN), of.output = linear(HIDDEN, HEADS * VALUE);
        of.gate_up = linear(2 * inner, HIDDEN, gated), of.down = linear(HIDDEN, inner), of.gated = gated;
        of.q_size = SIZES[0], of.k_size = SIZES[1], of.v_size = SIZES[2], of.key_dim = KEY, of.value_dim = VALUE;
        of.rotary = -1, of.multiplier = 1, of.activation = gated ? Activation::silu : Activation::gelu_tanh;
        return of;
    };
    const std::vector<float> sinks(HEADS, 0.5f);
    LayerOf layers[] = {layer(48, true), layer(45, false), layer(16, true)};
    layers[0].input_norm = norm(HIDDEN), layers[0].mlp_norm = norm(HIDDEN), layers[0].rotary = 0;
    layers[1].attention_norm = norm(HIDDEN), layers[1].output_norm = norm(HIDDEN), layers[1].multiplier = 0.5;
    layers[1].query_norm = norm(SIZES[0]), layers[1].key_norm = norm(SIZES[1]), layers[1].rotary = 0;
    layers[1].interleaved = true, layers[1].sinks = sinks.data();
    layers[2].input_norm = norm(HIDDEN), layers[2].query_norm = norm(KEY), layers[2].key_norm = norm(KEY);
    layers[2].mlp_norm = norm(HIDDEN);
    std::vector<LinearOf> experts;
    for (int i = 0; i < 9; ++i) experts.push_back(linear(2 * 16, HIDDEN, true)), experts.push_back(linear(HIDDEN, 16));
    const std::vector<float> shared_gate(HIDDEN, 0.1f);
    std::vector<LinearOf> clamped;  // with biases
    for (int i = 0; i < 5; ++i) clamped.push_back(linear(2 * 13, HIDDEN)), clamped.push_back(linear(HIDDEN, 13));
    layers[1].activation = Activation::clamped;
    layers[1].mixture = {linear(5, HIDDEN), clamped.data(), 2, 0, 1, 0, nullptr, 0, 0, 1, 1, 1, nullptr};
    const std::vector<float> correction(9, 0.2f);
    const bool precise = kind == WeightKind(dtype);  // the bytes of a packed router are as many
    layers[2].mixture = {
        linear(9, HIDDEN), experts.data(), 3, 1, 0, 1, shared_gate.data(), 1, precise, 3, 2, 0.5, correction.data()};

    struct {
        DecoderOf of;
        LayerOf layers[3];
    } model = {{dtype, HIDDEN, 3, norm(HIDDEN), linear(VOCAB, HIDDEN)}, {layers[0], layers[1], layers[2]}};
    void* decoder = mainspring_decoder_new((const int64_t*)&model);
    std::vector<Array> sides;  // keys and values, head after head
    sides.reserve(6);
    CacheOf caches[3];
    for (int i = 0; i < 3; ++i) {
        const auto side = [&](int64_t dim) -> CacheView {
            sides.emplace_back(cache_dtype, BLOCKS * KV_HEADS * BLOCK * dim);
            return {sides.back().bytes.get(), KV_HEADS * BLOCK * dim, dim, BLOCK * dim};
        };
        caches[i] = {side(KEY), side(VALUE), cache_dtype, 1};
    }
    caches[2] = caches[0], caches[2].appends = 0;
    mainspring_decoder_bind(decoder, (const int64_t*)caches);

    std::vector<std::vector<char>> results;
    struct Request {
        int length, rows;
    };
    for (const std::vector<Request>& requests : {std::vector<Request>{{5, 1}}, {{70, 1}, {30, 19}}, {{9, 1}, {6, 2}}}) {
        std::vector<int32_t> qo = {0}, kv = {0}, table, last, blocks, rows;
        std::vector<int64_t> positions, ids, wanted;
        for (const auto [length, count] : requests) {
            for (int p = 0; p < length; p += BLOCK) table.push_back(int(table.size()) + 1);
            for (int p = length - count; p < length; ++p) {
                blocks.push_back(table[kv.back() + p / BLOCK]), rows.push_back(p % BLOCK);
                positions.push_back(p), ids.push_back(p % VOCAB);
            }
            qo.push_back(int(blocks.size())), kv.push_back(int(table.size())), last.push_back((length - 1) % BLOCK + 1);
            wanted.insert(wanted.begin(), qo.back() - 1);
        }
        KindOfLayer kinds[2];
        for (int64_t window : {0, 20}) {
            const int64_t plan[] = {
                HEADS, KV_HEADS, KEY, VALUE, window, words(0.3), words(0.0), (int64_t)requests.size(), address(qo), address(kv),
                address(table), address(last), BLOCK, threads, 0, 0, 0,
            };
            kinds[window > 0] = {(Plan*)mainspring_attention_plan(plan), blocks.data(), rows.data()};
        }
        const Array hidden(dtype, ids.size() * HIDDEN), table_of_angles(Dtype::fp32, 70 * ROTARY);
        const LinearOf& head = model.of.head;
        const int64_t embedding[] = {
            int64_t(kind), (int64_t)head.data, VOCAB, HIDDEN, head.group, 0, address(ids), (int64_t)ids.size(), hidden.address(),
            int64_t(dtype), threads,
        };
        mainspring_weight_rows(embedding);
        const int64_t kind_of_layer[] = {0, 1, 0};
        const AnglesOf angles[] = {{(const float*)table_of_angles.bytes.get(), ROTARY}};
        const Array out(dtype, wanted.size() * VOCAB);
        StepOf step = {
            (int64_t)ids.size(), hidden.bytes.get(), positions.data(), (int64_t)wanted.size(), wanted.data(), out.bytes.get(),
            threads, kinds, kind_of_layer, angles,
        };
        mainspring_decoder_run(decoder, (const int64_t*)&step);
        out.must_be_finite("decoder");
        results.emplace_back(out.bytes.get(), out.bytes.get() + out.n * size_of(dtype));
        step.num_wanted = 0;
        mainspring_decoder_run(decoder, (const int64_t*)&step);
        for (const auto& shared : kinds) mainspring_attention_forget(shared.plan);
    }

    // Three steps of two sequences, and one more up to its logits.
    constexpr int64_t ROWS = 2, COLUMNS = (23 + BLOCK) / BLOCK;
    int64_t tokens[ROWS] = {3, 5}, positions[ROWS] = {5, 20}, places[ROWS] = {6, 21}, chosen[3 * ROWS], stopped = 0;
    const int64_t seeds[ROWS] = {7, 8}, kind_of_layer[] = {0, 1, 0};
    const bool sampled[ROWS] = {false, true};
    const int32_t stops[] = {1, -1}, interrupt = 0;
    const int64_t penalized[] = {1}, of_counts[] = {0};
    const Penalties penalties[] = {{1.5f, 0.25f, 0.5f}};
    std::vector<int32_t> counts(VOCAB);
    int32_t likeliest[3 * 3], ranks[3];  // of row 1: its token, and two more
    float logprobs[3 * 3];
    std::vector<Scoring> scored;
    for (int i = 0; i < 3; ++i) scored.push_back({1, 2, likeliest + 3 * i, logprobs + 3 * i, ranks + i});
    std::vector<int32_t> qo = {0, 1, 2}, kv = {0, 1, 2}, first = {1, 2}, last = {1, 1}, table;
    for (int i = 0; i < ROWS * COLUMNS; ++i) table.push_back(1 + i);
    std::vector<RepeatedKind> kinds;
    for (int64_t window : {0, 20}) {
        const int64_t plan[] = {
            HEADS, KV_HEADS, KEY, VALUE, window, words(0.3), words(0.0), ROWS, address(qo), address(kv), address(first),
            address(last), BLOCK, threads, 0, 0, 0,
        };
        kinds.push_back({(Plan*)mainspring_attention_plan(plan), table.data(), COLUMNS});
    }
    const Array table_of_angles(Dtype::fp32, 24 * ROTARY), out(dtype, ROWS * VOCAB);
    const AnglesOf angles[] = {{(const float*)table_of_angles.bytes.get(), ROTARY}};
    RepeatOf steps = {ROWS, threads, 3, tokens, positions, 2, kinds.data(), kind_of_layer, angles};
    steps.embedding = {nullptr, model.of.head, {2, 1}}, steps.scale = 0.5;
    steps.choice.sampled = sampled, steps.choice.seeds = seeds, steps.choice.places = places;
    steps.choice.num_penalized = 1, steps.choice.penalized_rows = penalized, steps.choice.counts = counts.data();
    steps.choice.at = of_counts, steps.choice.penalties = penalties;
    steps.choice.num_scored = 1, steps.choice.scored = scored.data();
    steps.num_stops = 1, steps.stops = stops, steps.interrupt = &interrupt, steps.chosen = chosen, steps.stopped = &stopped;
    const int64_t made = mainspring_decoder_repeat(decoder, (const int64_t*)&steps);
    steps.most = 1, steps.logits = out.bytes.get();
    if (made != 3 || stopped || mainspring_decoder_repeat(decoder, (const int64_t*)&steps) != 1 || positions[1] != 24)
        std::puts("repeat"), std::exit(1);
    for (int64_t token : chosen)
        if (token < 0 || token >= VOCAB) std::puts("repeat: no token"), std::exit(1);
    for (int i = 0; i < 3; ++i)
        if (likeliest[3 * i] != chosen[2 * i + 1] || ranks[i] < 1 || !(logprobs[3 * i] <= 0) || !counts[chosen[2 * i + 1]])
            std::puts("repeat: scores or occurrences"), std::exit(1);
    out.must_be_finite("repeat");
    results.emplace_back((char*)chosen, (char*)(chosen + 3 * ROWS));
    results.emplace_back(out.bytes.get(), out.bytes.get() + out.n * size_of(dtype));
    for (const auto& kind : kinds) mainspring_attention_forget((void*)kind.plan);
    mainspring_decoder_forget(decoder, nullptr);
    return results;
}

// Convolution, scan and norm of a mixer, over sequences of so many rows; the second begins here.
void recurrence(Form form, Dtype dtype, int64_t K, int64_t V, bool whole_norm, const std::vector<int>& lengths, int threads) {
    const int64_t groups = 2, heads = 4, width = 4, count = int64_t(lengths.size());
    std::vector<int32_t> starts = {0}, slots;
    const std::unique_ptr<bool[]> fresh(new bool[count]);
    for (int i = 0; i < count; ++i) starts.push_back(starts.back() + lengths[i]), slots.push_back(int(count) - i), fresh[i] = i == 1;
    MixerOf m = {};
    m.form = form, m.groups = groups, m.heads = heads, m.K = K, m.V = V, m.width = width;
    const int64_t columns = m.columns(), norm = whole_norm ? m.inner() : V, rows = starts.back() + 2;  // two of padding
    const std::vector<int64_t> runs = {5, columns - 5, 0, 5};
    const Array taps(Dtype::fp32, width * m.channels()), bias(Dtype::fp32, m.channels()), of_heads(Dtype::fp32, heads);
    const Array weight(dtype, norm), conv_state(Dtype::fp32, (count + 1) * (width - 1) * m.channels());
    const Array state(Dtype::fp32, (count + 1) * heads * K * V), product(dtype, rows * columns);
    const Array out(dtype, rows * m.inner()), workspace(Dtype::fp32, rows * m.numbers());
    const std::vector<float> decays(heads, -0.5f);
    const auto floats = [](const Array& array) { return (float*)array.bytes.get(); };
    m.num_runs = 2, m.runs = runs.data(), m.taps = floats(taps), m.bias = floats(bias), m.silu = 1, m.A = decays.data();
    m.dt_bias = m.D = floats(of_heads), m.norm = {weight.bytes.get(), dtype, norm, 1e-6, 0};
    m.norm_size = whole_norm ? m.inner() / groups : V, m.gate_first = m.sigmoid = whole_norm, m.scale = 0.5, m.l2norm = 1;
    m.conv_state = floats(conv_state), m.state = floats(state);
    const MixCall call = {
        m, {count, starts.data(), slots.data(), fresh.get(), threads}, dtype, rows, product.bytes.get(), columns,
        out.bytes.get(), floats(workspace),
    };
    run_team(threads, [&](Team& team, int rank) { mix_in_team(call, team, rank); });
    const uint64_t before = digest;
    out.must_be_finite("mixer"), state.must_be_finite("state");
    digest = before;  // exp and log1p are the system's
}

// Whether a thread leaves a processor that another one has taken, if there are others.
void seats() {
    cpu_set_t allowed, first;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
    int at = 0;
    while (!CPU_ISSET(at, &allowed)) ++at;
    CPU_ZERO(&first);
    CPU_SET(at, &first);
    bool moved = false;
    for (int tries = 0; tries < 20 && !moved; ++tries) {  // the system may move it back at once
        if (sched_setaffinity(0, sizeof(first), &first) != 0 || sched_setaffinity(0, sizeof(allowed), &allowed) != 0) return;
        Seats taken;
        taken.mark(at);
        taken.take();
        moved = Seats::processor() != at;
    }
    cpu_set_t now;
    if (!moved || sched_getaffinity(0, sizeof(now), &now) != 0 || !CPU_EQUAL(&now, &allowed))
        std::puts("a thread stays on another one's processor"), std::exit(1);
}

}  // namespace

int main() {
#if MAINSPRING_AMX
    if (!allow_tiles()) return std::puts("the system does not allow AMX"), 1;
#endif
    const Dtype dtypes[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16, Dtype::fp8};
    for (int threads : {1, 3}) {
        for (Dtype cache : dtypes)
            for (Dtype query : {Dtype::fp32, Dtype::bf16, Dtype::fp16})
                for (int window : {0, 50}) {
                    attention(query, cache, 2, 1, 16, 24, window, threads);
                    attention(query, cache, 1, 7, 33, 17, window, threads);
                    attention(query, cache, 2, 3, 16, 24, window, threads, 0, true);
                    for (int bias_columns : {1, 40}) attention(query, cache, 2, 3, 16, 24, window, threads, bias_columns);
                }
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
            for (int64_t width : {2, 34, 70, 600}) elementwise(dtype, 37, width, threads);
            for (Dtype cache : dtypes)
                for (int64_t rotary : {2, 24, 34, 66}) tokens(dtype, cache, 67, rotary, rotary == 34, threads);
        }
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16})
            for (int64_t vocab : {1, 15, 16, 17, 5001, 9000}) sampling(dtype, 4, vocab, threads);
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16})
            for (WeightKind kind : {WeightKind::fp32, WeightKind::int8, WeightKind::int4})
                for (Dtype cache : {dtype, Dtype::fp8})
                    if (decode(dtype, kind, cache, threads) != decode(dtype, kind, cache, 1))
                        std::puts("decoder: other bits with more threads"), std::exit(1);
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16})
            for (Form form : {Form::gated_delta, Form::mamba2})
                for (int64_t K : {3, 16, 20})
                    for (int64_t V : {5, 16, 128})
                        for (const std::vector<int>& lengths : {std::vector<int>{1, 1, 9}, {1, 1}, {7}})
                            recurrence(form, dtype, K, V, V > 5, lengths, threads);
        Team team(1);
        team.barrier();
        std::atomic<int> met{0};
        run_team(threads, [&](Team& all, int) {
            for (int i = 1; i <= 200; ++i) {
                met.fetch_add(1, std::memory_order_relaxed);
                all.barrier();
                if (met.load(std::memory_order_relaxed) != i * all.size) std::puts("barrier"), std::exit(1);
                all.barrier();
            }
        });
    }
    seats();
    std::printf("all kernels ran: %016lx\n", (unsigned long)digest);
}
