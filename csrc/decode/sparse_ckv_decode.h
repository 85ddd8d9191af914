// Sparse CKV decode on the CPU, framework-free. The contract is torch_sparse_mla/decode/contract.py; whoever calls has
// checked it.
//
// A row's list is cut into parts of kColumnsPerPart columns. A part is attended to on its own, and a row's parts are
// merged in order, so a row's bits depend neither on the other rows nor on how many threads share the work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "../common/record_layout.h"

namespace torch_sparse_mla {

enum class FloatType : uint8_t { kBf16, kFp16, kFp32, kFp64 };

inline constexpr int kColumnsPerPart = 256;
inline constexpr int kTokensPerTile = 32;
// Head counts are padded to this in scratch memory, so that the kernels have no tail of heads.
inline constexpr int kHeadsPerBlock = 4;

struct SparseCkvDecode {
  const void* q;         // [rows, heads, layout.query_dim] of q_type, a row's heads packed
  int64_t q_row_stride;  // elements
  FloatType q_type;
  const uint8_t* cache;  // [pages, page_size, layout.record_bytes], a page's records packed
  int64_t page_size;
  int64_t page_stride;  // bytes
  int64_t num_slots;    // pages * page_size
  RecordLayout layout;
  const int32_t* indices;      // [rows, topk]
  int64_t indices_row_stride;  // elements
  const int32_t* lengths;      // [rows], or null: topk
  const float* sink;           // [heads], or null
  void* out;                   // [rows, heads, kLatentDim] of out_type, contiguous
  FloatType out_type;
  void* lse;  // [rows, heads] of the compute type, contiguous
  double softmax_scale;
  int64_t rows;
  int heads;
  int topk;
};

// Attention of one row over some of its list. Head counts in memory are padded to a multiple of kHeadsPerBlock.
template <class Compute>
struct PartialAttention {
  Compute* max;  // [heads], largest scaled score; -inf: no record
  Compute* sum;  // [heads], sum of exp(score - max)
  Compute* out;  // [heads, kLatentDim], sum of exp(score - max) * latent
};

// Memory of one worker.
template <class Compute>
struct WorkerScratch {
  Compute* q;       // [heads, layout.query_dim]
  Compute* keys;    // [kTokensPerTile, kMaxQueryDim], records of one tile as numbers
  Compute* scores;  // [heads, kTokensPerTile], then the weights
};

// The steps of a decode, compiled once for each instruction set.
template <class Compute>
struct DecodeSteps {
  void (*load_query)(const SparseCkvDecode& call, int64_t row, Compute* q);
  void (*attend_part)(const SparseCkvDecode& call, int64_t row, int part, const WorkerScratch<Compute>& scratch,
                      const PartialAttention<Compute>& result);
  void (*merge_part)(const PartialAttention<Compute>& part, int heads, const PartialAttention<Compute>& merged);
  void (*store_row)(const SparseCkvDecode& call, int64_t row, const PartialAttention<Compute>& merged);
};

extern const DecodeSteps<float> kDecodeStepsBaseline;
extern const DecodeSteps<double> kDecodeStepsDouble;
#if defined(__x86_64__)
extern const DecodeSteps<float> kDecodeStepsAvx2;
extern const DecodeSteps<float> kDecodeStepsAvx512;
#endif

// Runs `body` once on each of `workers` threads and waits for all of them.
using RunWorkers = std::function<void(int64_t workers, const std::function<void()>& body)>;

enum class InstructionSet : uint8_t { kBaseline, kAvx2, kAvx512 };

// The widest instruction set that this CPU and this build have.
InstructionSet best_instruction_set();

// Computes every row. `threads`: workers to use at most. Scratch memory is kept by each thread for the next call.
void sparse_ckv_decode_cpu(const SparseCkvDecode& call, InstructionSet instruction_set, int64_t threads,
                           const RunWorkers& run_workers);

}  // namespace torch_sparse_mla
