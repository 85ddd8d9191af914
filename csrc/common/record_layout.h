// Record layouts: the C++ side of torch_sparse_mla/records/layouts.py. A test asserts that the two are equal.
#pragma once

#include <cstdint>

namespace torch_sparse_mla {

inline constexpr int kLatentDim = 512;
inline constexpr int kRopeDim = 64;
inline constexpr int kMaxQueryDim = kLatentDim + kRopeDim;
inline constexpr int kNoField = -1;

enum class Storage : uint8_t { kNone, kBf16, kE4m3, kE2m1 };

// Offsets are bytes from the start of the record; the latents are at offset 0. kNoField: the layout has no such field.
struct RecordLayout {
  const char* name;
  int record_bytes;
  int query_dim;
  Storage latent;
  int group_size;          // latents that share one scale; 0: no scales
  int scale_offset;        // group scales: fp32 for kE4m3, e4m3 for kE2m1
  int token_scale_offset;  // fp32; a stored 0 means 1
  Storage rope;
  int rope_offset;
  int rope_scale_offset;  // fp32
};

inline constexpr RecordLayout kRecordLayouts[] = {
    {"bf16_mla", 1152, 576, Storage::kBf16, 0, kNoField, kNoField, Storage::kBf16, 1024, kNoField},
    {"bf16_mla_nope", 1024, 512, Storage::kBf16, 0, kNoField, kNoField, Storage::kNone, kNoField, kNoField},
    {"fp8_ds_mla", 656, 576, Storage::kE4m3, 128, 512, kNoField, Storage::kBf16, 528, kNoField},
    {"fp8_mla_nope", 528, 512, Storage::kE4m3, 128, 512, kNoField, Storage::kNone, kNoField, kNoField},
    {"nvfp4_ds_mla", 432, 576, Storage::kE2m1, 16, 256, kNoField, Storage::kBf16, 304, kNoField},
    {"nvfp4_ds_mla_fp8rope", 368, 576, Storage::kE2m1, 16, 256, 292, Storage::kE4m3, 304, 288},
    {"nvfp4_mla_nope", 304, 512, Storage::kE2m1, 16, 256, 292, Storage::kNone, kNoField, kNoField},
};
inline constexpr int kNumRecordLayouts = sizeof(kRecordLayouts) / sizeof(*kRecordLayouts);

}  // namespace torch_sparse_mla
