// Every kernel on small and odd shapes, for the sanitizers (tests/test_native_build.py builds it with each of them). Arrays
// have exactly the size they must have, so that a read or write past an end is seen. Exits with 0 where all is finite.
#include <cstdio>
#include <cstdlib>

#include "native.cpp"

namespace {

uint32_t state = 1;
float draw() {
    state = state * 1664525 + 1013904223;
    return float(int32_t(state)) * 0x1p-31f;
}

// n numbers of a dtype, on the heap.
struct Array {
    Dtype dtype;
    int64_t n;
    std::unique_ptr<char[]> bytes;
    Array(Dtype dtype, int64_t n) : dtype(dtype), n(n), bytes(new char[n * size_of(dtype)]) {
        for (int64_t i = 0; i < n; ++i) store_as(dtype, bytes.get(), i, set(draw()), 1);
    }
    int64_t address() const { return (int64_t)bytes.get(); }
    void must_be_finite(const char* what) const {
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

void attention(Dtype query_dtype, Dtype cache_dtype, int kv_heads, int group, int key_dim, int value_dim, int window, int threads) {
    const int block_size = 8, heads = kv_heads * group;
    const std::vector<int> lengths = {1, 9, 600, 70, 130}, rows = {1, 1, 1, 33, 130};
    std::vector<int32_t> qo = {0}, kv = {0}, table, last;
    for (size_t i = 0; i < lengths.size(); ++i) {
        const int blocks = (lengths[i] + block_size - 1) / block_size;
        for (int b = 0; b < blocks; ++b) table.push_back(kv.back() + blocks - 1 - b);
        qo.push_back(qo.back() + rows[i]), kv.push_back(kv.back() + blocks), last.push_back((lengths[i] - 1) % block_size + 1);
    }
    const int64_t out_rows = qo.back() + 3;
    const Array query(query_dtype, out_rows * heads * key_dim), out(query_dtype, out_rows * heads * value_dim);
    const int64_t row = kv_heads * key_dim, value_row = kv_heads * value_dim;
    const Array keys(cache_dtype, kv.back() * block_size * row), values(cache_dtype, kv.back() * block_size * value_row);
    const std::vector<float> sinks(heads, 0.5f);
    const int64_t plan_words[] = {
        heads, kv_heads, key_dim, value_dim, window, words(0.2), words(window ? 5.0 : 0.0), (int64_t)lengths.size(),
        address(qo), address(kv), address(table), address(last), block_size, threads,
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
    for (int64_t activation = 0; activation < 3; ++activation) {
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

void sampling(int64_t rows, int64_t vocab, int threads) {
    const Array scores(Dtype::fp32, rows * vocab), out(Dtype::fp32, rows * vocab);
    std::vector<int64_t> seeds(rows, -5), positions(rows, 7), chosen(rows, -1), top_k(rows, 3);
    std::vector<float> top_p(rows, 0.5f), min_p(rows, 0.01f);
    const std::unique_ptr<bool[]> sampled(new bool[rows]());
    for (int64_t i = 0; i < rows; i += 2) sampled[i] = true;
    const int64_t masked[] = {
        scores.address(), rows, vocab, vocab, address(top_k), address(top_p), address(min_p), out.address(), threads,
    };
    mainspring_mask(masked);
    const int64_t choice[] = {
        out.address(), 0, rows, vocab, vocab, address(seeds), address(positions), (int64_t)sampled.get(), address(chosen), threads,
    };
    mainspring_choose(choice);
    for (int64_t token : chosen)
        if (token < 0 || token >= vocab) std::printf("choose: %ld of %ld\n", (long)token, (long)vocab), std::exit(1);
}

}  // namespace

int main() {
    const Dtype dtypes[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16, Dtype::fp8};
    for (int threads : {1, 3}) {
        for (Dtype cache : dtypes)
            for (Dtype query : {Dtype::fp32, Dtype::bf16, Dtype::fp16})
                for (int window : {0, 50}) {
                    attention(query, cache, 2, 1, 16, 24, window, threads);
                    attention(query, cache, 1, 7, 33, 17, window, threads);
                }
        for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
            for (int64_t width : {2, 34, 70, 600}) elementwise(dtype, 37, width, threads);
            for (Dtype cache : dtypes)
                for (int64_t rotary : {2, 24, 34, 66}) tokens(dtype, cache, 67, rotary, rotary == 34, threads);
        }
        for (int64_t vocab : {1, 15, 16, 17, 5001, 9000}) sampling(4, vocab, threads);
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
    std::puts("all kernels ran");
}
