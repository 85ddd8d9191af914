// What the attention kernels share: their arguments, a block's part of a row's list, and how results are written.
#pragma once

#include "sm90_records.cuh"
#include "sparse_ckv_decode.h"

namespace torch_sparse_mla::sm90 {

inline constexpr int kSharedBytes = 232448;
inline constexpr float kLn2 = 0.6931471805599453f;

// Results of parts, on their way to the merge: fp16 latents under a power of two for each chunk.
struct Partials {
  uint16_t* latents;  // [rows, splits, heads, kLatentDim] fp16
  float* units;       // [rows, splits, heads, kChunks]
  float* lse_log2;    // [rows, splits, heads]; -inf: nothing attended to
};

struct AttendParams {
  const uint16_t* q;
  int64_t q_row_stride;  // elements
  const uint8_t* cache;
  int64_t page_stride;  // bytes
  uint32_t page_size;
  uint32_t page_multiplier;  // slot / page_size = (umulhi(slot, page_multiplier) + slot) >> page_shift
  uint32_t page_shift;
  uint32_t num_slots;
  const int32_t* indices;
  int64_t indices_row_stride;  // elements
  const int32_t* lengths;      // or null
  const float* sink;           // or null
  void* out;
  FloatType out_type;
  float* lse;
  Partials partials;  // unused with one split
  float scale_log2;
  int heads;
  int topk;
  int splits;
  int head_tiles;
  int tokens_per_split;  // 0: from the live length
  bool q_aligned;
};

// A block's part of a row's list, in tiles of kTokens.
template <int kTokens>
struct Part {
  int64_t row;
  int split;
  int head_tile;
  int begin;
  int end;

  TSM_DEVICE explicit Part(const AttendParams& p) {
    // Neighbouring blocks share records: the head tiles of one part.
    const uint32_t block = blockIdx.x, row_split = block / p.head_tiles;
    head_tile = static_cast<int>(block - row_split * p.head_tiles);
    row = row_split / p.splits;
    split = static_cast<int>(row_split - row * p.splits);
    const int length = p.lengths ? min(max(__ldg(p.lengths + row), 0), p.topk) : p.topk;
    int tokens = p.tokens_per_split;
    if (tokens == 0) {
      const int tiles = (length + kTokens - 1) / kTokens;
      tokens = (tiles + p.splits - 1) / p.splits * kTokens;
    }
    begin = split * tokens;
    end = min(begin + tokens, length);
  }

  TSM_DEVICE int tiles() const { return end > begin ? (end - begin + kTokens - 1) / kTokens : 0; }
};

TSM_DEVICE const uint8_t* record_of(const AttendParams& p, uint32_t slot, int record_bytes) {
  const uint32_t page = (__umulhi(slot, p.page_multiplier) + slot) >> p.page_shift;
  const uint32_t in_page = slot - page * p.page_size;
  return p.cache + page * p.page_stride + static_cast<int64_t>(in_page) * record_bytes;
}

// ---- results

// exp(lse) / (exp(lse) + exp(sink)); 1 without a sink.
TSM_DEVICE float sink_factor(const float* sink, int head, float lse) {
  return sink ? 1.0f / (1.0f + __expf(__ldg(sink + head) - lse)) : 1.0f;
}

// Writes kCount consecutive numbers in the output's type.
template <int kCount>
TSM_DEVICE void store_numbers(void* out, FloatType type, int64_t at, const float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  if (type == FloatType::kFp32) {
    float* target = static_cast<float*>(out) + at;
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<float2*>(target) = make_float2(x[0], x[1]);
    }
    return;
  }
  const bool bf16 = type == FloatType::kBf16;
  const uint32_t low = bf16 ? pack_bf16(x[0], x[1]) : pack_fp16(x[0], x[1]);
  uint16_t* target = static_cast<uint16_t*>(out) + at;
  if constexpr (kCount == 4) {
    const uint32_t high = bf16 ? pack_bf16(x[2], x[3]) : pack_fp16(x[2], x[3]);
    *reinterpret_cast<uint2*>(target) = make_uint2(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(target) = low;
  }
}

}  // namespace torch_sparse_mla::sm90
