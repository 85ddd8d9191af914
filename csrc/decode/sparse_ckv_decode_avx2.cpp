// The headers come before the target pragma, so that their inline functions stay runnable everywhere.
#include "sparse_ckv_decode.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define VECTOR_BYTES 32

namespace torch_sparse_mla {
namespace {
#include "sparse_ckv_decode_steps.h"
}  // namespace

const DecodeSteps<float> kDecodeStepsAvx2 = kSteps<float>;

}  // namespace torch_sparse_mla
#endif
