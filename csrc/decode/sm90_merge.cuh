// The merge kernel combines a row's parts. A result is one head of one row.
#pragma once

#include "sm90_attend.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kMergeThreads = 128;
inline constexpr int kMergeLatents = 8;  // of one thread
inline constexpr int kMergeLoads = 4;    // of one thread before it uses the first
// Of a multiprocessor at a time, as registers go.
inline constexpr int kMergeBlocks = 9;

struct MergeParams {
  Partials partials;
  const float* sink;  // or null
  void* out;
  FloatType out_type;
  float* lse;
  uint32_t results;  // rows * heads
  uint32_t heads;
  int splits;
};

TSM_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// kSplitLanes threads share the parts of eight latents, and their sums are added in order. A warp works on one result.
template <int kSplitLanes>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks) merge_kernel(const __grid_constant__ MergeParams p) {
  launch_dependents();
  constexpr int kColumns = kMergeThreads / kSplitLanes;
  const int lane = threadIdx.x % 32, split_lane = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  // The partial results of one launch are a few megabytes: 32 bits number them, and the results that they make.
  const uint32_t at = (blockIdx.x * kColumns + column) * kMergeLatents;
  const uint32_t result = at / kLatentDim, latent = at % kLatentDim;
  if (result >= p.results) return;
  const uint32_t row = result / p.heads, head = result - row * p.heads;
  const uint32_t first = row * p.splits * p.heads + head;
  const uint16_t* latents = p.partials.latents + first * kLatentDim + latent;
  const float* units = p.partials.units + first * kChunks + latent / kChunkLatents;
  const float* lses = p.partials.lse_log2 + first;
  wait_for_predecessors();

  // Values first: they are on their way while the weights are worked out.
  uint4 values[kMergeLoads];
  float part_units[kMergeLoads];
  const auto load_values = [&](int base) {
#pragma unroll
    for (int i = 0; i < kMergeLoads; ++i) {
      const uint32_t part = (base + split_lane + kSplitLanes * i) * p.heads;
      if (base + split_lane + kSplitLanes * i >= p.splits) break;
      values[i] = __ldcg(reinterpret_cast<const uint4*>(latents + part * kLatentDim));
      part_units[i] = __ldcg(units + part * kChunks);
    }
  };
  const auto load_lse = [&](int split) { return split < p.splits ? __ldcg(lses + split * p.heads) : -INFINITY; };
  load_values(0);
  float lse = load_lse(lane);
  float peak = lse;
  for (int split = lane + 32; split < p.splits; split += 32) peak = fmaxf(peak, load_lse(split));
  peak = warp_max(peak);
  const float shift = peak == -INFINITY ? 0.0f : peak;
  float weight = exp2_fast(lse - shift);
  float total = weight;
  for (int split = lane + 32; split < p.splits; split += 32) total += exp2_fast(load_lse(split) - shift);
  total = warp_sum(total);

  float sums[kMergeLatents] = {};
  for (int base = 0; base < p.splits; base += kSplitLanes * kMergeLoads) {
    if (base > 0) {
      load_values(base);
      lse = load_lse(base + lane);
      weight = exp2_fast(lse - shift);
    }
#pragma unroll
    for (int i = 0; i < kMergeLoads; ++i) {
      const int offset = split_lane + kSplitLanes * i;
      const float part_weight = __shfl_sync(~0u, weight, offset);
      const float part_lse = __shfl_sync(~0u, lse, offset);
      // Whatever the values of an empty part hold weighs nothing.
      if (part_lse == -INFINITY) continue;
      const float factor = part_weight * part_units[i];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = float_pair<__half>((&values[i].x)[k]);
        sums[2 * k] += factor * x.x, sums[2 * k + 1] += factor * x.y;
      }
    }
  }
  if constexpr (kSplitLanes > 1) {
    __shared__ float shared_sums[kSplitLanes][kMergeLatents][kColumns];
#pragma unroll
    for (int i = 0; i < kMergeLatents; ++i) shared_sums[split_lane][i][column] = sums[i];
    __syncthreads();
    if (split_lane > 0) return;
#pragma unroll
    for (int other = 1; other < kSplitLanes; ++other) {
#pragma unroll
      for (int i = 0; i < kMergeLatents; ++i) sums[i] += shared_sums[other][i][column];
    }
  }
  const bool empty = total == 0.0f;
  const float row_lse = empty ? -INFINITY : (peak + __log2f(total)) * kLn2;
  const float factor = empty ? 0.0f : sink_factor(p.sink, head, row_lse) / total;
#pragma unroll
  for (int i = 0; i < kMergeLatents; i += 4) {
    const float scaled[4] = {sums[i] * factor, sums[i + 1] * factor, sums[i + 2] * factor, sums[i + 3] * factor};
    store_numbers(p.out, p.out_type, at + i, scaled);
  }
  if (latent == 0) p.lse[result] = row_lse;
}

}  // namespace torch_sparse_mla::sm90
