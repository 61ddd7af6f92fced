// What lies between the matrix products: norms, activations, rotary embedding, and keys and values into the cache. All
// arithmetic is fp32, whatever the dtype; a row's bits depend on that row alone.
#pragma once

#include <algorithm>

#include "dtypes.h"
#include "functions.h"
#include "team.h"

namespace mainspring {

// Elements below which waking the team costs more than it saves.
constexpr int64_t WORTH_A_TEAM = 1 << 14;

// Rows of a view with up to two strides: row i begins at (i / inner) * outer_stride + (i % inner) * inner_stride.
struct RowView {
    const void* data;
    int64_t rows, inner, outer_stride, inner_stride;
    int64_t at(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// Calls body(begin, end) for each member's share of `rows` rows of `width` elements.
template <class Body>
inline void share_rows(int64_t rows, int64_t width, int threads, Body&& body) {
    const int64_t wanted = rows * width < WORTH_A_TEAM ? 1 : std::min<int64_t>(threads, rows);
    run_team(int(wanted), [&](Team& team, int rank) {
        const Share share(rows, rank, team.size);
        body(share.begin, share.end);
    });
}

template <class T>
inline F32 load_up_to(const T* p, int64_t n) {
    return n >= LANES ? load(p) : load_n(p, int(n));
}
template <class T>
inline void store_up_to(T* p, F32 x, int64_t n) {
    if (n >= LANES)
        store(p, x);
    else
        store_n(p, x, int(n));
}

// ---------------------------------------------------------------- RMSNorm (Zhang & Sennrich 2019)

// The sum of squares, in four sums of vectors.
template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
    F32 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        for (int j = 0; j < 4; ++j) {
            const F32 v = load(x + d + j * LANES);
            sums[j] = fma(v, v, sums[j]);
        }
    for (; d < width; d += LANES) {
        const F32 v = load_up_to(x + d, width - d);
        sums[0] = fma(v, v, sums[0]);
    }
    return sum(add(add(sums[0], sums[2]), add(sums[1], sums[3])));
}

// out = x / rms(x) * (offset + weight); out may be x.
template <class T, class W>
inline void rms_norm_row(const T* x, const W* weight, int64_t width, float eps, float offset, T* out) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t n = width - d;
        const F32 factor = add(load_up_to(weight + d, n), set(offset));
        store_up_to(out + d, mul(mul(load_up_to(x + d, n), set(scale)), factor), n);
    }
}

// x += more, rounded.
template <class T>
inline void add_row(T* x, const T* more, int64_t width) {
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t n = width - d;
        store_up_to(x + d, add(load_up_to(x + d, n), load_up_to(more + d, n)), n);
    }
}

inline void rms_norm(
    const RowView& x, Dtype dtype, const void* weight, Dtype weight_dtype, int64_t width, float eps, float offset,
    void* out, int threads
) {
    with_dtype(dtype, [&](auto t) {
        with_dtype(weight_dtype, [&](auto w) {
            using T = decltype(t);
            using W = decltype(w);
            share_rows(x.rows, width, threads, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row)
                    rms_norm_row((const T*)x.data + x.at(row), (const W*)weight, width, eps, offset, (T*)out + row * width);
            });
        });
    });
}

// residual += x; x = rms_norm(residual). Contiguous [rows, width].
inline void add_rms_norm(
    void* x, void* residual, Dtype dtype, const void* weight, Dtype weight_dtype, int64_t rows, int64_t width, float eps,
    float offset, int threads
) {
    with_dtype(dtype, [&](auto t) {
        with_dtype(weight_dtype, [&](auto w) {
            using T = decltype(t);
            using W = decltype(w);
            share_rows(rows, width, threads, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; ++row) {
                    T *of_x = (T*)x + row * width, *total = (T*)residual + row * width;
                    add_row(total, of_x, width);
                    rms_norm_row(total, (const W*)weight, width, eps, offset, of_x);
                }
            });
        });
    });
}

// ---------------------------------------------------------------- gated activations

enum class Activation : int64_t { silu = 0, gelu = 1, gelu_tanh = 2, clamped = 3 };

template <Activation ACT>
inline F32 activate(F32 x) {
    if constexpr (ACT == Activation::silu) return silu(x);
    if constexpr (ACT == Activation::gelu) return gelu_precise(x);
    return gelu_tanh_precise(x);
}

template <Activation ACT, class T>
inline void act_and_mul_row(const T* gate, const T* up, int64_t width, T* out) {
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t n = width - d;
        store_up_to(out + d, mul(activate<ACT>(load_up_to(gate + d, n)), load_up_to(up + d, n)), n);
    }
}

// gpt-oss': (up + 1) * gate * sigmoid(1.702 * gate) of limited gate and up, interleaved. out may be gate_up.
template <class T>
inline void clamped_row(const T* gate_up, int64_t width, T* out) {
    const F32 limit = set(7), least = set(-7), one = set(1), slope = set(1.702f);
    for (int64_t d = 0; d < width; d += LANES) {
        const int64_t n = std::min<int64_t>(width - d, LANES);
        float both[2 * LANES] = {}, gate[LANES], up[LANES];
        store(both, load_up_to(gate_up + 2 * d, 2 * n));
        if (2 * n > LANES) store(both + LANES, load_up_to(gate_up + 2 * d + LANES, 2 * n - LANES));
        for (int j = 0; j < LANES; ++j) gate[j] = both[2 * j], up[j] = both[2 * j + 1];
        const F32 g = min(limit, load(gate)), u = min(limit, max(least, load(up)));  // in this order NaN stays
        store_up_to(out + d, mul(mul(add(u, one), g), sigmoid(mul(slope, g))), n);
    }
}

// act(gate) * up of rows [2 * width], gate first, `stride` apart → [rows, width].
inline void act_and_mul(
    const void* gate_up, int64_t stride, Dtype dtype, Activation activation, int64_t rows, int64_t width, void* out,
    int threads
) {
    with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        // 4: an activation takes as long as some loads and stores do
        share_rows(rows, 4 * width, threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const T* gate = (const T*)gate_up + row * stride;
                T* to = (T*)out + row * width;
                switch (activation) {
                    case Activation::silu: act_and_mul_row<Activation::silu>(gate, gate + width, width, to); break;
                    case Activation::gelu: act_and_mul_row<Activation::gelu>(gate, gate + width, width, to); break;
                    case Activation::clamped: clamped_row(gate, width, to); break;
                    default: act_and_mul_row<Activation::gelu_tanh>(gate, gate + width, width, to);
                }
            }
        });
    });
}

// ---------------------------------------------------------------- rotary embedding (Su et al. 2021)

// Heads of a step's tokens, strides in elements.
struct HeadView {
    void* data;
    int64_t heads, row_stride, head_stride;
};

// One head, in place: element i with i + half.
template <class T>
inline void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = half - i;
        const F32 a = load_up_to(x + i, n), b = load_up_to(x + half + i, n);
        const F32 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
        store_up_to(x + i, sub(mul(a, c), mul(b, s)), n);
        store_up_to(x + half + i, add(mul(b, c), mul(a, s)), n);
    }
}

// One head, in place: element 2i with 2i + 1.
template <class T>
inline void rotate_pairs(T* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = std::min<int64_t>(half - i, LANES);
        float even[LANES] = {}, odd[LANES] = {}, both[2 * LANES] = {};
        store(both, load_up_to(x + 2 * i, 2 * n));
        if (n > LANES / 2) store(both + LANES, load_up_to(x + 2 * i + LANES, 2 * n - LANES));
        for (int j = 0; j < LANES; ++j) even[j] = both[2 * j], odd[j] = both[2 * j + 1];
        const F32 a = load(even), b = load(odd), c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
        store(even, sub(mul(a, c), mul(b, s)));
        store(odd, add(mul(b, c), mul(a, s)));
        for (int j = 0; j < LANES; ++j) both[2 * j] = even[j], both[2 * j + 1] = odd[j];
        store_up_to(x + 2 * i, load(both), 2 * n);
        if (n > LANES / 2) store_up_to(x + 2 * i + LANES, load(both + LANES), 2 * n - LANES);
    }
}

template <class T>
inline void rotate_token(const HeadView& view, int64_t token, const float* cos_sin, int64_t half, bool interleaved) {
    for (int64_t head = 0; head < view.heads; ++head) {
        T* x = (T*)view.data + token * view.row_stride + head * view.head_stride;
        if (interleaved)
            rotate_pairs(x, cos_sin, cos_sin + half, half);
        else
            rotate_halves(x, cos_sin, cos_sin + half, half);
    }
}

// ---------------------------------------------------------------- into the cache

// One side of a layer's cache, in elements: block b, row r, head h begins at data + b * block + r * row + h * head.
struct CacheView {
    char* data;
    int64_t block, row, head;
};

template <class T, class C>
inline void append_token(const HeadView& from, int64_t token, int64_t dim, const CacheView& cache, int64_t block, int64_t row) {
    for (int64_t head = 0; head < from.heads; ++head) {
        const T* x = (const T*)from.data + token * from.row_stride + head * from.head_stride;
        C* to = (C*)cache.data + block * cache.block + row * cache.row + head * cache.head;
        if constexpr (std::is_same_v<T, C>)
            std::memcpy(to, x, dim * sizeof(T));
        else
            for (int64_t d = 0; d < dim; d += LANES) store_up_to(to + d, load_up_to(x + d, dim - d), dim - d);
    }
}

// A step's rotation and append, either of which may be left out.
struct TokensCall {
    int64_t tokens;
    Dtype dtype;
    HeadView query, key, value;
    int64_t key_dim, value_dim;
    const float* cos_sin;  // [tokens, rotary_dim], or null: no rotation
    int64_t cos_sin_stride, rotary_dim;
    bool interleaved;
    CacheView keys, values;  // keys.data null: nothing is appended
    Dtype cache_dtype;
    const int32_t *blocks, *rows;  // [tokens]
};

template <class T>
inline void rotate_and_append_tokens(const TokensCall& call, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        if (call.cos_sin) {
            const float* cos_sin = call.cos_sin + token * call.cos_sin_stride;
            rotate_token<T>(call.query, token, cos_sin, call.rotary_dim / 2, call.interleaved);
            rotate_token<T>(call.key, token, cos_sin, call.rotary_dim / 2, call.interleaved);
        }
        if (!call.keys.data) continue;
        const int64_t block = call.blocks[token], row = call.rows[token];
        with_cache_dtype(call.cache_dtype, [&](auto c) {
            using C = decltype(c);
            append_token<T, C>(call.key, token, call.key_dim, call.keys, block, row);
            append_token<T, C>(call.value, token, call.value_dim, call.values, block, row);
        });
    }
}

// Two tokens never have one place in the cache, but for padding rows, whose place is nobody's: they come last, in block 0,
// and whichever is written last stays.
inline void rotate_and_append(const TokensCall& call, int threads) {
    const int64_t heads = (call.cos_sin ? call.query.heads : 0) + 2 * call.key.heads;
    with_dtype(call.dtype, [&](auto t) {
        share_rows(call.tokens, heads * call.key_dim, threads, [&](int64_t begin, int64_t end) {
            rotate_and_append_tokens<decltype(t)>(call, begin, end);
        });
    });
}

}  // namespace mainspring
