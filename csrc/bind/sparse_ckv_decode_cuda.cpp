// torch_sparse_mla::sparse_ckv_decode on CUDA: argument checks, then the sm_90 kernels, or the portable operator where
// they do not take the call. Compiled where nvcc is there to compile the kernels.
#ifdef TORCH_SPARSE_MLA_SM90

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../decode/sparse_ckv_decode_sm90.h"
#include "cuda_stream.h"
#include "sparse_ckv_decode_arguments.h"

namespace torch_sparse_mla {
namespace {

constexpr const char* kPortableOp = "torch_sparse_mla_portable::sparse_ckv_decode";

std::string device_text(const Tensor& tensor) {
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return tensor.is_cpu() ? "cpu" : "meta";
}

// PyTorch calls this when any tensor is on CUDA.
void check_devices(const Checks& checks, const Tensor& q,
                   std::initializer_list<std::pair<const char*, const Tensor*>> others) {
  const bool cuda = q.is_cuda();
  const int32_t index = q.get_device_index();
  for (const auto& [name, tensor] : others) {
    if (!tensor || (tensor->is_cuda() == cuda && tensor->get_device_index() == index)) continue;
    checks.reject(name, "device " + device_text(*tensor), "device " + device_text(q) + ", where 'q' is");
  }
}

const Tensor* given(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// The same checks as on the CPU, on a copy of the lists.
void check_device_data(const Checks& checks, SparseCkvDecode call, int device, void* stream) {
  if (call.rows == 0) return;
  std::vector<int32_t> indices(call.rows * call.topk), lengths(call.lengths ? call.rows : 0);
  sm90_copy_lists(call, indices.data(), lengths.data(), device, stream);
  call.indices = indices.data();
  call.indices_row_stride = call.topk;
  call.lengths = call.lengths ? lengths.data() : nullptr;
  check_sparse_ckv_decode_data(checks, call);
}

// What TORCH_SPARSE_MLA_NATIVE asks for. Looked up at each call, so that one process can compare.
Sm90Form wanted_form() {
  const char* value = std::getenv("TORCH_SPARSE_MLA_NATIVE");
  const std::string_view flag = value ? value : "1";
  if (flag == "narrow") return Sm90Form::kNarrow;
  if (flag == "wide") return Sm90Form::kWide;
  // Of the values that the import accepted, 0 does not come here.
  if (flag == "0" || flag == "1") return Sm90Form::kByModel;
  throw std::invalid_argument("torch_sparse_mla: environment variable TORCH_SPARSE_MLA_NATIVE: got '" +
                              std::string(flag) + "'; allowed: 0, 1, narrow or wide");
}

void call_portable(const Tensor& q, const Tensor& cache, const Tensor& indices, const std::optional<Tensor>& lengths,
                   const std::optional<Tensor>& sink, const Tensor& out, const Tensor& lse, const Tensor& workspace,
                   double softmax_scale, const std::string& layout, bool batch_invariant) {
  using torch::stable::detail::from;
  std::array<StableIValue, 11> stack{
      from(q),   from(cache),     from(indices),       from(lengths), from(sink),           from(out),
      from(lse), from(workspace), from(softmax_scale), from(layout),  from(batch_invariant)};
  if (torch_call_dispatcher(kPortableOp, "", stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    throw std::runtime_error(
        "torch_sparse_mla::sparse_ckv_decode: the portable Triton kernel failed; PyTorch printed its exception, "
        "TORCH_SPARSE_MLA_NATIVE=0 raises it");
  }
}

void sparse_ckv_decode(const Tensor& q, const Tensor& cache, const Tensor& indices,
                       const std::optional<Tensor>& lengths, const std::optional<Tensor>& sink, const Tensor& out,
                       const Tensor& lse, const Tensor& workspace, double softmax_scale, const std::string& layout,
                       bool batch_invariant) {
  const Checks checks("sparse_ckv_decode");
  checks.layout(layout);
  check_devices(checks, q,
                {{"cache", &cache},
                 {"indices", &indices},
                 {"lengths", given(lengths)},
                 {"sink", given(sink)},
                 {"out", &out},
                 {"lse", &lse},
                 {"workspace", &workspace}});
  const CheckedDecode checked = check_sparse_ckv_decode(checks, false, q, cache, indices, lengths, sink, out, lse,
                                                        workspace, softmax_scale, layout, batch_invariant);
  const int device = q.get_device_index();
  void* const stream = current_cuda_stream(device);
  if (checked_mode()) check_device_data(checks, checked.call, device, stream);
  if (checked.call.rows == 0) return;
  if (sm90_unsupported(checked.call, device)) {
    return call_portable(q, cache, indices, lengths, sink, out, lse, workspace, softmax_scale, layout, batch_invariant);
  }
  sparse_ckv_decode_sm90(checked.call, checked.workspace, batch_invariant, wanted_form(), device, stream);
}

STABLE_TORCH_LIBRARY_IMPL(torch_sparse_mla, CUDA, library) {
  library.impl("sparse_ckv_decode", TORCH_BOX(&sparse_ckv_decode));
}

}  // namespace
}  // namespace torch_sparse_mla

#endif  // TORCH_SPARSE_MLA_SM90
