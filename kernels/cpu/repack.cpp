// Weights before any product: rows of numbers into the panels of panels.h, rows of blocks into those of quantised.h.
#include <algorithm>
#include <array>
#include <utility>

#include "quantised.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int kMaxDepth = 256;  // Weights of the longest block.

// A block of one row: a byte for each code, unsigned, and the bytes of scales and shifts as they are in a panel.
struct Block {
  uint8_t codes[kMaxDepth];
  uint8_t super[4];     // The float16 of the scale, then that of the minimum; or one float32.
  uint8_t scales[64];   // By group, then by part.
  uint8_t shifts[16];   // By group, if not in the bytes of scales.
};

typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// As vectors: codes are read as vectors, which would wait for stores of single bytes.
inline void unpack_nibbles(const uint8_t* from, uint8_t* codes) {
  const Bytes both = load_bytes(from), low = both & 15, high = both >> 4;
  std::memcpy(codes, &low, sizeof(low));
  std::memcpy(codes + 16, &high, sizeof(high));
}

template <Format F>
void unpack_simple(const uint8_t* from, Block& block) {
  constexpr Traits format = traits_of(F);
  constexpr int scale_bytes = format.scale_bytes() / kLanes, shift_bytes = format.shift_bytes() / kLanes;
  std::memcpy(block.scales, from, scale_bytes);
  std::memcpy(block.shifts, from + scale_bytes, shift_bytes);
  from += scale_bytes + shift_bytes;
  if constexpr (format.bits == 4) {
    unpack_nibbles(from, block.codes);
  } else if constexpr (format.bits == 5) {
    uint32_t high;
    std::memcpy(&high, from, 4);
    unpack_nibbles(from + 4, block.codes);
    const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (int half = 0; half < 2; ++half, high >>= 16) {
      Bytes fifth = Bytes{} + uint8_t(high >> 8);
      fifth = __builtin_shufflevector(Bytes{} + uint8_t(high), fifth, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      const Bytes code = load_bytes(block.codes + 16 * half) | (((Bytes)((fifth & bit) != 0)) & 16);
      std::memcpy(block.codes + 16 * half, &code, sizeof(code));
    }
  } else {
    constexpr uint8_t flip = format.code == Code::kE4m3 ? 0 : 0x80;
    for (int i = 0; i < kGroup; ++i) block.codes[i] = from[i] ^ flip;
  }
}

// The twelve bytes with eight pairs of 6 bits of ggml's Q4_K and Q5_K.
void unpack_scales(const uint8_t* from, Block& block) {
  for (int g = 0; g < 4; ++g) {
    block.scales[g] = from[g] & 63;
    block.shifts[g] = from[g + 4] & 63;
    block.scales[g + 4] = (from[g + 8] & 15) | (from[g] >> 6) << 4;
    block.shifts[g + 4] = from[g + 8] >> 4 | (from[g + 4] >> 6) << 4;
  }
}

template <bool fifth_bit>
void unpack_q4_k(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from, 4);
  unpack_scales(from + 4, block);
  const uint8_t* high = from + 16;
  const uint8_t* low = fifth_bit ? high + 32 : high;
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < kGroup; ++i) {
      const uint8_t byte = low[g / 2 * kGroup + i];
      block.codes[g * kGroup + i] =
          (g % 2 ? byte >> 4 : byte & 15) | (fifth_bit ? (high[i] >> g & 1) << 4 : 0);
    }
}

void unpack_q6_k(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from + 208, 2);
  std::memcpy(block.scales, from + 192, 16);
  for (int half = 0; half < 2; ++half)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < kGroup; ++i) {
        const uint8_t low = from[half * 64 + quarter % 2 * 32 + i], high = from[128 + half * 32 + i];
        block.codes[half * 128 + quarter * 32 + i] =
            (quarter / 2 ? low >> 4 : low & 15) | (high >> 2 * quarter & 3) << 4;
      }
}

// Two bits of 256 codes: a byte has those of four groups.
void unpack_two_bits(const uint8_t* from, uint8_t* codes) {
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < kGroup; ++i) codes[g * kGroup + i] = from[g / 4 * kGroup + i] >> 2 * (g % 4) & 3;
}

// The third bits of codes, their others, low halves of sixteen scales of 6 bits, which lie around 32, and their high bits.
void unpack_q3_k(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from + 108, 2);
  for (int s = 0; s < 16; ++s) {
    const int low = from[96 + s % 8] >> 4 * (s / 8) & 15, high = from[104 + s % 4] >> 2 * (s / 4) & 3;
    block.scales[s] = uint8_t((low | high << 4) - 32);
  }
  unpack_two_bits(from + 32, block.codes);
  for (int g = 0; g < 8; ++g)
    for (int i = 0; i < kGroup; ++i) block.codes[g * kGroup + i] |= (from[i] >> g & 1) << 2;
}

// Bytes of a scale and a minimum for each 16 weights, codes, and the float16 of both.
void unpack_q2_k(const uint8_t* from, Block& block) {
  std::memcpy(block.scales, from, 16);
  unpack_two_bits(from + 16, block.codes);
  std::memcpy(block.super, from + 80, 4);
}

// Two high bits of each of eight scales of 6 bits, which lie around 32, then their low halves, then codes.
void unpack_iq4_xs(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from, 2);
  uint16_t high;
  std::memcpy(&high, from + 2, 2);
  for (int g = 0; g < 8; ++g) {
    const int low = from[4 + g / 2] >> 4 * (g % 2) & 15;
    block.scales[g] = uint8_t((low | (high >> 2 * g & 3) << 4) - 32);
    unpack_nibbles(from + 8 + 16 * g, block.codes + kGroup * g);
  }
}

// A float32, the scales of four times 16 weights, and the codes of two groups.
void unpack_nvfp4(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from, 4);
  std::memcpy(block.scales, from + 4, 4);
  for (int g = 0; g < 2; ++g) unpack_nibbles(from + 8 + 16 * g, block.codes + kGroup * g);
}

void unpack_fp8_block(const uint8_t* from, Block& block) {
  std::memcpy(block.super, from, 4);
  std::memcpy(block.codes, from + 4, 4 * kGroup);
}

template <Format F>
void unpack(const uint8_t* from, Block& block) {
  if constexpr (F == Format::kQ4_K || F == Format::kQ5_K)
    unpack_q4_k<F == Format::kQ5_K>(from, block);
  else if constexpr (F == Format::kQ6_K)
    unpack_q6_k(from, block);
  else if constexpr (F == Format::kQ3_K)
    unpack_q3_k(from, block);
  else if constexpr (F == Format::kQ2_K)
    unpack_q2_k(from, block);
  else if constexpr (F == Format::kIq4Xs)
    unpack_iq4_xs(from, block);
  else if constexpr (F == Format::kNvfp4)
    unpack_nvfp4(from, block);
  else if constexpr (F == Format::kFp8Block)
    unpack_fp8_block(from, block);
  else
    unpack_simple<F>(from, block);
}

// Turns the codes of two groups of 32 weights of 16 columns into vectors of four codes of each column: see
// Group::load_codes. first(c) and second(c) are where a group's codes of column c begin.
template <typename First, typename Second>
inline void transpose_codes(First first, Second second, Words (&out)[2 * 8]) {
  Floats rows[kLanes];
  for (int c = 0; c < kLanes; ++c) {
    std::memcpy(&rows[c], first(c), kGroup);
    std::memcpy(reinterpret_cast<uint8_t*>(&rows[c]) + kGroup, second(c), kGroup);
  }
  transpose_16x16(rows);
  for (int i = 0; i < kLanes; ++i) out[i] = (Words)rows[i];
}

// Writes bits `First` and up of the codes of a group, those of 8 / Width vectors of codes in the bytes of one vector.
template <int Width, int First>
inline void write_bits(const Words* codes, uint8_t* out) {
  constexpr int per_vector = 8 / Width;
  Words bits[Width] = {};
  for (int i = 0; i < 8; ++i)
    bits[i / per_vector] |= (codes[i] >> First & 0x01010101u * ((1u << Width) - 1)) << i % per_vector * Width;
  std::memcpy(out, bits, sizeof(bits));
}

// Writes the codes of a group.
template <Format F>
inline void write_codes(const Words* codes, uint8_t* out) {
  constexpr int bits = traits_of(F).bits;
  if constexpr (traits_of(F).code == Code::kE4m3) {
    for (int i = 0; i < 8; ++i)
      for (int b = 0; b < 4; ++b, out += kLanes) {
        const Bytes bytes = __builtin_convertvector((codes[i] >> (8 * b)) & 255u, Bytes);
        std::memcpy(out, &bytes, sizeof(bytes));
      }
    return;
  }
  if constexpr (bits == 8) return void(std::memcpy(out, codes, 8 * sizeof(Words)));
  constexpr int low_bits = bits < 4 ? 2 : 4, high_bits = bits - low_bits;
  write_bits<low_bits, 0>(codes, out);
  if constexpr (high_bits > 0) write_bits<high_bits, low_bits>(codes, out + 64 * low_bits);
}

// Writes one number of each column, `bytes` long; `of(c)` is where that of column c is.
template <int bytes, typename Of>
void write_numbers(Of of, uint8_t* out) {
  for (int c = 0; c < kLanes; ++c) std::memcpy(out + c * bytes, of(c), bytes);
}

// Writes a group of 16 columns.
template <Format F>
inline void write_group(const Block* columns, int group, const Words* codes, uint8_t* out) {
  constexpr Traits format = traits_of(F);
  constexpr int scale_bytes = format.scale_bytes() / kLanes, shift_bytes = format.shift_bytes() / kLanes;
  write_codes<F>(codes, out);
  out += format.code_bytes();
  for (int part = 0; part < format.parts; ++part, out += format.scale_bytes())
    write_numbers<scale_bytes>(
        [&](int c) { return columns[c].scales + (group * format.parts + part) * scale_bytes; }, out);
  write_numbers<shift_bytes>([&](int c) { return columns[c].shifts + group * shift_bytes; }, out);
}

// Writes a block of several groups, an even number of them.
template <Format F>
void write_block(const Block* columns, uint8_t* out) {
  constexpr Traits format = traits_of(F);
  // Bytes of one of a superblock's numbers.
  constexpr int width = format.scale == Scale::kSuper || format.scale == Scale::kSuperHalf ? 2 : 4;
  for (int i = 0; i < format.super_bytes() / (width * kLanes); ++i, out += width * kLanes)
    write_numbers<width>([&](int c) { return columns[c].super + width * i; }, out);
  for (int g = 0; g < format.groups; g += 2, out += 2 * format.group_bytes()) {
    Words codes[2 * 8];
    transpose_codes([&](int c) { return columns[c].codes + g * kGroup; },
                    [&](int c) { return columns[c].codes + (g + 1) * kGroup; }, codes);
    write_group<F>(columns, g, codes, out);
    write_group<F>(columns, g + 1, codes + 8, out + format.group_bytes());
  }
}

// Writes half a panel: 16 columns, which point to their rows of blocks, null for zeros.
template <Format F>
void write_half(const uint8_t* const* columns, int64_t num_blocks, uint8_t* out) {
  constexpr Traits format = traits_of(F);
  static const uint8_t zeros[256] = {};
  const auto read = [&](int64_t block, Block* blocks) {
    for (int c = 0; c < kLanes; ++c)
      unpack<F>(columns[c] ? columns[c] + block * format.row_bytes : zeros, blocks[c]);
  };
  Block blocks[kLanes], next[kLanes];
  if constexpr (format.groups > 1) {
    for (int64_t block = 0; block < num_blocks; ++block, out += format.block_bytes()) {
      read(block, blocks);
      write_block<F>(blocks, out);
    }
    return;
  }
  for (int64_t block = 0; block < num_blocks; block += 2, out += 2 * format.block_bytes()) {
    const bool has_next = block + 1 < num_blocks;
    read(block, blocks);
    if (has_next) read(block + 1, next);
    Words codes[2 * 8];
    transpose_codes([&](int c) { return blocks[c].codes; }, [&](int c) { return (has_next ? next : blocks)[c].codes; },
                    codes);
    write_group<F>(blocks, 0, codes, out);
    if (has_next) write_group<F>(next, 0, codes + 8, out + format.block_bytes());
  }
}

// Packs rows of blocks, each of `depth` weights.
template <Format F>
void pack_blocks(const uint8_t* const* columns, int64_t depth, int64_t num_columns, uint8_t* out) {
  constexpr Traits format = traits_of(F);
  const int64_t num_blocks = depth / format.depth();
  for_shared(num_columns / kLanes, 1, [&](int64_t half) {
    if (!half) count_progress();
    write_half<F>(columns + half * kLanes, num_blocks, out + half * num_blocks * format.block_bytes());
  });
}

using PackBlocks = void (*)(const uint8_t* const* columns, int64_t depth, int64_t num_columns, uint8_t* out);

template <size_t... F>
constexpr std::array<PackBlocks, sizeof...(F)> all_packers(std::index_sequence<F...>) {
  return {&pack_blocks<Format(F)>...};
}

constexpr auto kPackers = all_packers(std::make_index_sequence<size_t(Format::kCount)>());

// Sixteen numbers of a row from `from` on, or `count` of them and zeros, one in each 32 bits. null: zeros.
inline Words load_row(const float* from, int64_t count) {
  Words words{};
  if (from) std::memcpy(&words, from, std::min<int64_t>(count, kLanes) * sizeof(float));
  return words;
}

inline Words load_row(const Bf16* from, int64_t count) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Halves halves{};
  if (from) std::memcpy(&halves, from, std::min<int64_t>(count, kLanes) * sizeof(Bf16));
  return __builtin_convertvector(halves, Words);
}

// Writes the panel of 32 rows of `depth` numbers.
template <typename Number>
void write_panel(const Number* const* rows, int64_t depth, uint8_t* out) {
  constexpr bool is_bf16 = sizeof(Number) == 2;
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int64_t count = std::min<int64_t>(depth - k, kLanes);
    Floats words[2][kLanes];
    for (int c = 0; c < kLanes; ++c) {
      const Words low = load_row(rows[c] ? rows[c] + k : nullptr, count);
      const Words high = load_row(rows[kLanes + c] ? rows[kLanes + c] + k : nullptr, count);
      words[0][c] = (Floats)(is_bf16 ? low | high << 16 : low);
      words[1][c] = (Floats)high;
    }
    for (int half = 0; half < (is_bf16 ? 1 : 2); ++half) transpose_16x16(words[half]);
    for (int64_t i = 0; i < count; ++i)
      for (int half = 0; half < (is_bf16 ? 1 : 2); ++half, out += sizeof(Floats))
        std::memcpy(out, &words[half][i], sizeof(Floats));
  }
}

template <typename Number>
void pack_panels(const Number* rows, int64_t row_stride, int64_t depth, const int64_t* order, int64_t num_columns,
                 uint8_t* out) {
  for_shared(num_columns / kPanelColumns, 4, [&](int64_t panel) {
    const Number* of[kPanelColumns];
    for (int c = 0; c < kPanelColumns; ++c) {
      const int64_t row = order[panel * kPanelColumns + c];
      of[c] = row < 0 ? nullptr : rows + row * row_stride;
    }
    write_panel(of, depth, out + panel * kPanelColumns * depth * sizeof(Number));
  });
}

}  // namespace
}  // namespace moeserve

// Packs rows of `depth` numbers, float32 or bfloat16, `row_stride` numbers apart. order: as below.
extern "C" void moeserve_pack_panels(const void* rows, int64_t is_bf16, int64_t row_stride, int64_t depth,
                                     const int64_t* order, int64_t num_columns, uint8_t* out) {
  using namespace moeserve;
  if (is_bf16)
    pack_panels(static_cast<const Bf16*>(rows), row_stride, depth, order, num_columns, out);
  else
    pack_panels(static_cast<const float*>(rows), row_stride, depth, order, num_columns, out);
}

// Packs rows of blocks, each of `depth` weights, into panels. columns [num_columns] point to the row of each column,
// null for zeros; num_columns is a multiple of 32.
extern "C" void moeserve_pack_quantised(int64_t format, const uint8_t* const* columns, int64_t depth,
                                        int64_t num_columns, uint8_t* out) {
  moeserve::kPackers[format](columns, depth, num_columns, out);
}
