// Six rows by two vectors of sums, for AVX2, whose 16 registers hold them, two vectors of the weight, a number of x, and a
// mask. In assembly, because gcc keeps some of the sums in memory. Each multiply-add to such a sum waits for its store and
// load, and these waits may be longer than all the other work (seen: products 4% slower, attention over prompts a sixth).
#pragma once

#include "simd.h"

#if MAINSPRING_AVX2
namespace mainspring {

struct SixRows {
    F32 a0, a1, b0, b1, c0, c1, d0, d1, e0, e1, f0, f1;

    // of(row, vector)
    template <class Of>
    explicit SixRows(Of&& of)
        : a0(of(0, 0)), a1(of(0, 1)), b0(of(1, 0)), b1(of(1, 1)), c0(of(2, 0)), c1(of(2, 1)), d0(of(3, 0)), d1(of(3, 1)),
          e0(of(4, 0)), e1(of(4, 1)), f0(of(5, 0)), f1(of(5, 1)) {}

    void store_to(float* to, int64_t row) const {
        const F32 all[][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}, {e0, e1}, {f0, f1}};
        for (int r = 0; r < 6; ++r) store(to + r * row, all[r][0]), store(to + r * row + LANES, all[r][1]);
    }
};

// The output operands: the sums of a SixRows. They count twice each; an asm may have 30 operands.
#define MAINSPRING_SIX_ROWS(s) \
    [a0] "+x"(s.a0), [a1] "+x"(s.a1), [b0] "+x"(s.b0), [b1] "+x"(s.b1), [c0] "+x"(s.c0), [c1] "+x"(s.c1), \
    [d0] "+x"(s.d0), [d1] "+x"(s.d1), [e0] "+x"(s.e0), [e1] "+x"(s.e1), [f0] "+x"(s.f0), [f1] "+x"(s.f1)
#define MAINSPRING_SIX_ROWS_CLOBBERS "xmm13", "xmm14", "xmm15"

// A row's number at address `x` times both vectors.
#define MAINSPRING_ROW(sum, x) \
    "vbroadcastss " x ", %%ymm15\n" \
    "vfmadd231ps %%ymm13, %%ymm15, %[" #sum "0]\n" \
    "vfmadd231ps %%ymm14, %%ymm15, %[" #sum "1]\n"

// Pairs of bf16 at two addresses: `even` rows times their lower halves, then `odd` rows times the upper ones. The operand
// [mask] has 0xffff0000 in each lane.
#define MAINSPRING_PAIRS(w0, w1, even, odd) \
    "vmovdqu " w0 ", %%ymm13\n vmovdqu " w1 ", %%ymm14\n" \
    "vpslld $16, %%ymm13, %%ymm13\n vpslld $16, %%ymm14, %%ymm14\n" even \
    "vpand " w0 ", %[mask], %%ymm13\n vpand " w1 ", %[mask], %%ymm14\n" odd

}  // namespace mainspring
#endif
