// The products of tiled.h.
#include "tiled.h"

#include <algorithm>
#include <array>
#include <utility>

#include "groups.h"
#include "lines.h"
#include "team.h"

namespace moeserve {

void put_into_tile(const Rounded* const* rows, int64_t num_blocks, Format format, TiledGroup* out) {
  const Traits& traits = traits_of(format);
  for (int64_t g = 0; g < num_blocks; ++g, ++out)
    for (int r = 0; r < kTiledRows; ++r) {
      const Rounded& block = rows[r][g];
      std::memcpy(out->codes[r], block.codes, sizeof(block.codes));
      out->scales[r] = block.scale;
      if (traits.shift == Shift::kConstant) continue;
      out->sums[0][r] = traits.parts == 1 ? block.scaled_sum : block.scaled_sum_of_half[0];
      out->sums[1][r] = block.scaled_sum_of_half[1];
    }
}

void put_into_tile(const Pair* const* rows, int count, int64_t pairs, Pair* out) {
  for (int64_t p = 0; p < pairs; p += kLanes)
    for (int r = 0; r < kTiledRows; ++r, out += kLanes)
      if (r < count) std::memcpy(out, rows[r] + p, kLanes * sizeof(Pair));
}

#if defined(MOESERVE_HAS_TILES)
namespace {

constexpr int kBuffers = 4;  // Of products that were stored and are not added yet.

// Tiles 0 to 3 have products, 4 and 5 rows, 6 and 7 weights.
TileShapes shapes_of(const Traits& traits) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, kTiledRows, kTileRowBytes);
  for (int tile = 4; tile < 6; ++tile) shapes.set(tile, kTiledRows, kGroup / traits.parts);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, 8 / traits.parts, kTileRowBytes);
  return shapes;
}

// Formats whose shift is constant have it taken off their codes here, which are signed then.
template <Format F>
void unpack_half(const uint8_t* half, int64_t num_blocks, Group<F>* out) {
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  constexpr Traits format = traits_of(F);
  for_groups<F>(half, num_blocks, [&](int64_t g, Group<F> group) __attribute__((always_inline)) {
    if constexpr (format.shift == Shift::kConstant)
      for (Words& codes : group.codes) codes = (Words)((Bytes)codes - uint8_t(format.offset));
    out[g] = group;
  });
}

// The integers that a tile was stored as.
struct alignas(64) Products {
  Ints rows[kTiledRows];
};

// Tile T = products of a tile's codes with those of a group, or with the half of one that has two scales.
template <Format F, int T>
MOESERVE_INLINE void compute_products(const TiledGroup& rows, const Group<F>& weights, int part) {
  constexpr Traits format = traits_of(F);
  constexpr int own = T % 2;
  zero_tile<T>();
  load_tile<4 + own>(rows.codes[0] + part * kGroup / format.parts, kGroup);
  load_tile<6 + own>(weights.codes + part * 8 / format.parts, kTileRowBytes);
  if constexpr (format.shift == Shift::kConstant) {
    add_signed_products<T, 4 + own, 6 + own>();
  } else {
    add_unsigned_products<T, 4 + own, 6 + own>();
  }
}

// Adds the products of a group to the sums of rows; see add_part of quantised.cpp. rest: of remainders.
template <Format F, bool Twice>
MOESERVE_INLINE void add_scaled(const TiledGroup& rows, const Group<F>& weights, int part, const Products& products,
                                const Products& rest, Floats (&sums)[kTiledRows]) {
  constexpr Traits format = traits_of(F);
  const Floats scale = weights.scale[part], shift = weights.shift[part];
#pragma GCC unroll 16
  for (int r = 0; r < kTiledRows; ++r) {
    Ints whole = products.rows[r];
    if constexpr (Twice) whole = (whole << 8) + rest.rows[r];
    Floats value = __builtin_convertvector(whole, Floats);
    const Floats sum = moeserve::splat(rows.sums[part][r]);
    if constexpr (format.shift == Shift::kZero) value = moeserve::fma(-shift, sum, value);
    sums[r] = moeserve::fma(value, scale * moeserve::splat(rows.scales[r]), sums[r]);
    if constexpr (format.shift == Shift::kMin) sums[r] = moeserve::fma(shift, sum, sums[r]);
    if constexpr (format.shift == Shift::kSuperMin) sums[r] = moeserve::fma(-shift, sum, sums[r]);
  }
}

// Products, the store of the products before them and the sums of earlier ones take turns: the tile unit would wait for
// stores in a row, and sums for their stores.
template <Format F, bool Twice>
void multiply_half(const TiledGroup* rows, const Group<F>* weights, int64_t num_groups, float* out, int64_t stride) {
  constexpr int parts = traits_of(F).parts;
  const int64_t count = num_groups * parts;
  Products products[kBuffers], rest[Twice ? kBuffers : 1];
  Floats sums[kTiledRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTiledRows; ++r) sums[r] = Floats{};
  const auto turn = [&](auto number, int64_t i) __attribute__((always_inline)) {
    constexpr int now = number(), before = (now + 3) % kBuffers, oldest = (now + 1) % kBuffers;
    if (i < count) {
      compute_products<F, now % 2>(rows[i / parts], weights[i / parts], int(i % parts));
      if constexpr (Twice)
        compute_products<F, 2 + now % 2>(rows[num_groups + i / parts], weights[i / parts], int(i % parts));
    }
    if (i >= 1 && i <= count) {
      store_tile<before % 2>(&products[before], kTileRowBytes);
      if constexpr (Twice) store_tile<2 + before % 2>(&rest[before], kTileRowBytes);
    }
    const int64_t done = i - 3;
    if (done >= 0 && done < count)
      add_scaled<F, Twice>(rows[done / parts], weights[done / parts], int(done % parts), products[oldest],
                           rest[Twice ? oldest : 0], sums);
  };
  for (int64_t i = 0; i < count + 3; i += kBuffers) {
    turn(std::integral_constant<int, 0>(), i);
    turn(std::integral_constant<int, 1>(), i + 1);
    turn(std::integral_constant<int, 2>(), i + 2);
    turn(std::integral_constant<int, 3>(), i + 3);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTiledRows; ++r) store(out + r * stride, sums[r]);
}

struct Kernel {
  int64_t group_bytes;
  void (*unpack)(const uint8_t* panel, const Quantised& weights, uint8_t* out);
  void (*multiply[2])(const TiledGroup* rows, const uint8_t* groups, int64_t num_groups, Columns* sums);
};

template <Format F>
void unpack(const uint8_t* panel, const Quantised& weights, uint8_t* out) {
  auto* groups = reinterpret_cast<Group<F>*>(out);
  const int64_t num_blocks = weights.depth / traits_of(F).depth();
  unpack_half<F>(panel, num_blocks, groups);
  unpack_half<F>(panel + weights.half_bytes(), num_blocks, groups + weights.groups());
}

template <Format F, bool Twice>
void multiply(const TiledGroup* rows, const uint8_t* groups, int64_t num_groups, Columns* sums) {
  const auto* weights = reinterpret_cast<const Group<F>*>(groups);
  constexpr int64_t stride = sizeof(Columns) / sizeof(float);
  multiply_half<F, Twice>(rows, weights, num_groups, reinterpret_cast<float*>(&sums->low), stride);
  multiply_half<F, Twice>(rows, weights + num_groups, num_groups, reinterpret_cast<float*>(&sums->high), stride);
}

template <Format F>
constexpr Kernel kernel() {
  if constexpr (!takes_rounded(F))
    return {};
  else if constexpr (traits_of(F).bits == 8)
    return {sizeof(Group<F>), &unpack<F>, {&multiply<F, false>, &multiply<F, true>}};
  else
    return {sizeof(Group<F>), &unpack<F>, {&multiply<F, false>, nullptr}};
}

template <size_t... F>
constexpr std::array<Kernel, sizeof...(F)> all_kernels(std::index_sequence<F...>) {
  return {kernel<Format(F)>()...};
}

constexpr auto kKernels = all_kernels(std::make_index_sequence<size_t(Format::kCount)>());

constexpr int64_t kStepBytes = kLanes * 2 * kTileRowBytes;  // Of the weights of a panel at 32 depths.
constexpr int64_t kTilePairs = kTiledRows * kLanes;

// The weights of two depths side by side: those of the first 16 columns, then those of the others.
void pair_panel(const Bf16* panel, int64_t depth, uint8_t* out) {
  for (int64_t k = 0; k < 2 * num_pairs(depth); k += 2, panel += 2 * kPanelColumns, out += 2 * kTileRowBytes) {
    Words first{}, second{};
    __builtin_prefetch((const char*)panel + 2048);
    __builtin_prefetch((const char*)panel + 2112);
    if (k < depth) std::memcpy(&first, panel, sizeof(first));
    if (k + 1 < depth) std::memcpy(&second, panel + kPanelColumns, sizeof(second));
    const Words low = (first & 0xffffu) | second << 16, high = first >> 16 | (second & 0xffff0000u);
    std::memcpy(out, &low, sizeof(low));
    std::memcpy(out + kTileRowBytes, &high, sizeof(high));
  }
}

// Products of one tile of rows, or of two, with the weights of some depths.
template <bool Two>
void multiply_depths(const Pair* first, const Pair* second, const uint8_t* pairs, int64_t num_steps, Columns* sums) {
  zero_tile<0>(), zero_tile<1>();
  if constexpr (Two) zero_tile<2>(), zero_tile<3>();
  for (int64_t s = 0; s < num_steps; ++s, pairs += kStepBytes) {
    load_tile<4>(first + s * kTilePairs, kTileRowBytes);
    load_tile<6>(pairs, 2 * kTileRowBytes);
    add_pair_products<0, 4, 6>();
    load_tile<7>(pairs + kTileRowBytes, 2 * kTileRowBytes);
    add_pair_products<1, 4, 7>();
    if constexpr (Two) {
      load_tile<5>(second + s * kTilePairs, kTileRowBytes);
      add_pair_products<2, 5, 6>();
      add_pair_products<3, 5, 7>();
    }
  }
  store_tile<0>(&sums->low, sizeof(Columns));
  store_tile<1>(&sums->high, sizeof(Columns));
  if constexpr (Two) {
    store_tile<2>(&sums[kTiledRows].low, sizeof(Columns));
    store_tile<3>(&sums[kTiledRows].high, sizeof(Columns));
  }
}

uint8_t* room_for_pairs(int64_t depth) {
  static thread_local Lines<uint8_t> room;
  room.reserve(num_pairs(depth) * 2 * kTileRowBytes);
  return room.data();
}

}  // namespace

TiledPairs::TiledPairs(const Bf16* panel, int64_t depth)
    : pairs_(room_for_pairs(depth)), depth_(depth), block_depth_(depth) {
  pair_panel(panel, depth, room_for_pairs(depth));
}

TiledPairs::TiledPairs(const Quantised& weights, const uint8_t* panel)
    : pairs_(expanded_panel(weights, panel)), depth_(weights.depth), half_bytes_(weights.half_bytes()) {
  const Traits& traits = traits_of(weights.format);
  scales_ = panel + (traits.super_bytes() ? 0 : traits.code_bytes());
  block_depth_ = traits.depth(), block_bytes_ = traits.block_bytes();
}

void TiledPairs::multiply(const Pair* tiles, int num_rows, Columns* sums) const {
  const int rows[2] = {std::min(num_rows, kTiledRows), std::max(num_rows - kTiledRows, 0)};
  TileShapes shapes;
  for (const int tile : {0, 1, 4}) shapes.set(tile, rows[0], kTileRowBytes);
  for (const int tile : {2, 3, 5})
    if (rows[1]) shapes.set(tile, rows[1], kTileRowBytes);
  for (const int tile : {6, 7}) shapes.set(tile, kLanes, kTileRowBytes);
  shape_tiles(shapes);
  const auto multiply = rows[1] ? multiply_depths<true> : multiply_depths<false>;
  const Pair* second = tiles + kTiledRows * num_pairs(depth_);
  if (!scales_) {
    multiply(tiles, second, pairs_, num_pairs(depth_) / kLanes, sums);
    return release_tiles();
  }
  std::fill_n(sums, num_rows, Columns{});
  const int64_t num_steps = block_depth_ / kPanelColumns;
  for (int64_t b = 0; b < depth_ / block_depth_; ++b) {
    Columns products[2 * kTiledRows];
    const int64_t step = b * num_steps;
    multiply(tiles + step * kTilePairs, second + step * kTilePairs, pairs_ + step * kStepBytes, num_steps, products);
    const float *low = reinterpret_cast<const float*>(scales_ + b * block_bytes_),
                *high = reinterpret_cast<const float*>(scales_ + half_bytes_ + b * block_bytes_);
    for (int r = 0; r < num_rows; ++r) {
      sums[r].low = moeserve::fma(products[r].low, load(low), sums[r].low);
      sums[r].high = moeserve::fma(products[r].high, load(high), sums[r].high);
    }
  }
  release_tiles();
}

TiledPanel::TiledPanel(const Quantised& weights, const uint8_t* panel, bool twice) : weights_(weights), twice_(twice) {
  static thread_local Lines<uint8_t> room;
  const Kernel& kernel = kKernels[int(weights.format)];
  room.reserve(2 * weights.groups() * kernel.group_bytes);
  kernel.unpack(panel, weights, room.data());
  groups_ = room.data();
  shape_tiles(shapes_of(traits_of(weights.format)));
}

TiledPanel::~TiledPanel() { release_tiles(); }

void TiledPanel::multiply(const TiledGroup* tile, Columns* sums) const {
  kKernels[int(weights_.format)].multiply[twice_](tile, groups_, weights_.groups(), sums);
}
#else
TiledPairs::TiledPairs(const Bf16*, int64_t) {}
TiledPairs::TiledPairs(const Quantised&, const uint8_t*) {}
void TiledPairs::multiply(const Pair*, int, Columns*) const {}
TiledPanel::TiledPanel(const Quantised& weights, const uint8_t*, bool) : weights_(weights) {}
TiledPanel::~TiledPanel() {}
void TiledPanel::multiply(const TiledGroup*, Columns*) const {}
#endif

}  // namespace moeserve

// Computes `count` times 64 products of tiles that stay in registers, of pairs or of groups of 32 bytes, on all threads: what
// products in tiles cannot be faster than. Nothing where there are no tiles.
extern "C" void moeserve_multiply_tiles(int64_t count, int64_t of_pairs) {
  using namespace moeserve;
#if defined(MOESERVE_HAS_TILES)
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.set(tile, kTiledRows, of_pairs || tile < 4 ? kTileRowBytes : kGroup);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, of_pairs ? kLanes : kLanes / 2, kTileRowBytes);
  for_shared(count, 1, [&](int64_t) {
    shape_tiles(shapes);
    for (int i = 0; i < 16; ++i) {
      if (of_pairs) {
        add_pair_products<0, 4, 6>(), add_pair_products<1, 4, 7>(), add_pair_products<2, 5, 6>(), add_pair_products<3, 5, 7>();
      } else {
        add_signed_products<0, 4, 6>(), add_signed_products<1, 4, 7>();
        add_signed_products<2, 5, 6>(), add_signed_products<3, 5, 7>();
      }
    }
    release_tiles();
  });
#else
  (void)count, (void)of_pairs;
#endif
}

// 1 if rows are multiplied in tiles.
extern "C" const int64_t moeserve_has_tiles = moeserve::kHasTiles;

// 1 if products of pairs are summed as tiles do it.
extern "C" const int64_t moeserve_sums_as_tiles = moeserve::kSumsAsTiles;
