// The arguments of sparse_ckv_decode, checked, for whichever kernel takes them.
#pragma once

#include <optional>
#include <string>

#include "../decode/sparse_ckv_decode.h"
#include "arguments.h"

namespace torch_sparse_mla {

struct CheckedDecode {
  SparseCkvDecode call;
  void* workspace;
};

// Every check but that of devices, in the order and words of torch_sparse_mla/decode/contract.py. `takes_fp64`: whether
// the kernel has float64 queries.
CheckedDecode check_sparse_ckv_decode(const Checks& checks, bool takes_fp64, const Tensor& q_tensor,
                                      const Tensor& cache_tensor, const Tensor& indices_tensor,
                                      const std::optional<Tensor>& lengths_tensor,
                                      const std::optional<Tensor>& sink_tensor, const Tensor& out_tensor,
                                      const Tensor& lse_tensor, const Tensor& workspace_tensor, double softmax_scale,
                                      const std::string& layout_name, bool batch_invariant);

// Checked mode: names the first length beyond K, then the first index that is neither -1 nor a slot. `call` holds lists
// in host memory.
void check_sparse_ckv_decode_data(const Checks& checks, const SparseCkvDecode& call);

}  // namespace torch_sparse_mla
