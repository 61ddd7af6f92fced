#include "products.h"

namespace mainspring {

namespace {

template <Activation ACT>
struct Act {
    F32 operator()(F32 x) const { return activate<ACT>(x); }
};

constexpr int ROWS_AT_ONCE = 512;  // more are no faster, and packed they would take much memory

template <class T, class Typed>
void multiply_typed(const Product& p, const Typed& weight, void* workspace, Team& team, int rank) {
    for (int first = 0; first < p.rows; first += ROWS_AT_ONCE) {
        if (first) team.barrier();
        const int rows = std::min(ROWS_AT_ONCE, p.rows - first);
        const T *x = (const T*)p.x + first * p.x_stride, *bias = (const T*)p.bias;
        const T* residual = p.residual ? (const T*)p.residual + first * p.y_stride : nullptr;
        T* y = (T*)p.y + first * p.y_stride;
        const auto with = [&](const auto& epilogue) {
            linear(x, p.x_stride, rows, weight, epilogue, workspace, rank, team.size, [&] { team.barrier(); },
                   [&] { return team.take(); });
        };
        const auto with_gate = [&](auto act) {
            // Rows of FP4 are never interleaved. Compiling this for them would make the first start longer.
            if constexpr (!std::is_same<Typed, Quantized<4, true>>::value) with(Gated<decltype(act), T>{y, p.y_stride, bias});
        };
        if (!p.gated)
            with(Store<T>{y, p.y_stride, bias, residual});
        else if (p.activation == Activation::silu)
            with_gate(Act<Activation::silu>());
        else if (p.activation == Activation::gelu)
            with_gate(Act<Activation::gelu>());
        else
            with_gate(Act<Activation::gelu_tanh>());
    }
}

}  // namespace

void multiply(const Product& p, void* workspace, Team& team, int rank) {
    const int N = p.weight.N, K = p.weight.K, group = p.weight.group;
    with_dtype(p.dtype, [&](auto t) {
        using T = decltype(t);
        switch (p.weight.kind) {
            case WeightKind::int8:
                return multiply_typed<T>(p, Quantized<8>{(char*)p.weight.data, N, K, group}, workspace, team, rank);
            case WeightKind::int4:
                return multiply_typed<T>(p, Quantized<4>{(char*)p.weight.data, N, K, group}, workspace, team, rank);
            case WeightKind::fp4:
                return multiply_typed<T>(p, Quantized<4, true>{(char*)p.weight.data, N, K, group}, workspace, team, rank);
            case WeightKind::coded:
                return multiply_typed<T>(p, Coded{(char*)p.weight.data, N, K, group}, workspace, team, rank);
            default:  // of the dtype itself
                return multiply_typed<T>(p, Packed<T>{(const T*)p.weight.data, N, K}, workspace, team, rank);
        }
    });
}

size_t workspace_bytes(const Weight& weight, int rows, int threads) {
    size_t bytes = 0;
    with_weight(weight, [&](const auto& typed) { bytes = linear_workspace(typed, std::min(rows, ROWS_AT_ONCE), threads); });
    return bytes;
}

}  // namespace mainspring
