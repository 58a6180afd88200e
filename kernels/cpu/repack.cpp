// Weights before any product: rows of numbers into the panels of panels.h, rows of blocks into those of quantised.h.
#include <algorithm>

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
  uint8_t shifts[16];   // By group.
};

void unpack_nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = from[i] & 15;
    codes[16 + i] = from[i] >> 4;
  }
}

void unpack_simple(const Traits& format, const uint8_t* from, Block& block) {
  const int scale_bytes = format.scale_bytes() / kLanes, shift_bytes = format.shift_bytes() / kLanes;
  std::memcpy(block.scales, from, scale_bytes);
  std::memcpy(block.shifts, from + scale_bytes, shift_bytes);
  from += scale_bytes + shift_bytes;
  if (format.bits == 4) return unpack_nibbles(from, block.codes);
  if (format.bits == 5) {
    uint32_t high;
    std::memcpy(&high, from, 4);
    unpack_nibbles(from + 4, block.codes);
    for (int i = 0; i < kGroup; ++i) block.codes[i] |= (high >> i & 1) << 4;
    return;
  }
  const uint8_t flip = format.code == Code::kE4m3 ? 0 : 0x80;
  for (int i = 0; i < kGroup; ++i) block.codes[i] = from[i] ^ flip;
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

void unpack_q4_k(const uint8_t* from, bool fifth_bit, Block& block) {
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

void unpack(Format format, const uint8_t* from, Block& block) {
  switch (format) {
    case Format::kQ4_K:
    case Format::kQ5_K:
      return unpack_q4_k(from, format == Format::kQ5_K, block);
    case Format::kQ6_K:
      return unpack_q6_k(from, block);
    case Format::kNvfp4:
      return unpack_nvfp4(from, block);
    case Format::kFp8Block:
      return unpack_fp8_block(from, block);
    default:
      return unpack_simple(traits_of(format), from, block);
  }
}

// Codes of 32 weights of 16 columns: see Group::load_codes.
void write_codes(const Traits& format, const Block* columns, int first, uint8_t* out) {
  const int bits = format.bits;
  if (format.code == Code::kE4m3) {
    for (int c = 0; c < kLanes; ++c)
      for (int k = 0; k < kGroup; ++k) out[k * kLanes + c] = columns[c].codes[first + k];
    return;
  }
  Words codes[8];
  for (int c = 0; c < kLanes; ++c)
    for (int i = 0; i < 8; ++i) {
      uint32_t four;
      std::memcpy(&four, columns[c].codes + first + 4 * i, 4);
      codes[i][c] = four;
    }
  if (bits == 8) return void(std::memcpy(out, codes, sizeof(codes)));
  Words pairs[4], high[2] = {};
  for (int i = 0; i < 4; ++i)
    pairs[i] = (codes[2 * i] & 0x0f0f0f0fu) | (codes[2 * i + 1] & 0x0f0f0f0fu) << 4;
  std::memcpy(out, pairs, sizeof(pairs));
  if (bits == 5)
    for (int i = 0; i < 8; ++i) high[0] |= ((codes[i] & 0x10101010u) >> 4) << i;
  if (bits == 6)
    for (int i = 0; i < 8; ++i) high[i / 4] |= ((codes[i] & 0x30303030u) >> 4) << 2 * (i % 4);
  std::memcpy(out + sizeof(pairs), high, 64 * (bits - 4));
}

void write_column_bytes(int bytes, int column, const uint8_t* from, uint8_t* out) {
  std::memcpy(out + column * bytes, from, bytes);
}

// Writes a block of 16 columns.
void write_block(const Traits& format, const Block* columns, uint8_t* out) {
  const int width = format.scale == Scale::kSuper ? 2 : 4;  // Bytes of one of a superblock's numbers.
  for (int c = 0; c < kLanes; ++c)
    for (int i = 0; i < format.super_bytes() / (width * kLanes); ++i)
      write_column_bytes(width, c, columns[c].super + width * i, out + i * width * kLanes);
  out += format.super_bytes();
  const int scale_bytes = format.scale_bytes() / kLanes, shift_bytes = format.shift_bytes() / kLanes;
  for (int g = 0; g < format.groups; ++g) {
    write_codes(format, columns, g * kGroup, out);
    out += format.code_bytes();
    for (int part = 0; part < format.parts; ++part, out += format.scale_bytes())
      for (int c = 0; c < kLanes; ++c)
        write_column_bytes(scale_bytes, c, columns[c].scales + (g * format.parts + part) * scale_bytes, out);
    for (int c = 0; c < kLanes; ++c)
      write_column_bytes(shift_bytes, c, columns[c].shifts + g * shift_bytes, out);
    out += format.shift_bytes();
  }
}

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

// Packs rows of blocks, `row_bytes` apart, each of `depth` weights. order [num_columns] tells the row of each column of
// the panels, -1 for zeros; num_columns is a multiple of 32.
extern "C" void moeserve_pack_quantised(int64_t format, const uint8_t* rows, int64_t row_bytes, int64_t depth,
                                        const int64_t* order, int64_t num_columns, uint8_t* out) {
  using namespace moeserve;
  const Traits& traits = traits_of(static_cast<Format>(format));
  const int64_t num_blocks = depth / traits.depth();
  for_shared(num_columns / kLanes, 1, [&](int64_t half) {
    uint8_t* to = out + half * num_blocks * traits.block_bytes();
    const int64_t* of = order + half * kLanes;
    static const uint8_t zeros[256] = {};
    Block columns[kLanes];
    for (int64_t block = 0; block < num_blocks; ++block, to += traits.block_bytes()) {
      for (int c = 0; c < kLanes; ++c)
        unpack(static_cast<Format>(format), of[c] < 0 ? zeros : rows + of[c] * row_bytes + block * traits.row_bytes,
               columns[c]);
      write_block(traits, columns, to);
    }
  });
}
