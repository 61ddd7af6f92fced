// Numbers in memory by their dtype, and a function's instance for each.
#pragma once

#include "functions.h"

namespace mainspring {

enum class Dtype : int64_t { fp32 = 0, bf16 = 1, fp16 = 2, fp8 = 3 };  // as native_backend.py numbers them

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : dtype == Dtype::fp8 ? 1 : 2; }

// Calls body with a number of the type that `dtype` stands for.
template <class Body>
inline void with_dtype(Dtype dtype, Body&& body) {
    switch (dtype) {
        case Dtype::fp32: return body(float());
        case Dtype::bf16: return body(bf16());
        default: return body(fp16());
    }
}
template <class Body>
inline void with_cache_dtype(Dtype dtype, Body&& body) {
    if (dtype == Dtype::fp8) return body(fp8());
    with_dtype(dtype, body);
}

// Stores the first n lanes to element `offset` of `out`.
inline void store_as(Dtype dtype, void* out, int64_t offset, F32 numbers, int n) {
    with_cache_dtype(dtype, [&](auto t) { store_n((decltype(t)*)out + offset, numbers, n); });
}

}  // namespace mainspring
