// torch_sparse_mla::sparse_ckv_decode on the CPU: argument checks, then the framework-free kernel.
#include "../decode/sparse_ckv_decode.h"

#include <pthread.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "sparse_ckv_decode_arguments.h"

namespace torch_sparse_mla {
namespace {

// The widest instruction set, or the one that TORCH_SPARSE_MLA_CPU_ISA names: another machine's, to get its bits.
InstructionSet chosen_instruction_set() {
  const InstructionSet best = best_instruction_set();
  const char* value = std::getenv("TORCH_SPARSE_MLA_CPU_ISA");
  if (!value) return best;
  std::string allowed;
  for (const auto& [name, instruction_set] :
       {std::pair{"baseline", InstructionSet::kBaseline}, std::pair{"avx2", InstructionSet::kAvx2},
        std::pair{"avx512", InstructionSet::kAvx512}}) {
    if (instruction_set > best) break;
    if (std::string(value) == name) return instruction_set;
    allowed += std::string(allowed.empty() ? "" : " or ") + name;
  }
  throw std::invalid_argument("torch_sparse_mla: environment variable TORCH_SPARSE_MLA_CPU_ISA: got '" +
                              std::string(value) + "'; allowed on this CPU: " + allowed);
}

// The threads of PyTorch's pool do not survive fork, and starting work on them in a child waits for ever.
std::atomic<bool> forked{false};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

void run_workers(int64_t workers, const std::function<void()>& body) {
  if (workers == 1) return body();
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) body();
  });
}

void sparse_ckv_decode(const Tensor& q, const Tensor& cache, const Tensor& indices,
                       const std::optional<Tensor>& lengths, const std::optional<Tensor>& sink, const Tensor& out,
                       const Tensor& lse, const Tensor& workspace, double softmax_scale, const std::string& layout,
                       bool batch_invariant) {
  // No check of devices: PyTorch calls this only when every tensor is on the CPU.
  const Checks checks("sparse_ckv_decode");
  const SparseCkvDecode call = check_sparse_ckv_decode(checks, true, q, cache, indices, lengths, sink, out, lse,
                                                       workspace, softmax_scale, layout, batch_invariant)
                                   .call;
  const InstructionSet instruction_set = chosen_instruction_set();
  if (checked_mode()) check_sparse_ckv_decode_data(checks, call);
  const int64_t threads = forked ? 1 : torch::stable::get_num_threads();
  sparse_ckv_decode_cpu(call, instruction_set, threads, run_workers);
}

STABLE_TORCH_LIBRARY_IMPL(torch_sparse_mla, CPU, library) {
  library.impl("sparse_ckv_decode", TORCH_BOX(&sparse_ckv_decode));
}

}  // namespace
}  // namespace torch_sparse_mla
