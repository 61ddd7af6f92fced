// The weight of a linear layer, of any type there is, and an instance of a function for each.
#pragma once

#include "dtypes.h"
#include "linear.h"

namespace mainspring {

enum class WeightKind : int64_t { fp32 = 0, bf16 = 1, fp16 = 2, int4 = 4, coded = 5, fp4 = 6, int8 = 8 };  // as weights.py numbers them

struct Weight {
    WeightKind kind;
    const void* data;  // packed: see linear.h
    int N, K, group;  // of K; 0 where the weight is not quantized
};

// Calls body with the `Packed`, `Quantized` or `Coded` that `weight` is.
template <class Body>
inline void with_weight(const Weight& weight, Body&& body) {
    const int N = weight.N, K = weight.K, group = weight.group;
    switch (weight.kind) {
        case WeightKind::fp32: return body(Packed<float>{(const float*)weight.data, N, K});
        case WeightKind::bf16: return body(Packed<bf16>{(const bf16*)weight.data, N, K});
        case WeightKind::fp16: return body(Packed<fp16>{(const fp16*)weight.data, N, K});
        case WeightKind::int8: return body(Quantized<8>{(char*)weight.data, N, K, group});
        case WeightKind::int4: return body(Quantized<4>{(char*)weight.data, N, K, group});
        case WeightKind::fp4: return body(Quantized<4, true>{(char*)weight.data, N, K, group});
        case WeightKind::coded: return body(Coded{(char*)weight.data, N, K, group});
    }
}

// The same, and a number of the type of the rows that it takes and gives: a plain weight's own, `dtype` for a quantized one.
template <class Body>
inline void with_weight_and_rows(const Weight& weight, Dtype dtype, Body&& body) {
    with_weight(weight, [&](const auto& packed) {
        using T = std::decay_t<decltype(*packed.data)>;
        if constexpr (std::is_same<T, char>::value)
            with_dtype(dtype, [&](auto number) { body(packed, number); });
        else
            body(packed, T());
    });
}

// Row `row` of a packed weight → out [K]: an embedding.
template <class T>
void read_row(const Packed<T>& weight, int row, T* out) {
    using W = typename Word<T>::type;
    constexpr int per_word = sizeof(W) / sizeof(T);
    const int K = weight.K, columns = std::min(PANEL, weight.N - row / PANEL * PANEL), n = row % PANEL;
    const T* panel = weight.data + (size_t)(row - n) * K;
    for (int k = 0; k < K; ++k) {
        const bool odd = k - k % per_word + per_word > K;  // the last, which has a word for itself
        const T* from = panel + (size_t)k / per_word * columns * per_word + (odd ? n : n * per_word + k % per_word);
        out[k] = *from;
    }
}
constexpr int PIECE = 128;  // values of a row that are read together

// fp32 values → out [count].
template <class Y>
void store_piece(const float* values, int count, Y* out) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(values + i));
    if (i < count) store_n(out + i, load(values + i), count - i);
}
template <int BITS, bool FP4, class Y>
void read_row(const Quantized<BITS, FP4>& weight, int row, Y* out) {
    constexpr int PER_WORD = 32 / BITS;
    const int n = row % PANEL, group = weight.group;
    const char* from = weight.data + row / PANEL * weight.panel_bytes();
    alignas(64) uint8_t q[PIECE] = {};
    alignas(64) float values[PIECE];
    for (int k0 = 0; k0 < weight.K; k0 += group, from += weight.group_bytes()) {
        const fp16* parameters = (const fp16*)(from + (size_t)group * PANEL * BITS / 8);
        const float scale = load_one(parameters + n), zero_point = BITS == 8 ? 128 : load_one(parameters + PANEL + n);
        for (int i0 = 0, end = std::min(group, weight.K - k0); i0 < end; i0 += PIECE) {
            const int count = std::min(PIECE, group - i0);  // a multiple of 32
            const char* word_of_row = from + ((size_t)i0 / PER_WORD * PANEL + n) * 4;
            for (int i = 0; i < count; i += PER_WORD, word_of_row += PANEL * 4) {
                uint32_t word;
                std::memcpy(&word, word_of_row, 4);
                const uint32_t low = BITS == 8 ? word : word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
                std::memcpy(q + i, &low, 4);
                if (BITS == 4) std::memcpy(q + i + 4, &high, 4);
            }
            if (FP4)
                for (int i = 0; i < count; i += 4 * LANES) store_bytes(q + i, look_up(TWICE_FP4, load_bytes(q + i)));
            for (int i = 0; i < count; i += 32)
                for (int j = i; j < i + 32; ++j) values[j] = scale * (q[j] - zero_point);
            store_piece(values, std::min(PIECE, end - i0), out + k0 + i0);
        }
    }
}
template <class Y>
void read_row(const Coded& weight, int row, Y* out) {
    const int n = row % PANEL, group = weight.group;
    const char* panel = weight.data + row / PANEL * weight.panel_bytes();
    const float* codebook = (const float*)panel;
    const char* from = panel + Coded::CODES * sizeof(float);
    float scaled[Coded::CODES], values[PIECE];
    for (int k0 = 0; k0 < weight.K; k0 += group, from += weight.group_bytes()) {
        const float scale = ((const float*)(from + weight.values_bytes()))[n];
        for (int code = 0; code < Coded::CODES; ++code) scaled[code] = scale * codebook[code];
        for (int i0 = 0; i0 < group; i0 += PIECE) {
            const int count = std::min(PIECE, group - i0);
            const uint32_t* words = (const uint32_t*)from + i0 / Coded::PER_WORD * PANEL + n;
            for (int i = 0; i < count; i += Coded::PER_WORD, words += PANEL)
                for (int j = 0; j < Coded::PER_WORD; ++j) values[i + j] = scaled[*words >> (4 * j) & 15];
            store_piece(values, count, out + k0 + i0);
        }
    }
}

}  // namespace mainspring
