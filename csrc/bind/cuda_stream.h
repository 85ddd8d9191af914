#pragma once

#include <cstdint>

namespace torch_sparse_mla {

// PyTorch's current stream on a device, as a cudaStream_t. Throws std::runtime_error where there is none: stream 0 in
// its place would silently run beside the stream that the caller's tensors are ordered on.
void* current_cuda_stream(int32_t device_index);

}  // namespace torch_sparse_mla
