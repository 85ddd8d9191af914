// Sparse CKV decode on Hopper GPUs (sm_90a), framework-free. The contract is torch_sparse_mla/decode/contract.py;
// whoever calls has checked it.
//
// A row's list is cut into parts; one block attends with up to 16 heads to one part, or, in the wide form, with up
// to 64. A second kernel merges a row's parts. How many parts follows from static sizes alone, where they begin and end
// from the row's live length.
#pragma once

#include <cstdint>

#include "sparse_ckv_decode.h"
#include "workspace.h"

namespace torch_sparse_mla {

// Why these kernels cannot take a call, or null when they can. A function of static arguments, addresses and the device
// alone.
const char* sm90_unsupported(const SparseCkvDecode& call, int device);

// Enqueues a call on `stream`; every pointer in `call` is device memory. `workspace` and `form` are as workspace.h
// says. Throws std::runtime_error when a launch fails.
void sparse_ckv_decode_sm90(const SparseCkvDecode& call, void* workspace, bool batch_invariant, Sm90Form form,
                            int device, void* stream);

// Copies a call's lists to host memory, `indices` packed as [rows, topk], and waits. Throws std::runtime_error while
// the stream is being captured.
void sm90_copy_lists(const SparseCkvDecode& call, int32_t* indices, int32_t* lengths, int device, void* stream);

}  // namespace torch_sparse_mla
