// Registers of AMX: eight tiles of up to 16 rows of 64 bytes, and one instruction that multiplies two of them.
//
// C[rows][16] += A[rows][64] * B[64][16], of signed and unsigned bytes, is TDPBSUD: whole numbers, exact in any order.
// C[rows][16] += A[rows][32] * B[32][16], of bf16, is TDPBF16PS: a row of A holds 16 pairs along K, a row of B one such pair
// of 16 columns. For an element of C the products of the even k are summed in order, those of the odd k too, both in fp32
// from zero, and then both sums are added, and the result to C (Intel's Software Developer's Manual; tests compare). So its
// bits depend on its row of A, its column of B and C alone, whatever other rows there are. Denormals become 0.
//
// The system has to allow a process to use them (build.py asks), and saves 8 KiB a thread for as long as tiles are set up;
// so whoever sets them up releases them.
#pragma once

#include <initializer_list>

#include "simd.h"

namespace mainspring {

constexpr int TILE_ROWS = 16;
constexpr int TILE_K = 32;         // values of bf16 in a row of A
constexpr int PAIRS = TILE_K / 2;  // rows of B

}  // namespace mainspring

#if MAINSPRING_AMX

#include <sys/syscall.h>
#include <unistd.h>

namespace mainspring {

// Asks the system for tiles, for all threads of the process.
inline bool allow_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

constexpr int C00 = 0, C01 = 1, C10 = 2, C11 = 3, B0 = 4, B1 = 5, A0 = 6, A1 = 7;  // two by two products at a time

// gcc's own names for these make a string of the tile's name, and only 8 bytes of a configuration their input.
template <int TILE>
MAINSPRING_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>  // rows lie `stride` bytes apart
MAINSPRING_INLINE void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
MAINSPRING_INLINE void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int C, int A, int B>
MAINSPRING_INLINE void tile_multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
MAINSPRING_INLINE void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Sets up the tiles for products of `upper` rows, in A0, C00 and C01, and of `lower` ones, in A1, C10 and C11; up to 16 each,
// of `row_bytes` in A. They are all zero then. Whoever has set a shape keeps it, and nobody else sets one, until it is released.
class TileShape {
  public:
    void set(int upper, int lower, int row_bytes = 64) {
        if (upper == upper_ && lower == lower_ && row_bytes == row_bytes_) return;
        upper_ = upper, lower_ = lower, row_bytes_ = row_bytes;
        Config config;
        for (int tile : {C00, C01}) config.shape(tile, upper, 64);
        for (int tile : {C10, C11}) config.shape(tile, lower, 64);
        for (int tile : {B0, B1}) config.shape(tile, row_bytes / 4, 64);
        config.shape(A0, upper, row_bytes), config.shape(A1, lower, row_bytes);
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~TileShape() {
        if (upper_) asm volatile("tilerelease");
    }

  private:
    int upper_ = 0, lower_ = 0, row_bytes_ = 0;

    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
        void shape(int tile, int count, int bytes) { rows[tile] = uint8_t(count), row_bytes[tile] = count ? bytes : 0; }
    };
};

// For as long as it lives, instructions treat denormals as tiles do: read and written, they are 0.
struct FlushDenormals {
    const unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
};

}  // namespace mainspring

#endif
