// Matrix products (kernels/native/linear.h): checks, which a slow test runs, and a table of speeds for developers:
//   g++ -std=c++17 -O3 -march=native -pthread benchmarks/products.cpp -o products && ./products
//   HUGEPAGES=1 ./products bench [threads] [kinds, of bf16 int8 int4 fp32 fp16]
// With -mavx2 -mfma -mf16c in place of -march=native it uses the AVX2 path, with -mno-avx512bf16 behind -march=native the
// one for AVX-512 without bf16, with -mno-amx-bf16 the one for AVX-512 with bf16.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <ctime>

#include <sys/mman.h>

#include "../kernels/native/weights.h"

using namespace mainspring;

// ---------------------------------------------------------------- a team of threads

static double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Team {
    int size;
    std::atomic<int> arrived{0}, round{0}, taken{0};
    std::vector<double> waited;  // CPU seconds a thread spent in barriers

    explicit Team(int size) : size(size), waited(size) {}
    void wait(int thread) {
        const double start = cpu_seconds();
        const int now = round.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed), taken.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
        } else {
            for (int spins = 0; round.load(std::memory_order_acquire) == now; ++spins)
                if (spins >= 1000) std::this_thread::yield();
        }
        waited[thread] += cpu_seconds() - start;
    }
    template <class F>
    void run(F f) {
        std::vector<std::thread> threads;
        for (int t = 1; t < size; ++t) threads.emplace_back([&, t] { f(t); });
        f(0);
        for (auto& t : threads) t.join();
    }
};

struct Memory {  // 64-byte aligned, of exactly the requested size, so that AddressSanitizer detects accesses beyond it
    char* at;
    explicit Memory(size_t bytes) : at((char*)std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
    ~Memory() { std::free(at); }
    Memory(const Memory&) = delete;
};

template <class T>
static const char* name_of();
template <> const char* name_of<float>() { return "fp32"; }
template <> const char* name_of<bf16>() { return "bf16"; }
template <> const char* name_of<fp16>() { return "fp16"; }

static int failures = 0;
#define CHECK(what, ...) \
    do { \
        if (!(what) && ++failures < 20) std::printf("FAILED line %d: ", __LINE__), std::printf(__VA_ARGS__), std::printf("\n"); \
    } while (0)

template <class T>
static std::vector<T> random_numbers(size_t count, std::mt19937& rng, float scale) {
    std::vector<T> out(count);
    std::normal_distribution<float> normal(0, scale);
    for (auto& x : out) store_one(&x, normal(rng));
    return out;
}

// ---------------------------------------------------------------- checks

// y = x W^T by a team, in packed form.
template <class X, class T, class Epilogue>
static void by_team(int num_threads, const X* x, int x_stride, const T* w, int M, int N, int K, const Epilogue& epilogue) {
    const Packed<T> weight = {w, N, K};
    Memory workspace(linear_workspace(weight, M, num_threads));
    Team team(num_threads);
    team.run([&](int t) {
        linear(x, x_stride, M, weight, epilogue, workspace.at, t, num_threads, [&] { team.wait(t); }, [&] { return team.taken++; });
    });
}

struct Silu {
    F32 operator()(F32 x) const { return silu(x); }
};

template <class T>
static std::vector<T> packed_weight(const std::vector<T>& rows, int N, int K) {
    std::vector<T> packed(rows.size());
    for (int n = 0; n < N; n += PANEL)
        pack_panel(&rows[(size_t)n * K], std::min(PANEL, N - n), K, &packed[(size_t)n * K]);
    return packed;
}

template <class T>
static void check_shape(int M, int N, int K, std::mt19937& rng) {
    const int stride = K + rng() % 3;
    const auto original = random_numbers<T>((size_t)N * K, rng, 1 / std::sqrt((float)K));
    const auto x = random_numbers<T>((size_t)(M - 1) * stride + K, rng, 1);
    const auto bias = random_numbers<T>(N, rng, 1);
    const auto residual = random_numbers<T>((size_t)M * N, rng, 1);

    const auto w = packed_weight(original, N, K);
    std::vector<T> back(w.size());
    for (int n = 0; n < N; ++n) read_row(Packed<T>{w.data(), N, K}, n, &back[(size_t)n * K]);
    CHECK(!std::memcmp(back.data(), original.data(), sizeof(T) * N * K), "%s [%d, %d] packed and unpacked differs", name_of<T>(), N, K);

    // One row at a time, one thread: the reference, which all others must equal bit for bit.
    std::vector<float> alone((size_t)M * N);
    for (int m = 0; m < M; ++m)
        by_team(1, x.data() + (size_t)m * stride, stride, w.data(), 1, N, K, Store<float, T>{alone.data() + (size_t)m * N, N});
    double worst = 0;
    for (int m = 0; m < M; m += std::max(1, M / 7))
        for (int n = 0; n < N; n += std::max(1, N / 97)) {
            double sum = 0, size = 0;
            for (int k = 0; k < K; ++k) {
                const double product = (double)load_one(&x[(size_t)m * stride + k]) * load_one(&original[(size_t)n * K + k]);
                sum += product, size += std::fabs(product);
            }
            worst = std::max(worst, std::fabs(sum - alone[(size_t)m * N + n]) / size);
        }
    CHECK(worst < 2e-6, "%s M %d N %d K %d: error %g of the sum of sizes", name_of<T>(), M, N, K, worst);

    for (int num_threads : {1, 2, 3, 7}) {
        if (num_threads > 2 && rng() % 4) continue;
        std::vector<float> y((size_t)M * N, NAN);
        by_team(num_threads, x.data(), stride, w.data(), M, N, K, Store<float, T>{y.data(), N});
        CHECK(!std::memcmp(y.data(), alone.data(), sizeof(float) * M * N), "%s M %d N %d K %d: %d threads differ from rows alone",
              name_of<T>(), M, N, K, num_threads);
    }

    // x in fp32, rounded to the weight's type if the product is computed in that type
    std::vector<float> wide((size_t)M * K), from_wide((size_t)M * N);
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) wide[(size_t)m * K + k] = load_one(&x[(size_t)m * stride + k]);
    by_team(2, wide.data(), K, w.data(), M, N, K, Store<float, T>{from_wide.data(), N});
    CHECK(from_wide == alone, "%s M %d N %d K %d: x in fp32", name_of<T>(), M, N, K);

    // bias and residual, rounded once; y is the residual
    std::vector<T> y = residual, expected((size_t)M * N);
    for (size_t i = 0; i < y.size(); ++i) store_one(&expected[i], alone[i] + load_one(&bias[i % N]) + load_one(&residual[i]));
    by_team(2, x.data(), stride, w.data(), M, N, K, Store<T>{y.data(), N, bias.data(), y.data()});
    CHECK(!std::memcmp(y.data(), expected.data(), sizeof(T) * M * N), "%s M %d N %d K %d: bias and residual", name_of<T>(), M, N, K);

    // gate and up, as if the weight were joined
    if (N % (2 * GATE) == 0) {
        const int I = N / 2;
        std::vector<T> joined;
        for (int i = 0; i < I; i += GATE)
            for (size_t half : {0, I}) {
                const auto rows = original.begin() + (half + i) * K;
                joined.insert(joined.end(), rows, rows + GATE * K);
            }
        joined = packed_weight(joined, N, K);
        std::vector<T> gated((size_t)M * I), want((size_t)M * I);
        by_team(2, x.data(), stride, joined.data(), M, N, K, Gated<Silu, T>{gated.data(), I});
        for (int m = 0; m < M; ++m)
            for (int i = 0; i < I; ++i) {
                float product[LANES];
                store(product, mul(silu(set(alone[(size_t)m * N + i])), set(alone[(size_t)m * N + I + i])));
                store_one(&want[(size_t)m * I + i], product[0]);
            }
        CHECK(!std::memcmp(gated.data(), want.data(), sizeof(T) * M * I), "%s M %d I %d K %d: act(gate) * up", name_of<T>(), M, I, K);
    }
}

template <class T>
static void check_type(unsigned seed) {
    std::mt19937 rng(seed);
    int shapes = 0;
    const int rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16, 24, 29, 32, 48, 64, 100};
    for (int M : rows) {
        check_shape<T>(M, 96, 80, rng), ++shapes;
        check_shape<T>(M, 1 + rng() % 200, 1 + rng() % 300, rng), ++shapes;
    }
    for (int N : {1, 15, 16, 31, 32, 33, 64, 65})
        for (int K : {1, 2, 3, 31, 32, 33, 64, 129}) check_shape<T>(1 + rng() % 20, N, K, rng), ++shapes;
    check_shape<T>(5, 96, 4096 + 33, rng);  // blocks of K
    check_shape<T>(40, 70, 4096 + 33, rng);
    check_shape<T>(33, 64, 9000, rng);
    check_shape<T>(1, 300, 4096 + 33, rng);
    check_shape<T>(2, 160, 9001, rng);
    check_shape<T>(300, 96, 770, rng);
    check_shape<T>(8, 96, 4096 + 33, rng);  // tiles of 6 and 2 rows
    check_shape<T>(13, 64, 9001, rng);
    std::printf("%s: %d shapes\n", name_of<T>(), shapes + 8);
}

// Quantized: the bits equal those of a plain loop over the groups, with any number of rows.
template <int BITS, bool FP4 = false>
static void check_quantized(int M, int N, int K, int group, std::mt19937& rng) {
    const int groups = ceil_div(K, group), stride = K + rng() % 3;
    const auto original = random_numbers<bf16>((size_t)N * K, rng, 1 / std::sqrt((float)K));
    auto x = random_numbers<bf16>((size_t)(M - 1) * stride + K, rng, 1);
    Quantized<BITS, FP4> weight = {nullptr, N, K, group};
    Memory packed(weight.bytes());
    weight.data = packed.at;
    std::vector<float> w((size_t)N * K);
    double error = 0, size = 0;
    if (FP4) {
        std::vector<uint8_t> codes((size_t)N * K);
        for (auto& code : codes) code = M == 1 ? 7 : rng() % 16;
        for (auto& number : x)
            if (M == 1) store_one(&number, 1);  // all as large as can be: sums must still fit
        pack_quantized<4>(codes.data(), std::vector<float>((size_t)N * groups, 0.125f).data(),
                          std::vector<float>((size_t)N * groups, 12).data(), N, K, group, packed.at);
        const float floats[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        for (int n = 0; n < N; ++n) read_row(weight, n, &w[(size_t)n * K]);
        for (size_t i = 0; i < w.size(); ++i)
            CHECK(w[i] == 0.25f * floats[codes[i] & 7] * (codes[i] & 8 ? -1 : 1), "FP4 %d is read as %g", codes[i], w[i]);
    } else {
        for (int t = 0; t < 2; ++t) quantize_weight<BITS>(original.data(), N, K, group, packed.at, t, 2);
        for (int n = 0; n < N; ++n) read_row(weight, n, &w[(size_t)n * K]);
        for (size_t i = 0; i < w.size(); ++i)
            error += std::pow(w[i] - load_one(&original[i]), 2), size += std::pow(load_one(&original[i]), 2);
        const double weight_error = std::sqrt(error / size);
        CHECK(weight_error < (BITS == 8 ? 0.012 : 0.13), "%d bits N %d K %d group %d: weights off by %g", BITS, N, K, group, weight_error);
    }

    std::vector<float> expected((size_t)M * N);
    std::vector<double> exact((size_t)M * N);
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < groups; ++g) {
            const int k0 = g * group, k1 = std::min(K, k0 + group);
            float top = 0;
            for (int k = k0; k < k1; ++k) top = std::max(top, std::fabs(load_one(&x[(size_t)m * stride + k])));
            std::vector<int> q(group);
            int total = 0;
            for (int k = k0; k < k1; ++k)
                total += q[k - k0] = (int)std::nearbyint(load_one(&x[(size_t)m * stride + k]) * (top > 0 ? 127 / top : 0));
            for (int n = 0; n < N; ++n) {
                const char* from = packed.at + n / PANEL * weight.panel_bytes() + g * weight.group_bytes();
                const fp16* parameters = (const fp16*)(from + group * PANEL * BITS / 8) + n % PANEL;
                const float scale = load_one(parameters), zero = BITS == 8 ? 128 : load_one(parameters + PANEL);
                int dot = 0;
                for (int k = k0; k < k1; ++k) {
                    const int i = k - k0;
                    const uint8_t byte = from[((BITS == 8 ? i / 4 : i / 8) * PANEL + n % PANEL) * 4 + i % 4];
                    const int number = BITS == 8 ? byte : byte >> (i % 8 / 4 * 4) & 15;
                    dot += q[i] * (FP4 ? TWICE_FP4[number] : number);
                    exact[(size_t)m * N + n] += (double)w[(size_t)n * K + k] * load_one(&x[(size_t)m * stride + k]);
                }
                float& sum = expected[(size_t)m * N + n];
                sum = std::fma((float)dot - zero * total, scale * (top / 127), sum);
            }
        }
    error = size = 0;
    for (size_t i = 0; i < exact.size(); ++i) error += std::pow(exact[i] - expected[i], 2), size += exact[i] * exact[i];
    if (K >= 32 && M * N >= 64) CHECK(std::sqrt(error / size) < 0.01, "%d bits M %d N %d K %d: rounding of x %g", BITS, M, N, K, std::sqrt(error / size));

    for (int num_threads : {1, 2, 5})
        for (int rows : {M, 1}) {
            std::vector<float> y((size_t)M * N, NAN);
            Memory workspace(linear_workspace(weight, rows, num_threads));
            Team team(num_threads);
            team.run([&](int t) {
                for (int m = 0; m < M; m += rows, team.wait(t))
                    linear(x.data() + (size_t)m * stride, stride, rows, weight, Store<float, bf16>{y.data() + (size_t)m * N, N}, workspace.at, t,
                           num_threads, [&] { team.wait(t); }, [&] { return team.taken++; });
            });
            CHECK(!std::memcmp(y.data(), expected.data(), sizeof(float) * M * N), "%d bits M %d by %d N %d K %d group %d, %d threads: bits differ",
                  BITS, M, rows, N, K, group, num_threads);
        }
}

template <int BITS, bool FP4 = false>
static void check_bits(unsigned seed) {
    std::mt19937 rng(seed);
    int shapes = 0;
    for (int group : {32, 64, 128})
        for (int M : {1, 2, 3, 5, 8, 9, 13, 14, 15, 29, 50}) {
            check_quantized<BITS, FP4>(M, 160, 256, group, rng);
            check_quantized<BITS, FP4>(M, 1 + rng() % 100, 1 + rng() % 400, group, rng);
            shapes += 2;
        }
    for (int M : {1, 4, 13, 30})  // a group is a whole row
        for (int K : {32, 300, 4100})
            if (BITS == 8) check_quantized<BITS>(M, 70, K, ceil_div(K, 32) * 32, rng), ++shapes;
    std::printf("%d bits%s: %d shapes\n", BITS, FP4 ? " of FP4" : "", shapes);
}

#if MAINSPRING_AMX
// The bits are those that amx.h promises, also of numbers so small that products and sums are denormals.
static void check_tiles(unsigned seed) {
    std::mt19937 rng(seed);
    int small = 0;
    for (int M : {1, 2, 21}) {
        for (float scale : {1.0f, 1e-10f, 1e-19f, 1e-38f}) {
            const int N = 168, K = 106;  // four panels, one alone, and a narrow one
            const auto original = random_numbers<bf16>((size_t)N * K, rng, scale), x = random_numbers<bf16>((size_t)M * K, rng, scale);
            std::vector<float> y((size_t)M * N);
            by_team(1, x.data(), K, packed_weight(original, N, K).data(), M, N, K, Store<float, bf16>{y.data(), N});
            const FlushDenormals flush;
            for (int m = 0; m < M; ++m)
                for (int n = 0; n < N; ++n) {
                    float sum = 0;
                    for (int k = 0; k < K; k += TILE_K) {
                        float parts[2] = {};
                        for (int i = k; i < k + TILE_K; ++i)  // beyond K: zeros
                            parts[i % 2] = std::fma(i < K ? load_one(&x[m * K + i]) : 0,
                                                    i < K ? load_one(&original[n * K + i]) : 0, parts[i % 2]);
                        sum = sum + (parts[0] + parts[1]);
                    }
                    small += sum == 0;
                    CHECK(!std::memcmp(&sum, &y[m * N + n], sizeof sum), "tiles: %g in place of %g", y[m * N + n], sum);
                }
        }
    }
    CHECK(small > 0, "tiles: no product was a denormal");
}
#endif

int bench(int num_threads, const std::string& kinds);

int main(int argc, char** argv) {
#if MAINSPRING_AMX
    if (!allow_tiles()) return std::puts("the system does not allow AMX"), 1;
#endif
    if (argc > 1 && !std::strcmp(argv[1], "bench")) return bench(argc > 2 ? std::atoi(argv[2]) : 2, argc > 3 ? argv[3] : "bf16 int8 int4 fp32 fp16");
    const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
    std::printf("seed %u\n", seed);
    check_type<bf16>(seed);
#if MAINSPRING_AMX
    check_tiles(seed);
#endif
    check_type<fp16>(seed);
    check_type<float>(seed);
    check_bits<8>(seed);
    check_bits<4>(seed);
    check_bits<4, true>(seed);
    std::printf(failures ? "%d FAILURES\n" : "all passed\n", failures);
    return failures != 0;
}

// ---------------------------------------------------------------- measurements

// Seconds are a thread's CPU seconds without its waits in barriers, because on a shared machine the time during which a
// thread does not run would dominate. The rates of the threads are added.

// f(thread) does `amount` of work per thread; the median of `rounds`.
template <class F>
static double rate(int num_threads, double amount, int rounds, F f) {
    std::vector<double> rates;
    for (int i = 0; i < rounds; ++i) {
        Team team(num_threads);
        std::vector<double> seconds(num_threads);
        team.run([&](int t) {
            team.wait(t);
            team.waited[t] = 0;
            const double start = cpu_seconds();
            f(team, t);
            seconds[t] = cpu_seconds() - start - team.waited[t];
        });
        double total = 0;
        for (double s : seconds) total += s;
        rates.push_back(amount * num_threads / total * num_threads);
    }
    std::sort(rates.begin(), rates.end());
    return rates[rounds / 2];
}

static double read_rate(const char* memory, size_t bytes, int num_threads) {
    return rate(num_threads, (double)(bytes / num_threads / 512 * 512), 3, [&](Team&, int t) {
        const char* p = memory + bytes / num_threads / 512 * 512 * t;
        F32 sums[8];
        for (auto& s : sums) s = zero();
        for (size_t i = 0; i < bytes / num_threads / 512 * 512; i += 512)
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j)
                for (int v = 0; v < 16 / LANES; ++v) sums[j] = add(sums[j], load((const float*)(p + i + 64 * j) + v * LANES));
        for (int j = 1; j < 8; ++j) sums[0] = add(sums[0], sums[j]);
        volatile float sink = sum(sums[0]);
        (void)sink;
    });
}

#if MAINSPRING_AVX512 || MAINSPRING_AVX2
// 14 independent multiply-adds from registers to registers.
#if MAINSPRING_AVX512
#define DOT(op, n) op " %%zmm15, %%zmm14, %%zmm" #n "\n"
#else
#define DOT(op, n) op " %%ymm15, %%ymm14, %%ymm" #n "\n"
#endif
#define DOTS(op) \
    asm volatile(DOT(op, 0) DOT(op, 1) DOT(op, 2) DOT(op, 3) DOT(op, 4) DOT(op, 5) DOT(op, 6) DOT(op, 7) DOT(op, 8) DOT(op, 9) \
                 DOT(op, 10) DOT(op, 11) DOT(op, 12) DOT(op, 13)::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                 "xmm9", "xmm10", "xmm11", "xmm12", "xmm13")
template <class F>
static double peak_of(int num_threads, int per_lane, F dots) {
    constexpr int times = 1000000;
    return rate(num_threads, 14.0 * LANES * per_lane * times, 3, [&](Team&, int) {
        for (int i = 0; i < times; ++i) dots();
    });
}
#endif

static const int SHAPES[][2] = {{768, 768}, {2304, 768}, {4096, 768}, {768, 2048}, {32000, 768},       // llama-110m
                                {4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}, {151936, 1024},  // Qwen3-0.6B
                                {4096, 4096}};

// of(at, N, K): the weight at this address. peak: operations a second.
template <class X, class Of>
static void bench_kind(const char* name, Of of, const std::vector<int>& rows, double peak, char* memory, size_t bytes, int num_threads) {
    std::printf("\n%-6s    N     K", name);
    for (int M : rows) std::printf("  M=%-13d", M);
    std::printf("\n");
    for (auto& shape : SHAPES) {
        const int N = shape[0], K = shape[1];
        const auto size_of = [&](auto weight) {
            if constexpr (std::is_same<decltype(weight.data), const char*>::value)
                return weight.bytes();
            else
                return sizeof(*weight.data) * (size_t)N * K;
        };
        const size_t size = size_of(of(nullptr, N, K));
        std::printf("     %6d %5d", N, K);
        for (int M : rows) {
            const int copies = (int)std::max<size_t>(1, bytes / size);  // more than L3 holds
            const int calls = std::max(2, std::min(copies, (int)(std::min(3e10 / M, 3e9) / (2.0 * N * K))));
            Memory x((size_t)M * K * sizeof(X)), y((size_t)M * N * sizeof(X)), work(linear_workspace(of(nullptr, N, K), M, num_threads));
            std::memset(x.at, 0, (size_t)M * K * sizeof(X));
            std::memset(y.at, 0, (size_t)M * N * sizeof(X));
            std::vector<double> shares, speeds;
            int next = 0;
            for (int round = 0; round < 5; ++round) {  // limit and kernel in turn: the speed varies
                static size_t place = 0;  // moves through all of the memory, so that none of it is in L3
                place = (place + (64 << 20)) % (bytes - (64 << 20));
                const double bandwidth = read_rate(memory + place / 64 * 64, 64 << 20, num_threads);
                const double speed = rate(num_threads, (double)calls / num_threads, 1, [&](Team& team, int t) {
                    for (int i = 0; i < calls; ++i) {
                        char* at = memory + size * ((next + i) % copies);
                        linear((const X*)x.at, K, M, of(at, N, K), Store<X>{(X*)y.at, N}, work.at, t, num_threads, [&] { team.wait(t); },
                               [&] { return team.taken++; });
                        team.wait(t);
                    }
                });
                next += calls;
                speeds.push_back(speed);
                shares.push_back(speed / std::min(peak / (2.0 * M * N * K), bandwidth / size));
            }
            std::sort(shares.begin(), shares.end());
            std::sort(speeds.begin(), speeds.end());
            std::printf("  %5.0f %4.1f %3.0f%%", speeds[2] * 2 * M * N * K / 1e9, speeds[2] * size / 1e9, 100 * shares[2]);
            std::fflush(stdout);
        }
        std::printf("\n");
    }
}

// kinds: those to measure, among bf16 int8 int4 fp32 fp16
int bench(int num_threads, const std::string& kinds) {
    const size_t bytes = (size_t)768 << 20;
    char* memory = (char*)std::aligned_alloc(1 << 21, bytes);
    if (std::getenv("HUGEPAGES")) madvise(memory, bytes, MADV_HUGEPAGE);
    std::memset(memory, 0, bytes);
    std::printf("%d threads; each cell: GFLOP/s, GB/s of weights, share of the nearer limit\n", num_threads);
    std::printf("read %.1f GB/s\n", read_rate(memory, bytes, num_threads) / 1e9);
    const auto bf16_of = [](char* at, int N, int K) { return Packed<bf16>{(const bf16*)at, N, K}; };
    const auto fp32_of = [](char* at, int N, int K) { return Packed<float>{(const float*)at, N, K}; };
    const auto fp16_of = [](char* at, int N, int K) { return Packed<fp16>{(const fp16*)at, N, K}; };
    const auto int8_of = [](char* at, int N, int K) { return Quantized<8>{at, N, K, 128}; };
    const auto int4_of = [](char* at, int N, int K) { return Quantized<4>{at, N, K, 32}; };
    const std::vector<int> few = {1, 2, 4, 8}, some = {12, 16, 24, 32}, many = {48, 64, 100, 256, 512};
#if MAINSPRING_AVX512 || MAINSPRING_AVX2
    const double peak32 = peak_of(num_threads, 2, [] { DOTS("vfmadd231ps"); });
#else
    const double peak32 = 1e12;
#endif
#if MAINSPRING_AVX512 && MAINSPRING_BF16_DOT
    const double peak = peak_of(num_threads, 4, [] { DOTS("vdpbf16ps"); });
#else
    const double peak = peak32;  // bf16 is widened to fp32
#endif
#if MAINSPRING_AVX512 && MAINSPRING_VNNI
    const double peak8 = peak_of(num_threads, 8, [] { DOTS("vpdpbusd"); });
#else
    const double peak8 = 1e12;
#endif
    std::printf("peak: bf16 %.0f, fp32 %.0f, int8 %.0f GFLOP/s\n", peak / 1e9, peak32 / 1e9, peak8 / 1e9);
    const auto wanted = [&](const char* kind) { return kinds.find(kind) != std::string::npos; };
    const std::vector<int> one_list = {1, 4, 32, 256};
    for (auto& rows : {few, some, many})
        if (wanted("bf16")) bench_kind<bf16>("bf16", bf16_of, rows, peak, memory, bytes, num_threads);
    if (wanted("int8")) bench_kind<bf16>("int8", int8_of, one_list, peak8, memory, bytes, num_threads);
    if (wanted("int4")) bench_kind<bf16>("int4", int4_of, one_list, peak8, memory, bytes, num_threads);
    if (wanted("fp32")) bench_kind<float>("fp32", fp32_of, one_list, peak32, memory, bytes, num_threads);
    if (wanted("fp16")) bench_kind<fp16>("fp16", fp16_of, one_list, peak32, memory, bytes, num_threads);
    return 0;
}
