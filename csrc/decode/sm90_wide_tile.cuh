// What the wide attention kernel keeps in shared memory as operands of wgmma: queries and unpacked records.
//
// An operand is made of columns of 64 16-bit numbers. A column is rows of 128 bytes, one after another, in which the
// 16-byte units are permuted by the row's number modulo 8 (the 128-byte swizzle). A row is a head or a token. The same
// bytes are keys, whose latents are summed over, and values, whose tokens are.
//
// Codes stay unscaled, as fp16 numbers that hold them exactly; bf16 numbers stay bf16.
#pragma once

#include "sm90_records.cuh"
#include "sm90_wgmma.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kWideHeads = 64;
inline constexpr int kWideTokens = 48;
inline constexpr int kWideBlocks = kWideTokens / 8;
inline constexpr int kWideSteps = kWideTokens / 16;

inline constexpr int kColumnNumbers = 64;
inline constexpr int kColumnSteps = kColumnNumbers / 16;
inline constexpr int kRowBytes = 2 * kColumnNumbers;
inline constexpr int kStepBytes = kRowBytes / kColumnSteps;
inline constexpr int kSwizzleBytes = 8 * kRowBytes;  // columns are aligned to this
inline constexpr int kLatentColumns = kLatentDim / kColumnNumbers;
inline constexpr int kRopeColumn = kLatentColumns;
inline constexpr int kQueryColumnBytes = kWideHeads * kRowBytes;
inline constexpr int kTileColumnBytes = kWideTokens * kRowBytes;
static_assert(kRopeDim == kColumnNumbers);
static_assert(kQueryColumnBytes % kSwizzleBytes == 0 && kTileColumnBytes % kSwizzleBytes == 0);

// Where the 16-byte unit `unit` of row `row` lies in a column.
TSM_DEVICE uint32_t swizzled_offset(int row, int unit) { return row * kRowBytes + ((unit ^ row % 8) << 4); }

// A value that all lanes of a warp share, as the compiler then knows: descriptors are worked out once for a warp.
TSM_DEVICE uint32_t of_warp(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// Operands that begin some bytes from `address`, a column's or in one. Their groups of eight rows follow one another;
// from 64 numbers of a row to the next 64, where an operand has so many, there are `column_bytes`.
class Operands {
 public:
  TSM_DEVICE Operands(uint32_t address, int column_bytes) : low_(of_warp((address >> 4) + (column_bytes >> 4 << 16))) {}

  TSM_DEVICE uint64_t at(int offset) const {
    constexpr uint32_t kSwizzled = 1u << 30 | kSwizzleBytes >> 4;
    // Addresses have 18 bits, and no operand reaches beyond them.
    return static_cast<uint64_t>(kSwizzled) << 32 | (low_ + (offset >> 4));
  }

 private:
  uint32_t low_;
};

// Those whose summed dimension runs along rows: numbers 16 * step on of a column.
struct AlongRows : Operands {
  TSM_DEVICE explicit AlongRows(uint32_t address) : Operands(address, 16) {}

  TSM_DEVICE uint64_t at(int offset, int step) const { return Operands::at(offset + kStepBytes * step); }
};

// Those whose summed dimension runs across rows: tokens 16 * step on, of two columns of a tile.
struct AcrossRows : Operands {
  TSM_DEVICE explicit AcrossRows(uint32_t address) : Operands(address, kTileColumnBytes) {}

  TSM_DEVICE uint64_t at(int offset, int step) const { return Operands::at(offset + 16 * kRowBytes * step); }
};

// ---- records

template <int kLayout>
struct WideTile {
  using R = Records<kLayout>;
  using Latent = std::conditional_t<R::kLatent == Storage::kBf16, __nv_bfloat16, __half>;
  using Rope = std::conditional_t<R::kRope == Storage::kBf16, __nv_bfloat16, __half>;
  static constexpr int kColumns = kLatentColumns + (R::kRope != Storage::kNone);
  static constexpr bool kChunkScales = R::kLatent == Storage::kE4m3;
  // Rows of fp32 scales: one for each chunk, or one for all latents; then one for an e4m3 RoPE part.
  static constexpr int kScaleRows = kChunkScales ? kChunks : R::kHasScale;
  static constexpr bool kRopeScale = R::kRope == Storage::kE4m3;
  static_assert(!(R::kRope == Storage::kBf16 && R::kHasScale && !kChunkScales));
};

// Eight numbers.
struct Unit16 {
  uint4 words;
};

TSM_DEVICE Unit16 unpack_e4m3(uint2 codes) {
  Unit16 unit;
  e4m3_to_fp16(codes.x, unit.words.x, unit.words.y);
  e4m3_to_fp16(codes.y, unit.words.z, unit.words.w);
  return unit;
}

// Eight e2m1 codes times their scale.
TSM_DEVICE Unit16 unpack_e2m1(uint32_t codes, uint32_t scale) {
  const uint32_t a = multiply_pair(e2m1_to_fp16<0>(codes), scale), b = multiply_pair(e2m1_to_fp16<1>(codes), scale);
  const uint32_t c = multiply_pair(e2m1_to_fp16<2>(codes), scale), d = multiply_pair(e2m1_to_fp16<3>(codes), scale);
  // Each holds two numbers four apart.
  return {make_uint4(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410), __byte_perm(a, b, 0x7632),
                     __byte_perm(c, d, 0x7632))};
}

template <class Word>
TSM_DEVICE Word load_record(const uint8_t* at) {
  return __ldcg(reinterpret_cast<const Word*>(at));
}

// Sixteen latents of a record that holds codes.
template <Storage kLatent>
struct PackedLatents;

template <>
struct PackedLatents<Storage::kE4m3> {
  uint4 codes = make_uint4(0, 0, 0, 0);

  template <int kLayout>
  TSM_DEVICE void load(const uint8_t* record, int sixteen) {
    codes = load_record<uint4>(record + 16 * sixteen);
  }
  TSM_DEVICE void unpack(Unit16 (&units)[2]) const {
    units[0] = unpack_e4m3(make_uint2(codes.x, codes.y));
    units[1] = unpack_e4m3(make_uint2(codes.z, codes.w));
  }
};

template <>
struct PackedLatents<Storage::kE2m1> {
  uint2 codes = make_uint2(0, 0);
  uint32_t scale = 0;

  template <int kLayout>
  TSM_DEVICE void load(const uint8_t* record, int sixteen) {
    static_assert(kRecordLayouts[kLayout].group_size == 16);
    codes = load_record<uint2>(record + 8 * sixteen);
    scale = load_record<uint8_t>(record + Records<kLayout>::kScaleOffset + sixteen);
  }
  TSM_DEVICE void unpack(Unit16 (&units)[2]) const {
    const uint32_t pair = e4m3_pair_to_fp16(static_cast<uint16_t>(scale | scale << 8));
    const uint32_t times_128 = multiply_pair(pair, 0x58005800u);
    units[0] = unpack_e2m1(codes.x, times_128);
    units[1] = unpack_e2m1(codes.y, times_128);
  }
};

// Eight numbers of an e4m3 RoPE part.
struct PackedRope {
  uint2 codes = make_uint2(0, 0);

  TSM_DEVICE void load(const uint8_t* rope, int eight) { codes = load_record<uint2>(rope + 8 * eight); }
  TSM_DEVICE Unit16 unpack() const { return unpack_e4m3(codes); }
};

// ---- queries

// The larger of the magnitudes in either half of two pairs; a NaN counts as nothing.
template <class QueryT>
TSM_DEVICE uint32_t larger_pair(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<QueryT, __half>, __half2, __nv_bfloat162>;
  const Pair larger = __hmax2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&larger);
}

template <class QueryT, int kWords>
TSM_DEVICE float peak_of_pairs(const uint32_t (&pairs)[kWords]) {
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) peak = larger_pair<QueryT>(peak, pairs[i] & 0x7FFF7FFFu);
  const float2 x = float_pair<QueryT>(peak);
  return fmaxf(x.x, x.y);
}

// A warp's share of one head's query: a lane has latents 16 * lane on and a pair of the RoPE part. It writes what it
// read itself, so that lanes need not wait for one another.
template <int kLayout, class QueryT>
struct WideQuery {
  using R = Records<kLayout>;
  using Narrow = Query<kLayout, QueryT>;
  static constexpr bool kHasRope = R::kRope != Storage::kNone;
  static constexpr int kRopeTerms = Narrow::kRopeTerms;
  static constexpr int kColumns = kLatentColumns + kRopeTerms;
  using Columns = uint8_t[kColumns][kQueryColumnBytes];

  uint8_t* latents[2];
  uint8_t* rope;

  TSM_DEVICE WideQuery(Columns& columns, int head, int lane) {
    uint8_t* column = columns[lane / 4];
    latents[0] = column + swizzled_offset(head, lane % 4 * 2);
    latents[1] = column + swizzled_offset(head, lane % 4 * 2 + 1);
    if constexpr (kHasRope) rope = columns[kRopeColumn] + swizzled_offset(head, lane / 4) + lane % 4 * 4;
  }

  // Starts copies of the numbers to where the operand will be. `source` is aligned for vector loads or not at all.
  TSM_DEVICE void fetch(const uint16_t* source, bool aligned, bool present, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) fetch_words<4>(latents[i], source + 16 * lane + 8 * i, aligned, present);
    if constexpr (kHasRope) fetch_words<1>(rope, source + kLatentDim + 2 * lane, aligned, present);
  }

  // What a lane has of a head: its numbers as they came, and then as operands.
  struct Numbers {
    uint32_t latents[2][4];
    uint32_t rope[kRopeTerms > 0 ? kRopeTerms : 1];

    // `factor` and `rope_factor` become those of the head's scores, as in Query.
    TSM_DEVICE void convert(float scale_log2, float& factor, float& rope_factor) {
      factor = scale_log2;
      rope_factor = 0.0f;
      if constexpr (Narrow::kHasUnit) {
        const uint32_t rope_pair[1] = {rope[0]};
        float peak = fmaxf(peak_of_pairs<QueryT>(latents[0]), peak_of_pairs<QueryT>(latents[1]));
        if constexpr (kHasRope) peak = fmaxf(peak, Narrow::kRopeShare * peak_of_pairs<QueryT>(rope_pair));
        const Unit unit = unit_of(warp_max(peak));
        factor = fmaxf(factor * unit.unit * (1 << R::kValueExponent), 0x1p-149f);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t& pair = latents[i / 4][i % 4];
          const float2 x = float_pair<QueryT>(pair);
          pair = pack_fp16(x.x * unit.inverse, x.y * unit.inverse);
        }
        if constexpr (kHasRope) convert_rope(rope_pair, unit.inverse / (1 << R::kValueExponent), rope_factor);
      }
    }

    TSM_DEVICE void convert_rope(const uint32_t (&pair)[1], float inverse, float& rope_factor) {
      float2 x = float_pair<QueryT>(pair[0]);
      if constexpr (R::kRope == Storage::kE4m3) {
        const Unit unit = unit_of(warp_max(peak_of_pairs<QueryT>(pair)));
        rope_factor = unit.unit * inverse;
        rope[0] = pack_fp16(x.x * unit.inverse, x.y * unit.inverse);
      } else {
        // Exact: see Query.
        x = make_float2(x.x * inverse, x.y * inverse);
#pragma unroll
        for (int term = 0; term < kRopeTerms; ++term) {
          rope[term] = pack_bf16(x.x, x.y);
          const float2 taken = float_pair<__nv_bfloat16>(rope[term]);
          x = make_float2(x.x - taken.x, x.y - taken.y);
        }
      }
    }
  };

  // Where there is nothing to convert, nothing is read or written.
  TSM_DEVICE void read(Numbers& numbers) const {
    if constexpr (Narrow::kHasUnit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 x = *reinterpret_cast<const uint4*>(latents[i]);
        uint32_t (&pairs)[4] = numbers.latents[i];
        pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
      }
      if constexpr (kHasRope) numbers.rope[0] = *reinterpret_cast<const uint32_t*>(rope);
    }
  }

  TSM_DEVICE void write(const Numbers& numbers) const {
    if constexpr (Narrow::kHasUnit) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t (&x)[4] = numbers.latents[i];
        store_shared(shared_address(latents[i]), make_uint4(x[0], x[1], x[2], x[3]));
      }
#pragma unroll
      for (int term = 0; term < kRopeTerms; ++term) {
        store_shared(shared_address(rope) + term * kQueryColumnBytes, numbers.rope[term]);
      }
    }
  }

 private:
  template <int kWords>
  TSM_DEVICE static void fetch_words(uint8_t* target, const uint16_t* source, bool aligned, bool present) {
    if (aligned) {
      copy_word<4 * kWords>(shared_address(target), source, present);
      return;
    }
    uint32_t words[kWords];
    load_pairs(source, false, present, words);
    if constexpr (kWords == 4) {
      store_shared(shared_address(target), make_uint4(words[0], words[1], words[2], words[3]));
    } else {
      store_shared(shared_address(target), words[0]);
    }
  }
};

}  // namespace torch_sparse_mla::sm90
