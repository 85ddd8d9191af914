// Which thread computes what, in which memory, with which instruction set.
#include "sparse_ckv_decode.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "workspace.h"

namespace torch_sparse_mla {
namespace {

constexpr size_t kAlignment = 64;
// Multiply-adds below which waking a second thread costs more than it saves (about 20 us of one core).
constexpr int64_t kSerialWork = 1 << 20;

// Grows, and keeps its contents: whoever takes memory from it assumes nothing about what is there.
class ScratchMemory {
 public:
  char* at_least(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, bytes)));
      if (!memory_) throw std::bad_alloc();
      std::fill_n(memory_.get(), bytes, 0);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

template <class Compute>
class Memory {
 public:
  explicit Memory(const SparseCkvDecode& call)
      : heads_(static_cast<size_t>(ceil_div(call.heads, kHeadsPerBlock) * kHeadsPerBlock)) {}

  size_t partial_bytes() const { return 2 * array_bytes(heads_) + array_bytes(heads_ * kLatentDim); }
  size_t scratch_bytes() const {
    return array_bytes(heads_ * kMaxQueryDim) + array_bytes(size_t{kTokensPerTile} * kMaxQueryDim) +
           array_bytes(heads_ * kTokensPerTile);
  }

  PartialAttention<Compute> partial(char* memory) const {
    Compute* max = reinterpret_cast<Compute*>(memory);
    Compute* sum = reinterpret_cast<Compute*>(memory + array_bytes(heads_));
    Compute* out = reinterpret_cast<Compute*>(memory + 2 * array_bytes(heads_));
    return {max, sum, out};
  }

  WorkerScratch<Compute> scratch(char* memory) const {
    Compute* q = reinterpret_cast<Compute*>(memory);
    memory += array_bytes(heads_ * kMaxQueryDim);
    Compute* keys = reinterpret_cast<Compute*>(memory);
    memory += array_bytes(size_t{kTokensPerTile} * kMaxQueryDim);
    return {q, keys, reinterpret_cast<Compute*>(memory)};
  }

 private:
  static size_t array_bytes(size_t count) { return aligned(count * sizeof(Compute)); }

  size_t heads_;
};

// Parts that hold counted columns; at least one, for an empty part is what makes an empty row.
int live_parts(const SparseCkvDecode& call, int64_t row) {
  const int64_t length = call.lengths ? std::clamp<int64_t>(call.lengths[row], 1, call.topk) : call.topk;
  return static_cast<int>(ceil_div(length, kColumnsPerPart));
}

template <class Compute>
class Decode {
 public:
  Decode(const SparseCkvDecode& call, const DecodeSteps<Compute>& steps) : call_(call), steps_(steps), memory_(call) {}

  // Whole rows, each by one worker.
  void rows(std::atomic<int64_t>& next_row, int64_t end_row) const {
    static thread_local ScratchMemory thread_memory;
    char* memory = thread_memory.at_least(memory_.scratch_bytes() + 2 * memory_.partial_bytes());
    const auto scratch = memory_.scratch(memory);
    const auto part_result = memory_.partial(memory + memory_.scratch_bytes());
    const auto merged = memory_.partial(memory + memory_.scratch_bytes() + memory_.partial_bytes());
    for (int64_t row = next_row++; row < end_row; row = next_row++) {
      steps_.load_query(call_, row, scratch.q);
      steps_.attend_part(call_, row, 0, scratch, merged);
      for (int part = 1; part < live_parts(call_, row); ++part) {
        steps_.attend_part(call_, row, part, scratch, part_result);
        steps_.merge_part(part_result, call_.heads, merged);
      }
      steps_.store_row(call_, row, merged);
    }
  }

  // One row whose parts are shared by several workers.
  void shared_row(int64_t row, int64_t workers, const RunWorkers& run_workers) const {
    static thread_local ScratchMemory thread_partials;
    const int parts = live_parts(call_, row);
    char* partials = thread_partials.at_least(static_cast<size_t>(parts) * memory_.partial_bytes());
    const auto partial = [&](int part) { return memory_.partial(partials + part * memory_.partial_bytes()); };
    std::atomic<int> next_part{0};
    run_workers(std::min<int64_t>(workers, parts), [&] {
      static thread_local ScratchMemory thread_scratch;
      const auto scratch = memory_.scratch(thread_scratch.at_least(memory_.scratch_bytes()));
      steps_.load_query(call_, row, scratch.q);
      for (int part = next_part++; part < parts; part = next_part++) {
        steps_.attend_part(call_, row, part, scratch, partial(part));
      }
    });
    for (int part = 1; part < parts; ++part) steps_.merge_part(partial(part), call_.heads, partial(0));
    steps_.store_row(call_, row, partial(0));
  }

  // As many rows as the workers can take evenly go to one worker each; the rest, fewer than workers, are shared.
  void run(int64_t threads, const RunWorkers& run_workers) const {
    const int64_t parts = ceil_div(call_.topk, kColumnsPerPart);
    const int64_t work = call_.rows * call_.topk * call_.heads * (call_.layout.query_dim + kLatentDim);
    const int64_t workers = work <= kSerialWork ? 1 : std::min(threads, call_.rows * parts);
    const int64_t whole_rows = parts == 1 ? call_.rows : call_.rows - call_.rows % workers;
    std::atomic<int64_t> next_row{0};
    if (whole_rows > 0) run_workers(std::min(workers, whole_rows), [&] { rows(next_row, whole_rows); });
    for (int64_t row = whole_rows; row < call_.rows; ++row) shared_row(row, workers, run_workers);
  }

 private:
  const SparseCkvDecode& call_;
  const DecodeSteps<Compute>& steps_;
  Memory<Compute> memory_;
};

const DecodeSteps<float>& steps_for(InstructionSet instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == InstructionSet::kAvx512) return kDecodeStepsAvx512;
  if (instruction_set == InstructionSet::kAvx2) return kDecodeStepsAvx2;
#endif
  (void)instruction_set;
  return kDecodeStepsBaseline;
}

}  // namespace

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
  static const InstructionSet best = [] {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return InstructionSet::kBaseline;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? InstructionSet::kAvx512 : InstructionSet::kAvx2;
  }();
  return best;
#else
  return InstructionSet::kBaseline;
#endif
}

void sparse_ckv_decode_cpu(const SparseCkvDecode& call, InstructionSet instruction_set, int64_t threads,
                           const RunWorkers& run_workers) {
  if (call.rows == 0) return;
  if (call.q_type == FloatType::kFp64) {
    Decode<double>(call, kDecodeStepsDouble).run(threads, run_workers);
  } else {
    Decode<float>(call, steps_for(instruction_set)).run(threads, run_workers);
  }
}

}  // namespace torch_sparse_mla
