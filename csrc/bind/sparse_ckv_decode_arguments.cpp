#include "sparse_ckv_decode_arguments.h"

#include "../decode/workspace.h"

namespace torch_sparse_mla {
namespace {

constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMaxTopk = 16384;

void check_query(const Checks& checks, bool takes_fp64, const Argument& q, const RecordLayout& layout) {
  if (takes_fp64) {
    checks.dtype(q, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float, ScalarType::Double});
  } else {
    checks.dtype(q, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  }
  if (q.dim != 3 || q.size(2) != layout.query_dim || q.size(1) < 1 || q.size(1) > kMaxHeads) {
    checks.reject(q.name, "shape " + list_text(q.sizes, q.dim),
                  "shape [rows, 1.." + std::to_string(kMaxHeads) + " heads, " + std::to_string(layout.query_dim) +
                      "] for layout " + layout.name);
  }
  if (q.stride(2) != 1 || (q.size(1) > 1 && q.stride(1) != q.size(2))) {
    checks.reject(q.name, "strides " + list_text(q.strides, q.dim),
                  "strides [any, " + std::to_string(q.size(2)) + ", 1]");
  }
}

void check_selection(const Checks& checks, const Argument& indices, const Argument& lengths, int64_t rows) {
  checks.dtype(indices, {ScalarType::Int});
  if (indices.dim != 2 || indices.size(0) != rows || indices.size(1) < 1 || indices.size(1) > kMaxTopk) {
    checks.reject(indices.name, "shape " + list_text(indices.sizes, indices.dim),
                  "shape [rows, 1.." + std::to_string(kMaxTopk) + "] with rows = " + std::to_string(rows));
  }
  checks.last_dim_contiguous(indices);
  if (lengths.defined) {
    checks.dtype(lengths, {ScalarType::Int});
    checks.shape(lengths, {rows}, "rows");
    checks.contiguous(lengths);
  }
}

void check_outputs(const Checks& checks, ScalarType input_dtype, const Argument& sink, const Argument& out,
                   const Argument& lse, int64_t rows, int64_t heads) {
  if (sink.defined) {
    checks.dtype(sink, {ScalarType::Float});
    checks.shape(sink, {heads}, "heads");
    checks.contiguous(sink);
  }
  if (input_dtype == ScalarType::Double) {
    checks.dtype(out, {ScalarType::Double});
  } else {
    checks.dtype(out, {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
  }
  checks.shape(out, {rows, heads, kLatentDim}, "rows, heads, 512");
  checks.contiguous(out);
  checks.dtype(lse, {input_dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float});
  checks.shape(lse, {rows, heads}, "rows, heads");
  checks.contiguous(lse);
}

FloatType float_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return FloatType::kBf16;
    case ScalarType::Half:
      return FloatType::kFp16;
    case ScalarType::Double:
      return FloatType::kFp64;
    default:
      return FloatType::kFp32;
  }
}

}  // namespace

void check_sparse_ckv_decode_data(const Checks& checks, const SparseCkvDecode& call) {
  const std::string topk = std::to_string(call.topk);
  for (int64_t row = 0; call.lengths && row < call.rows; ++row) {
    if (call.lengths[row] <= call.topk) continue;
    checks.reject("lengths", std::to_string(call.lengths[row]) + " in row " + std::to_string(row),
                  "at most K = " + topk);
  }
  for (int64_t row = 0; row < call.rows; ++row) {
    const int length = call.lengths ? call.lengths[row] : call.topk;
    for (int column = 0; column < length; ++column) {
      const int64_t slot = call.indices[row * call.indices_row_stride + column];
      if (slot >= -1 && slot < call.num_slots) continue;
      checks.reject("indices",
                    std::to_string(slot) + " in row " + std::to_string(row) + ", column " + std::to_string(column),
                    "-1 or a slot in 0.." + std::to_string(call.num_slots - 1));
    }
  }
}

CheckedDecode check_sparse_ckv_decode(const Checks& checks, bool takes_fp64, const Tensor& q_tensor,
                                      const Tensor& cache_tensor, const Tensor& indices_tensor,
                                      const std::optional<Tensor>& lengths_tensor,
                                      const std::optional<Tensor>& sink_tensor, const Tensor& out_tensor,
                                      const Tensor& lse_tensor, const Tensor& workspace_tensor, double softmax_scale,
                                      const std::string& layout_name, bool batch_invariant) {
  const RecordLayout& layout = checks.layout(layout_name);
  const Argument q("q", q_tensor), cache("cache", cache_tensor), indices("indices", indices_tensor);
  const Argument lengths("lengths", lengths_tensor), sink("sink", sink_tensor);
  const Argument out("out", out_tensor), lse("lse", lse_tensor), workspace("workspace", workspace_tensor);
  checks.cache(cache, layout);
  check_query(checks, takes_fp64, q, layout);
  const int64_t rows = q.size(0), heads = q.size(1);
  check_selection(checks, indices, lengths, rows);
  check_outputs(checks, q.dtype, sink, out, lse, rows, heads);
  checks.dtype(workspace, {ScalarType::Byte});
  checks.contiguous(workspace);
  const int64_t topk = indices.size(1);
  const int64_t needed = sparse_ckv_decode_workspace_bytes(rows, heads, topk, batch_invariant);
  if (workspace.numel < needed) {
    checks.reject(workspace.name, std::to_string(workspace.numel) + " bytes",
                  "at least sparse_ckv_decode_workspace_bytes = " + std::to_string(needed));
  }
  if (needed > 0) checks.aligned(workspace);
  checks.no_overlap({&out, &lse, &workspace}, {&q, &cache, &indices, &lengths, &sink});

  SparseCkvDecode call;
  call.q = q.data;
  call.q_row_stride = q.stride(0);
  call.q_type = float_type(q.dtype);
  call.cache = cache.data_as<const uint8_t>();
  call.page_size = cache.size(1);
  call.page_stride = cache.stride(0);
  call.num_slots = cache.size(0) * cache.size(1);
  call.layout = layout;
  call.indices = indices.data_as<const int32_t>();
  call.indices_row_stride = indices.stride(0);
  call.lengths = lengths.data_as<const int32_t>();
  call.sink = sink.data_as<const float>();
  call.out = out.data;
  call.out_type = float_type(out.dtype);
  call.lse = lse.data;
  call.softmax_scale = softmax_scale;
  call.rows = rows;
  call.heads = static_cast<int>(heads);
  call.topk = static_cast<int>(topk);
  return {call, workspace.data};
}

}  // namespace torch_sparse_mla
