// A matrix product within a running team, described by plain values: the instances of linear.h are compiled once, in
// products.cpp, and everybody calls them here.
#pragma once

#include "fused.h"
#include "team.h"
#include "weights.h"

namespace mainspring {

struct Product {
    Weight weight;
    Dtype dtype;  // of x, y, bias and residual
    const void* x;  // [rows, K]; only where rows are few may each member of the team have one of its own
    int64_t x_stride;  // in elements, as is y_stride
    int rows;
    void* y;  // [rows, N]; gated: [rows, N / 2]
    int64_t y_stride;
    const void* bias = nullptr;  // [N]
    const void* residual = nullptr;  // is added; may be y. Not where gated.
    bool gated = false;  // the weight's rows are interleaved, and y is act(gate) * up
    Activation activation = Activation::silu;
};

// Every member calls it with the same values. None may read y, or begin another product with this workspace, before a
// barrier.
void multiply(const Product& product, void* workspace, Team& team, int rank);

// Bytes of workspace for up to so many rows.
size_t workspace_bytes(const Weight& weight, int rows, int threads);

}  // namespace mainspring
