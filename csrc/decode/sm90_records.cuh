// One warp's share of a tile of records: the operands of both matrix products, straight from the records' bytes.
//
// A tile is kTileTokens records in shared memory. Of each record a warp owns one chunk of 128 latents, as keys and as
// values, and a quarter of the RoPE part, so that every byte is converted once for each use and by one warp. Codes stay
// unscaled in fp16, which holds e4m3 codes and e2m1 x e4m3 products exactly; bf16 latents stay bf16.
//
// The order of the 128 latents within a product is free as long as both operands agree: each format takes the order in
// which a lane's bytes are contiguous.
#pragma once

#include <type_traits>

#include "../common/record_layout.h"
#include "sm90_primitives.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kTileHeads = 16;
inline constexpr int kTileTokens = 32;
inline constexpr int kTokenBlocks = kTileTokens / 8;
inline constexpr int kChunks = 4;
inline constexpr int kChunkLatents = kLatentDim / kChunks;
inline constexpr int kChunkRope = kRopeDim / kChunks;
inline constexpr int kChunkSteps = kChunkLatents / 16;

// Where a lane stands in a product: its row of A (a head, and the head 8 further), or its pair of columns.
struct Lane {
  TSM_DEVICE Lane() : index(threadIdx.x % 32), row(index / 4), quad(index % 4) {}
  int index;
  int row;
  int quad;
};

template <int kLayout>
struct Records {
  static constexpr int kBytes = kRecordLayouts[kLayout].record_bytes;
  static constexpr int kQueryDim = kRecordLayouts[kLayout].query_dim;
  static constexpr Storage kLatent = kRecordLayouts[kLayout].latent;
  static constexpr Storage kRope = kRecordLayouts[kLayout].rope;
  static constexpr int kScaleOffset = kRecordLayouts[kLayout].scale_offset;
  static constexpr int kTokenScaleOffset = kRecordLayouts[kLayout].token_scale_offset;
  static constexpr int kRopeOffset = kRecordLayouts[kLayout].rope_offset;
  static constexpr int kRopeScaleOffset = kRecordLayouts[kLayout].rope_scale_offset;
  // An odd number of 16-byte units from record to record: eight lanes that read eight records hit all banks.
  static constexpr int kStride = kBytes / 16 % 2 ? kBytes : kBytes + 16;
  static constexpr int kTileBytes = kTileTokens * kStride;
  static constexpr int kChunkBytes = kChunkLatents *
                                     (kLatent == Storage::kBf16   ? 4
                                      : kLatent == Storage::kE4m3 ? 2
                                                                  : 1) /
                                     2;
  // One fp32 factor for all latents of a (token, chunk).
  static constexpr bool kHasScale = kLatent == Storage::kE4m3 || kTokenScaleOffset != kNoField;
  // Values enter the products divided by 2 ** kValueExponent: so the largest e2m1 x e4m3 product fits in fp16.
  static constexpr int kValueExponent = kLatent == Storage::kE2m1 ? 7 : 0;
  static constexpr int kWeightTerms = kLatent == Storage::kBf16 ? 2 : 1;
};

// ---- queries

template <class Number>
TSM_DEVICE float2 float_pair(uint32_t pair) {
  if constexpr (std::is_same_v<Number, __half>) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
  }
}

// kWords pairs from 16-bit numbers at `source`, which is aligned for vector loads or not at all.
template <int kWords>
TSM_DEVICE void load_pairs(const uint16_t* source, bool aligned, bool present, uint32_t (&pairs)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
#pragma unroll
  for (int i = 0; i < kWords; ++i) pairs[i] = 0;
  if (!present) return;
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      pairs[i] = __ldg(source + 2 * i) | static_cast<uint32_t>(__ldg(source + 2 * i + 1)) << 16;
    }
  } else if constexpr (kWords == 4) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(source));
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(source));
    pairs[0] = v.x, pairs[1] = v.y;
  } else {
    pairs[0] = __ldg(reinterpret_cast<const uint32_t*>(source));
  }
}

// A power of two that brings `peak` to 1 or more but below 2, and its inverse. In fp16 what is far smaller loses bits,
// but never more than 2 ** -25 of the peak; sums of products with scales of any usual size stay in fp32.
struct Unit {
  float unit;
  float inverse;
};

TSM_DEVICE Unit unit_of(float peak) {
  const uint32_t exponent = min(max(__float_as_uint(peak) & 0x7F800000u, 1u << 23), 253u << 23);
  return {__uint_as_float(exponent), __uint_as_float((254u << 23) - exponent)};
}

// A warp's chunk of the queries of 16 heads, as A operands. [..][4]: registers of one m16n8k16 product.
template <int kLayout, class QueryT>
struct Query {
  using R = Records<kLayout>;
  // bf16 operands need no unit. Others are divided by one power of two for each head.
  static constexpr bool kHasUnit = R::kLatent != Storage::kBf16;
  static constexpr bool kSplitRope = R::kRope == Storage::kBf16 && std::is_same_v<QueryT, __half>;
  static constexpr int kRopeTerms = R::kRope == Storage::kNone ? 0 : kSplitRope ? 2 : 1;
  // RoPE parts so much larger than the latents count too, so that they stay in range when divided by the unit.
  static constexpr float kRopeShare = 0x1p-60f;
  static_assert(kHasUnit || std::is_same_v<QueryT, __nv_bfloat16>);

  uint32_t latent[kChunkSteps][4];
  uint32_t rope[kRopeTerms > 0 ? kRopeTerms : 1][4];
  float factor[2];       // of the two heads' scores: unit x softmax scale x log2 e
  float rope_factor[2];  // of their RoPE products, where those are fp16

  // What a lane loads of one head, and the largest magnitude in this chunk.
  struct Raw {
    uint32_t latent[4][4];
    uint32_t rope[2];
    float peak;
  };

  // `source`: the head's query.
  TSM_DEVICE static Raw load(const uint16_t* source, bool aligned, bool present, int chunk, const Lane& lane) {
    Raw raw;
    const uint16_t* latents = source + chunk * kChunkLatents;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHasUnit) {
        load_pairs(latents + 32 * lane.quad + 8 * i, aligned, present, raw.latent[i]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t pair[1];
          load_pairs(latents + 32 * i + 8 * k + 2 * lane.quad, aligned, present, pair);
          raw.latent[i][k] = pair[0];
        }
      }
    }
    if constexpr (R::kRope != Storage::kNone) {
      load_pairs(source + kLatentDim + chunk * kChunkRope + 4 * lane.quad, aligned, present, raw.rope);
    }
    if constexpr (kHasUnit) raw.peak = quad_max(peak_of(raw));
    return raw;
  }

  // `half`: which of the lane's two heads; `peak`: the head's largest magnitude.
  TSM_DEVICE void set(int half, const Raw& raw, float peak, float scale_log2) {
    factor[half] = scale_log2;
    if constexpr (kHasUnit) {
      const Unit unit = unit_of(peak);
      // Never zero, which would make NaN of an absent token's score of -infinity.
      factor[half] = fmaxf(factor[half] * unit.unit * (1 << R::kValueExponent), 0x1p-149f);
      set_fp16_latents(half, raw, unit.inverse);
      if constexpr (R::kRope != Storage::kNone) set_rope(half, raw, unit.inverse / (1 << R::kValueExponent));
    } else {
#pragma unroll
      for (int step = 0; step < kChunkSteps; ++step) {
        latent[step][half] = raw.latent[step / 2][step % 2 * 2];
        latent[step][2 + half] = raw.latent[step / 2][step % 2 * 2 + 1];
      }
      if constexpr (R::kRope != Storage::kNone) rope[0][half] = raw.rope[0], rope[0][2 + half] = raw.rope[1];
    }
  }

 private:
  TSM_DEVICE static float pair_peak(uint32_t pair) {
    const float2 x = float_pair<QueryT>(pair);
    return fmaxf(fabsf(x.x), fabsf(x.y));
  }

  TSM_DEVICE static float peak_of(const Raw& raw) {
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) peak = fmaxf(peak, pair_peak(raw.latent[i / 4][i % 4]));
    if constexpr (R::kRope != Storage::kNone) {
      peak = fmaxf(peak, kRopeShare * fmaxf(pair_peak(raw.rope[0]), pair_peak(raw.rope[1])));
    }
    return peak;
  }

  TSM_DEVICE void set_fp16_latents(int half, const Raw& raw, float inverse) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[8];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = float_pair<QueryT>(raw.latent[i][k]);
        x[2 * k] = pair.x * inverse, x[2 * k + 1] = pair.y * inverse;
      }
      // The latent order of multiply_keys: e4m3 codes in memory order, e2m1 codes in pairs four apart.
      constexpr bool kFourApart = R::kLatent == Storage::kE2m1;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t packed = kFourApart ? pack_fp16(x[k], x[k + 4]) : pack_fp16(x[2 * k], x[2 * k + 1]);
        latent[2 * i + k / 2][half + 2 * (k % 2)] = packed;
      }
    }
  }

  TSM_DEVICE void set_rope(int half, const Raw& raw, float inverse) {
    const float2 x = float_pair<QueryT>(raw.rope[0]), y = float_pair<QueryT>(raw.rope[1]);
    if constexpr (R::kRope == Storage::kE4m3) {
      const Unit unit = unit_of(quad_max(fmaxf(pair_peak(raw.rope[0]), pair_peak(raw.rope[1]))));
      rope_factor[half] = unit.unit * inverse;
      rope[0][half] = pack_fp16(x.x * unit.inverse, x.y * unit.inverse);
      rope[0][2 + half] = pack_fp16(y.x * unit.inverse, y.y * unit.inverse);
    } else {
      set_bf16_rope(half, make_float2(x.x * inverse, x.y * inverse), make_float2(y.x * inverse, y.y * inverse));
    }
  }

  // Exact: a bf16 number stays one when it is divided by a power of two, an fp16 number is the sum of two.
  TSM_DEVICE void set_bf16_rope(int half, float2 x, float2 y) {
#pragma unroll
    for (int term = 0; term < kRopeTerms; ++term) {
      rope[term][half] = pack_bf16(x.x, x.y), rope[term][2 + half] = pack_bf16(y.x, y.y);
      const float2 taken_x = float_pair<__nv_bfloat16>(rope[term][half]);
      const float2 taken_y = float_pair<__nv_bfloat16>(rope[term][2 + half]);
      x = make_float2(x.x - taken_x.x, x.y - taken_x.y), y = make_float2(y.x - taken_y.x, y.y - taken_y.y);
    }
  }
};

// ---- keys: a warp's part of the scores of 16 heads and a tile of tokens

// scores[block][i]: head row + 8 * (i / 2), token 8 * block + 2 * quad + i % 2.
using Scores = float[kTokenBlocks][4];
// scales[block][i]: the (token, chunk) factor of token 8 * block + 2 * quad + i.
using Scales = float[kTokenBlocks][2];

template <int kLayout>
TSM_DEVICE void load_scales(const uint8_t* tile, int chunk, const Lane& lane, Scales& scales) {
  using R = Records<kLayout>;
  if constexpr (R::kHasScale) {
    constexpr bool kPerChunk = R::kLatent == Storage::kE4m3;
    const int offset = kPerChunk ? R::kScaleOffset + 4 * chunk : R::kTokenScaleOffset;
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * block + 2 * lane.quad + i;
        const float scale = *reinterpret_cast<const float*>(tile + token * R::kStride + offset);
        // Zero marks a record without a token scale.
        scales[block][i] = kPerChunk || scale != 0.0f ? scale : 1.0f;
      }
    }
  }
}

// What of a tile's keys is loaded ahead of their use.
struct KeyCodes {
  uint4 codes[kTokenBlocks][2];
};

template <int kLayout>
TSM_DEVICE void load_keys(const uint8_t* tile, int chunk, const Lane& lane, KeyCodes& keys) {
  using R = Records<kLayout>;
  if constexpr (R::kLatent == Storage::kE4m3) {
    const uint8_t* source = tile + lane.row * R::kStride + chunk * R::kChunkBytes + 32 * lane.quad;
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        keys.codes[block][i] = *reinterpret_cast<const uint4*>(source + 8 * block * R::kStride + 16 * i);
      }
    }
  }
}

template <int kLayout, class QueryT>
TSM_DEVICE void multiply_keys(const uint8_t* tile, const KeyCodes& loaded, const Query<kLayout, QueryT>& q, int chunk,
                              const Lane& lane, Scores& scores) {
  using R = Records<kLayout>;
  const uint8_t* keys = tile + lane.row * R::kStride + chunk * R::kChunkBytes;
  if constexpr (R::kLatent == Storage::kE4m3) {
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
#pragma unroll
      for (int block = 0; block < kTokenBlocks; ++block) {
        uint32_t b0, b1;
        e4m3_to_fp16((&loaded.codes[block][step / 4].x)[step % 4], b0, b1);
        multiply_fp16(scores[block], q.latent[step], b0, b1);
      }
    }
  } else if constexpr (R::kLatent == Storage::kE2m1) {
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
      const uint8_t* record = keys + 8 * block * R::kStride;
      const uint4 codes = *reinterpret_cast<const uint4*>(record + 16 * lane.quad);
      // The lane's 32 latents are two groups of 16.
      const uint16_t scale_codes = *reinterpret_cast<const uint16_t*>(record - chunk * R::kChunkBytes +
                                                                      R::kScaleOffset + 8 * chunk + 2 * lane.quad);
      const uint32_t both = multiply_pair(e4m3_pair_to_fp16(scale_codes), 0x58005800u);  // times 2 ** 7
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = (&codes.x)[i];
        const uint32_t scale = __byte_perm(both, 0, i < 2 ? 0x1010 : 0x3232);
        multiply_fp16(scores[block], q.latent[2 * i], multiply_pair(e2m1_to_fp16<0>(word), scale),
                      multiply_pair(e2m1_to_fp16<1>(word), scale));
        multiply_fp16(scores[block], q.latent[2 * i + 1], multiply_pair(e2m1_to_fp16<2>(word), scale),
                      multiply_pair(e2m1_to_fp16<3>(word), scale));
      }
    }
  } else {
    const uint32_t matrix =
        shared_address(tile) + lane.index % 8 * R::kStride + chunk * R::kChunkBytes + lane.index / 8 * 16;
#pragma unroll
    for (int step = 0; step < kChunkSteps; step += 2) {
#pragma unroll
      for (int block = 0; block < kTokenBlocks; ++block) {
        const Matrices b = load_matrices(matrix + 8 * block * R::kStride + 32 * step);
        multiply_bf16(scores[block], q.latent[step], b.r[0], b.r[1]);
        multiply_bf16(scores[block], q.latent[step + 1], b.r[2], b.r[3]);
      }
    }
  }
}

template <int kLayout, class QueryT>
TSM_DEVICE void add_rope(const uint8_t* tile, const Query<kLayout, QueryT>& q, int chunk, const Lane& lane,
                         Scores& scores) {
  using R = Records<kLayout>;
  if constexpr (R::kRope == Storage::kBf16) {
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
      const uint2 keys = *reinterpret_cast<const uint2*>(tile + (8 * block + lane.row) * R::kStride + R::kRopeOffset +
                                                         2 * kChunkRope * chunk + 8 * lane.quad);
#pragma unroll
      for (int term = 0; term < q.kRopeTerms; ++term) multiply_bf16(scores[block], q.rope[term], keys.x, keys.y);
    }
  } else if constexpr (R::kRope == Storage::kE4m3) {
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
      const uint8_t* record = tile + (8 * block + lane.row) * R::kStride;
      const uint32_t codes =
          *reinterpret_cast<const uint32_t*>(record + R::kRopeOffset + kChunkRope * chunk + 4 * lane.quad);
      uint32_t b0, b1;
      e4m3_to_fp16(codes, b0, b1);
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      multiply_fp16(part, q.rope[0], b0, b1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * block + 2 * lane.quad + i % 2;
        const float scale = *reinterpret_cast<const float*>(tile + token * R::kStride + R::kRopeScaleOffset);
        scores[block][i] += part[i] * q.rope_factor[i / 2] * scale;
      }
    }
  }
}

// This warp's part of the scores, in units of q.factor. The sum over the four chunks is the score.
template <int kLayout, class QueryT>
TSM_DEVICE void partial_scores(const uint8_t* tile, const KeyCodes& keys, const Query<kLayout, QueryT>& q, int chunk,
                               const Lane& lane, Scores& scores, Scales& scales) {
  load_scales<kLayout>(tile, chunk, lane, scales);
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[block][i] = 0.0f;
  }
  multiply_keys<kLayout>(tile, keys, q, chunk, lane, scores);
  if constexpr (Records<kLayout>::kHasScale) {
#pragma unroll
    for (int block = 0; block < kTokenBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[block][i] *= scales[block][i % 2];
    }
  }
  add_rope<kLayout>(tile, q, chunk, lane, scores);
}

// ---- values: a warp's chunk of the output of 16 heads

// sums[n][i]: head row + 8 * (i / 2), one of the chunk's latents: runs() says which.
using ChunkSums = float[kChunkLatents / 8][4];
// weights[term][k]: A operand over tokens 16 * k to 16 * k + 15. A bf16 weight has 8 bits, which is no better than what
// the output keeps: beside bf16 latents a weight is the sum of two.
using Weights = uint32_t[2][kTileTokens / 16][4];

template <int kLayout>
TSM_DEVICE void add_values(const uint8_t* tile, const Weights& weights, int chunk, const Lane& lane, ChunkSums& sums) {
  using R = Records<kLayout>;
  // Each 8 x 8 matrix is 8 tokens by 16 bytes: two token blocks of one column of bytes, then of the next.
  const uint32_t matrix =
      shared_address(tile) + lane.index % 16 * R::kStride + chunk * R::kChunkBytes + lane.index / 16 * 16;
#pragma unroll
  for (int k = 0; k < kTileTokens / 16; ++k) {
    const uint32_t matrix_k = matrix + 16 * k * R::kStride;
    if constexpr (R::kLatent == Storage::kE4m3) {
      // 16-bit elements are two latents: after the transposition a register holds both, of two tokens.
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const Matrices m = load_matrices_transposed(matrix_k + 32 * d);
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          uint32_t even0, odd0, even1, odd1;
          e4m3_to_fp16(__byte_perm(m.r[2 * column], 0, 0x3120), even0, odd0);
          e4m3_to_fp16(__byte_perm(m.r[2 * column + 1], 0, 0x3120), even1, odd1);
          multiply_fp16(sums[4 * d + 2 * column], weights[0][k], even0, even1);
          multiply_fp16(sums[4 * d + 2 * column + 1], weights[0][k], odd0, odd1);
        }
      }
    } else if constexpr (R::kLatent == Storage::kE2m1) {
      // 16-bit elements are four latents. A column of 16 bytes is two groups of 16: rows 0..3 and 4..7.
      uint32_t group_scales[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * k + 2 * lane.quad + i % 2 + 8 * (i / 2);
        const uint2 eight = *reinterpret_cast<const uint2*>(tile + token * R::kStride + R::kScaleOffset + 8 * chunk);
        group_scales[i] = __byte_perm(eight.x, eight.y, lane.row < 4 ? 0x6420 : 0x7531);
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const Matrices m = load_matrices_transposed(matrix_k + 32 * pair);
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int d = 2 * pair + column;
          uint32_t scale[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t codes = __byte_perm(group_scales[2 * i], group_scales[2 * i + 1], d | (d + 4) << 4);
            scale[i] = multiply_pair(e4m3_pair_to_fp16(static_cast<uint16_t>(codes)), 0x58005800u);  // times 2 ** 7
          }
          const uint32_t low = m.r[2 * column], high = m.r[2 * column + 1];
          multiply_fp16(sums[4 * d], weights[0][k], multiply_pair(e2m1_to_fp16<0>(low), scale[0]),
                        multiply_pair(e2m1_to_fp16<0>(high), scale[1]));
          multiply_fp16(sums[4 * d + 1], weights[0][k], multiply_pair(e2m1_to_fp16<1>(low), scale[0]),
                        multiply_pair(e2m1_to_fp16<1>(high), scale[1]));
          multiply_fp16(sums[4 * d + 2], weights[0][k], multiply_pair(e2m1_to_fp16<2>(low), scale[0]),
                        multiply_pair(e2m1_to_fp16<2>(high), scale[1]));
          multiply_fp16(sums[4 * d + 3], weights[0][k], multiply_pair(e2m1_to_fp16<3>(low), scale[0]),
                        multiply_pair(e2m1_to_fp16<3>(high), scale[1]));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kChunkLatents / 8; n += 2) {
        const Matrices m = load_matrices_transposed(matrix_k + 16 * n);
#pragma unroll
        for (int term = 0; term < R::kWeightTerms; ++term) {
          multiply_bf16(sums[n], weights[term][k], m.r[0], m.r[1]);
          multiply_bf16(sums[n + 1], weights[term][k], m.r[2], m.r[3]);
        }
      }
    }
  }
}

// Calls store(first latent of the chunk, values) for each run of latents that one head of a lane has in a row.
// `values[ch]` are the head's sums [2 ch][0], [2 ch + 1][0], [2 ch][1], [2 ch + 1][1].
template <int kLayout, class Store>
TSM_DEVICE void for_each_run(const float (&values)[8][4], const Lane& lane, const Store& store) {
  constexpr Storage kLatent = Records<kLayout>::kLatent;
#pragma unroll
  for (int ch = 0; ch < 8; ++ch) {
    if constexpr (kLatent == Storage::kE4m3) {
      const float run[4] = {values[ch][0], values[ch][1], values[ch][2], values[ch][3]};
      store(16 * ch + 4 * lane.quad, run);
    } else if constexpr (kLatent == Storage::kE2m1) {
      const int d = ch / 2, i = 2 * (ch % 2);
      const float run[4] = {values[2 * d][i], values[2 * d][i + 1], values[2 * d + 1][i], values[2 * d + 1][i + 1]};
      store(32 * d + 8 * lane.quad + 2 * i, run);
    } else {
      const float low[2] = {values[ch][0], values[ch][2]}, high[2] = {values[ch][1], values[ch][3]};
      store(16 * ch + 2 * lane.quad, low);
      store(16 * ch + 8 + 2 * lane.quad, high);
    }
  }
}

}  // namespace torch_sparse_mla::sm90
