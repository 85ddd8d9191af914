// The merge kernel: one block combines a row's parts for one head and a quarter of the latents.
#pragma once

#include "sm90_attend.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kMergeWarps = 4;
inline constexpr int kMergeLatents = 128;
inline constexpr int kMergeUnroll = 8;

struct MergeParams {
  const float* partial_out;  // [rows, splits, heads, kLatentDim]
  const float* partial_lse;  // [rows, splits, heads], in base 2
  const float* sink;         // or null
  void* out;
  FloatType out_type;
  float* lse;
  int heads;
  int splits;
};

TSM_DEVICE float warp_max(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

TSM_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// Each warp takes every fourth part, and every lane four latents; the warps' sums are added in order.
__global__ void __launch_bounds__(32 * kMergeWarps) merge_kernel(const __grid_constant__ MergeParams p) {
  __shared__ float4 warp_sums[kMergeWarps][32];
  launch_dependents();
  const uint32_t quarter = blockIdx.x % (kLatentDim / kMergeLatents);
  const int64_t result = blockIdx.x / (kLatentDim / kMergeLatents);
  const int64_t row = result / p.heads, head = result % p.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int latent = quarter * kMergeLatents + 4 * lane;
  const int64_t first = row * p.splits * p.heads + head;
  const auto load_values = [&](int split) {
    return __ldcg(reinterpret_cast<const float4*>(p.partial_out + (first + int64_t{split} * p.heads) * kLatentDim + latent));
  };
  const auto load_lse = [&](int split) {
    return split < p.splits ? __ldcg(p.partial_lse + first + int64_t{split} * p.heads) : -INFINITY;
  };
  wait_for_predecessors();

  // Values first: they are on their way while the weights are worked out.
  float4 values[kMergeUnroll];
#pragma unroll
  for (int i = 0; i < kMergeUnroll; ++i) {
    const int split = warp + kMergeWarps * i;
    if (split < p.splits) values[i] = load_values(split);
  }
  float peak = -INFINITY;
  for (int base = 0; base < p.splits; base += 32) peak = fmaxf(peak, load_lse(base + lane));
  peak = warp_max(peak);
  const float shift = peak == -INFINITY ? 0.0f : peak;
  float total = 0.0f;
  for (int base = 0; base < p.splits; base += 32) total += exp2_fast(load_lse(base + lane) - shift);
  total = warp_sum(total);

  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int base = 0; base < p.splits; base += kMergeUnroll * kMergeWarps) {
#pragma unroll
    for (int i = 0; i < kMergeUnroll; ++i) {
      const int split = base + warp + kMergeWarps * i;
      if (split >= p.splits) break;
      if (base > 0) values[i] = load_values(split);
      const float part_lse = load_lse(split);
      if (part_lse == -INFINITY) continue;  // whatever its values hold weighs nothing
      const float weight = exp2_fast(part_lse - shift);
      sum.x += weight * values[i].x, sum.y += weight * values[i].y;
      sum.z += weight * values[i].z, sum.w += weight * values[i].w;
    }
  }
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 more = warp_sums[i][lane];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const bool empty = total == 0.0f;
  const float lse = empty ? -INFINITY : (peak + __log2f(total)) * kLn2;
  const float factor = empty ? 0.0f : sink_factor(p.sink, head, lse) / total;
  const float scaled[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
  store_numbers(p.out, p.out_type, result * kLatentDim + latent, scaled);
  if (quarter == 0 && lane == 0) p.lse[result] = lse;
}

}  // namespace torch_sparse_mla::sm90
