// The headers come before the target pragma, so that their inline functions stay runnable everywhere.
#include "sparse_ckv_decode.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define VECTOR_BYTES 64

namespace torch_sparse_mla {
namespace {
#include "sparse_ckv_decode_steps.h"
}  // namespace

const DecodeSteps<float> kDecodeStepsAvx512 = kSteps<float>;

}  // namespace torch_sparse_mla
#endif
