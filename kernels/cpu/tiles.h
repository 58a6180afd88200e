// Tiles: registers of up to 16 rows of 64 bytes, and products of tiles of integers and of pairs of bfloat16 (AMX).
//
// Compiled for a machine that has them they are its instructions. With MOESERVE_TILES_IN_SOFTWARE they are computed to
// the same bits on any machine of the family, so that what uses them can be tested there. Elsewhere there are none.
#pragma once

#include "simd.h"

namespace moeserve {

constexpr int kTileHeight = 16;     // Rows.
constexpr int kTileRowBytes = 64;
constexpr int kNumTiles = 8;

// The shape of each tile, in the layout that the instruction reads.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) { rows[tile] = uint8_t(num_rows), row_bytes[tile] = uint16_t(num_bytes); }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(MOESERVE_TILES_IN_SOFTWARE) || defined(__AMX_TILE__)
#define MOESERVE_HAS_TILES
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

#if defined(MOESERVE_TILES_IN_SOFTWARE)

struct SoftwareTiles {
  TileShapes shapes;
  alignas(64) uint8_t bytes[kNumTiles][kTileHeight][kTileRowBytes];
};

static inline SoftwareTiles& software_tiles() {
  static thread_local SoftwareTiles tiles;
  return tiles;
}

static inline void shape_tiles(const TileShapes& shapes) {
  software_tiles() = {};
  software_tiles().shapes = shapes;
}

static inline void release_tiles() { software_tiles() = {}; }

template <int Tile>
static inline void zero_tile() { std::memset(software_tiles().bytes[Tile], 0, sizeof(software_tiles().bytes[Tile])); }

template <int Tile>
static inline void load_tile(const void* from, int64_t stride) {
  SoftwareTiles& tiles = software_tiles();
  zero_tile<Tile>();
  for (int r = 0; r < tiles.shapes.rows[Tile]; ++r)
    std::memcpy(tiles.bytes[Tile][r], static_cast<const uint8_t*>(from) + r * stride, tiles.shapes.row_bytes[Tile]);
}

template <int Tile>
static inline void store_tile(void* to, int64_t stride) {
  const SoftwareTiles& tiles = software_tiles();
  for (int r = 0; r < tiles.shapes.rows[Tile]; ++r)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles.bytes[Tile][r], tiles.shapes.row_bytes[Tile]);
}

// Byte: of B. Sums wrap, which the registers' unused bytes, zeros, leave as they are.
template <int C, int A, int B, typename Byte>
static inline void add_software_products() {
  SoftwareTiles& tiles = software_tiles();
  for (int m = 0; m < tiles.shapes.rows[C]; ++m) {
    Words sums;
    std::memcpy(&sums, tiles.bytes[C][m], sizeof(sums));
    for (int k = 0; k < tiles.shapes.rows[B]; ++k)
      for (int lane = 0; lane < kLanes; ++lane)
        for (int b = 0; b < 4; ++b)
          sums[lane] += uint32_t(int8_t(tiles.bytes[A][m][4 * k + b]) * Byte(tiles.bytes[B][k][4 * lane + b]));
    std::memcpy(tiles.bytes[C][m], &sums, sizeof(sums));
  }
}

// C += A B for signed bytes of both.
template <int C, int A, int B>
static inline void add_signed_products() { add_software_products<C, A, B, int8_t>(); }

// C += A B for signed bytes of A and unsigned ones of B.
template <int C, int A, int B>
static inline void add_unsigned_products() { add_software_products<C, A, B, uint8_t>(); }

// Not inlined: the compiler does not know that additions depend on how they are rounded.
template <int C, int A, int B>
[[gnu::noinline]] static void add_flushed_pairs() {
  SoftwareTiles& tiles = software_tiles();
  for (int m = 0; m < tiles.shapes.rows[C]; ++m) {
    Floats even{}, odd{}, sums;
    std::memcpy(&sums, tiles.bytes[C][m], sizeof(sums));
    for (int k = 0; k < tiles.shapes.rows[B]; ++k) {
      uint32_t x;
      Words weights;
      std::memcpy(&x, tiles.bytes[A][m] + 4 * k, sizeof(x));
      std::memcpy(&weights, tiles.bytes[B][k], sizeof(weights));
      even = fma((Floats)(Words{} + (x << 16)), (Floats)(weights << 16), even);
      odd = fma((Floats)(Words{} + (x & 0xffff0000u)), (Floats)(weights & 0xffff0000u), odd);
    }
    sums += even + odd;
    std::memcpy(tiles.bytes[C][m], &sums, sizeof(sums));
  }
}

// C += A B for pairs of bfloat16. A result is one chain of fused multiply-adds of the even numbers and one of the odd
// numbers, from zero over the depth in order, whose sum is added to C. Each is rounded to the nearest, ties to even;
// subnormal numbers count as zeros and become zeros.
template <int C, int A, int B>
static inline void add_pair_products() {
  const WithoutSubnormals flushed;
  add_flushed_pairs<C, A, B>();
}
#elif defined(__AMX_TILE__)
// Written out: the compiler's own functions take the numbers of tiles as text alone, and do not say that they read
// and write memory.
static inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

static inline void release_tiles() { asm volatile("tilerelease"); }

template <int Tile>
static inline void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(Tile)); }

template <int Tile>
static inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
static inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int C, int A, int B>
static inline void add_signed_products() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
static inline void add_unsigned_products() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
static inline void add_pair_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

}  // namespace moeserve
