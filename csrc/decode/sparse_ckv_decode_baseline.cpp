// What every CPU of the architecture runs, and the double precision form, which is an oracle and need not be fast.
#include "sparse_ckv_decode.h"

#define VECTOR_BYTES 16

namespace torch_sparse_mla {
namespace {
#include "sparse_ckv_decode_steps.h"
}  // namespace

const DecodeSteps<float> kDecodeStepsBaseline = kSteps<float>;
const DecodeSteps<double> kDecodeStepsDouble = kSteps<double>;

}  // namespace torch_sparse_mla
