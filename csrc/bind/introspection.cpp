// C functions through which the tests compare this library with the Python side (ctypes).
#include <cstdio>
#include <exception>
#include <string>

#include "../decode/workspace.h"
#include "cuda_stream.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace torch_sparse_mla;

namespace {

const char* storage_name(Storage storage) {
  switch (storage) {
    case Storage::kBf16:
      return "bf16";
    case Storage::kE4m3:
      return "e4m3";
    case Storage::kE2m1:
      return "e2m1";
    case Storage::kNone:
      return "none";
  }
  return "unknown";
}

}  // namespace

// Writes layout number `position` as "name record_bytes query_dim latent group_size scale_offset token_scale_offset
// rope rope_offset rope_scale_offset", absent fields as "none". Returns false past the last layout.
EXPORT bool torch_sparse_mla_record_layout(int position, char* text, size_t capacity) {
  if (position < 0 || position >= kNumRecordLayouts) return false;
  const RecordLayout& layout = kRecordLayouts[position];
  const auto offset = [](int value) { return value == kNoField ? std::string("none") : std::to_string(value); };
  const std::string line = std::string(layout.name) + " " + std::to_string(layout.record_bytes) + " " +
                           std::to_string(layout.query_dim) + " " + storage_name(layout.latent) + " " +
                           std::to_string(layout.group_size) + " " + offset(layout.scale_offset) + " " +
                           offset(layout.token_scale_offset) + " " + storage_name(layout.rope) + " " +
                           offset(layout.rope_offset) + " " + offset(layout.rope_scale_offset);
  std::snprintf(text, capacity, "%s", line.c_str());
  return true;
}

EXPORT int64_t torch_sparse_mla_decode_workspace_bytes(int64_t rows, int64_t heads, int64_t topk,
                                                       bool batch_invariant) {
  return sparse_ckv_decode_workspace_bytes(rows, heads, topk, batch_invariant);
}

// Returns the parts of a row, and whether they are made in the wide form. `form` is a Sm90Form, `layout` the number of
// a layout.
EXPORT int64_t torch_sparse_mla_sm90_plan(int64_t rows, int64_t heads, int64_t topk, int layout, bool batch_invariant,
                                          int form, bool* wide) {
  const Storage latent = kRecordLayouts[layout].latent;
  const Sm90Plan plan = sm90_plan(rows, heads, topk, latent, batch_invariant, static_cast<Sm90Form>(form));
  *wide = plan.wide;
  return plan.splits;
}

// Returns true and the stream, or false and the reason.
EXPORT bool torch_sparse_mla_current_cuda_stream(int32_t device_index, void** stream, char* error, size_t capacity) {
  try {
    *stream = current_cuda_stream(device_index);
    return true;
  } catch (const std::exception& exception) {
    std::snprintf(error, capacity, "%s", exception.what());
    return false;
  }
}
