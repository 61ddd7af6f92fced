// Weights into panels and out of them, and one linear layer: what weights.py calls. Arguments as in native.cpp; the
// first five words are always the fields of a `Weight`, the sixth says whether its rows are interleaved for `Gated`.
#include <cstdlib>

#include "products.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace mainspring;

namespace {

template <class T>
T* at(int64_t address) {
    return (T*)address;
}

Weight weight_at(const int64_t* a) { return {WeightKind(a[0]), at<void>(a[1]), int(a[2]), int(a[3]), int(a[4])}; }

// Which of the rows [gate; up] lies in row `place` of the panels; and the other way round.
int row_of(int place, int N) { return place / PANEL * GATE + place % GATE + (place % PANEL < GATE ? 0 : N / 2); }
int place_of(int row, int N) {
    const int i = row % (N / 2);
    return i / GATE * PANEL + i % GATE + (row < N / 2 ? 0 : GATE);
}

// The rows of panel p, `stride` numbers each, one after another: in `rows` where they already are, else copied to `copy`.
template <class T>
const T* rows_of_panel(const T* rows, int p, int N, int64_t stride, bool gated, std::vector<T>& copy) {
    if (!gated) return rows + p * PANEL * stride;
    copy.resize(PANEL * stride);
    for (int n = 0; n < PANEL; ++n)
        std::memcpy(&copy[n * stride], rows + row_of(p * PANEL + n, N) * stride, stride * sizeof(T));
    return copy.data();
}

// Calls body(p, columns) for every panel, by all threads.
template <class Body>
void for_panels(int N, int threads, Body&& body) {
    run_team(threads, [&](Team& team, int rank) {
        const Share mine(ceil_div(N, PANEL), rank, team.size);
        for (int64_t p = mine.begin; p < mine.end; ++p) body(int(p), int(std::min<int64_t>(PANEL, N - p * PANEL)));
    });
}

template <class T>
void pack_plain(const Packed<T>& weight, bool gated, const T* rows, int threads) {
    const int K = weight.K;
    for_panels(weight.N, threads, [&](int p, int columns) {
        std::vector<T> copy;
        pack_panel(rows_of_panel(rows, p, weight.N, K, gated, copy), columns, K, (T*)weight.data + (size_t)p * PANEL * K);
    });
}

// Memory for packed x and sums: a thread's own, kept for its next call.
struct Workspace {
    void* memory = nullptr;
    size_t size = 0;
    ~Workspace() { std::free(memory); }
    void* of(size_t bytes) {
        if (bytes > size) {
            std::free(memory);
            size = (bytes + bytes / 4 + 63) / 64 * 64;
            memory = std::aligned_alloc(64, size);
        }
        return memory;
    }
};

}  // namespace

EXPORT int64_t mainspring_weight_bytes(const int64_t* a) {
    int64_t bytes = 0;
    with_weight(weight_at(a), [&](auto weight) {
        if constexpr (std::is_same<decltype(weight.data), const char*>::value)
            bytes = weight.bytes();
        else
            bytes = sizeof(*weight.data) * (int64_t)weight.N * weight.K;
    });
    return bytes;
}

// [N, K] of the weight's own type → panels. Word 7, the type, is for mainspring_weight_quantize alone.
EXPORT void mainspring_weight_pack(const int64_t* a) {
    with_weight(weight_at(a), [&](auto weight) {
        if constexpr (!std::is_same<decltype(weight.data), const char*>::value)
            pack_plain(weight, a[5], at<std::remove_reference_t<decltype(*weight.data)>>(a[6]), int(a[8]));
    });
}

// [N, K] of any type → panels of int8 or 4-bit groups; `coded` is by NF4.
EXPORT void mainspring_weight_quantize(const int64_t* a) {
    const Weight weight = weight_at(a);
    const int N = weight.N, K = weight.K, group = weight.group;
    with_dtype(Dtype(a[7]), [&](auto number) {
        using T = decltype(number);
        for_panels(N, int(a[8]), [&](int p, int columns) {
            std::vector<T> copy;
            const T* rows = rows_of_panel(at<const T>(a[6]), p, N, K, a[5], copy);
            char* data = (char*)weight.data;
            if (weight.kind == WeightKind::int8)
                quantize_weight<8>(rows, columns, K, group, data + p * Quantized<8>{data, N, K, group}.panel_bytes());
            else if (weight.kind == WeightKind::int4)
                quantize_weight<4>(rows, columns, K, group, data + p * Quantized<4>{data, N, K, group}.panel_bytes());
            else
                quantize_nf4(rows, columns, K, group, data + p * Coded{data, N, K, group}.panel_bytes());
        });
    });
}

// Values [N, K], a byte each, and fp32 scales [N, groups] → panels. Word 8: of 4 bits zeros [N, groups], of `coded` the
// codebook [16].
EXPORT void mainspring_weight_pack_quantized(const int64_t* a) {
    const Weight weight = weight_at(a);
    const int N = weight.N, K = weight.K, group = weight.group, groups = ceil_div(K, group);
    char* data = (char*)weight.data;
    for_panels(N, int(a[9]), [&](int p, int columns) {
        std::vector<uint8_t> copy;
        std::vector<float> scales_copy, zeros_copy;
        const uint8_t* q = rows_of_panel(at<const uint8_t>(a[6]), p, N, K, a[5], copy);
        const float* scales = rows_of_panel(at<const float>(a[7]), p, N, groups, a[5], scales_copy);
        if (weight.kind == WeightKind::int8) {
            pack_quantized<8>(q, scales, nullptr, columns, K, group, data + p * Quantized<8>{data, N, K, group}.panel_bytes());
        } else if (weight.kind == WeightKind::int4 || weight.kind == WeightKind::fp4) {
            const float* zeros = rows_of_panel(at<const float>(a[8]), p, N, groups, a[5], zeros_copy);
            pack_quantized<4>(q, scales, zeros, columns, K, group, data + p * Quantized<4>{data, N, K, group}.panel_bytes());
        } else {
            pack_coded(q, scales, at<const float>(a[8]), columns, K, group, data + p * Coded{data, N, K, group}.panel_bytes());
        }
    });
}

// ids [count] of rows → those rows [count, K], in a dtype (the weight's own where it is not quantized).
EXPORT void mainspring_weight_rows(const int64_t* a) {
    const int64_t* ids = at<const int64_t>(a[6]);
    with_weight_and_rows(weight_at(a), Dtype(a[9]), [&](const auto& weight, auto number) {
        auto* out = at<decltype(number)>(a[8]);
        run_team(int(a[10]), [&](Team& team, int rank) {
            const Share mine(a[7], rank, team.size);
            for (int64_t i = mine.begin; i < mine.end; ++i)
                read_row(weight, a[5] ? place_of(int(ids[i]), weight.N) : int(ids[i]), out + i * weight.K);
        });
    });
}

// y [M, N] = x [M, K] * weight + bias [N], all of one dtype (likewise). Columns are in the order of the panels. A weight
// whose sixth word is 2 has rows [N, K] in place of panels; they are packed, used and forgotten. For up to FEW rows of x,
// each thread packs one panel at a time. For more rows, all threads pack many panels at a time, because x is packed again
// for each of these pieces.
EXPORT void mainspring_weight_linear(const int64_t* a) {
    constexpr int FEW = 32, SLAB_BYTES = 8 << 20;
    const Product product = {weight_at(a), Dtype(a[11]), at<void>(a[6]), a[7], int(a[8]), at<void>(a[10]), a[2], at<void>(a[9])};
    const int threads = int(a[12]);
    static thread_local Workspace workspace, panels;
    const auto by_all = [&](const Product& part) {
        void* memory = workspace.of(workspace_bytes(part.weight, part.rows, threads));
        run_team(threads, [&](Team& team, int rank) { multiply(part, memory, team, rank); });
    };
    if (a[5] != 2) return by_all(product);
    with_dtype(product.dtype, [&](auto number) {
        using T = decltype(number);
        const int N = product.weight.N, K = product.weight.K;
        const T* rows = (const T*)product.weight.data;
        const auto part_of = [&](int first, int columns, const T* packed) {
            Product part = product;
            part.weight.data = packed, part.weight.N = columns;
            part.y = (T*)product.y + first;
            if (product.bias) part.bias = (const T*)product.bias + first;
            return part;
        };
        if (product.rows <= FEW)
            return for_panels(N, threads, [&](int p, int columns) {
                T* packed = (T*)panels.of(sizeof(T) * PANEL * K);
                pack_panel(rows + (size_t)p * PANEL * K, columns, K, packed);
                const Product part = part_of(p * PANEL, columns, packed);
                Team alone(1);
                multiply(part, workspace.of(workspace_bytes(part.weight, part.rows, 1)), alone, 0);
            });
        const int slab = PANEL * std::max<int>(1, SLAB_BYTES / (sizeof(T) * PANEL * std::max(1, K)));
        for (int first = 0; first < N; first += slab) {
            const int columns = std::min(slab, N - first);
            T* packed = (T*)panels.of(sizeof(T) * columns * K);
            pack_plain(Packed<T>{packed, columns, K}, false, rows + (size_t)first * K, threads);
            by_all(part_of(first, columns, packed));
        }
    });
}
