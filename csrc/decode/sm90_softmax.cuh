// Online softmax with lazily raised maxima, in base 2. Weights are relative to a reference for each head and chunk that
// also keeps weight x scale within fp16. References are integers in base 2, so that every rescaling is exact, and only
// ever rise.
//
// A lane holds two heads: kBlocks blocks of eight tokens' scores as [kBlocks][4], as matrix products leave them.
#pragma once

#include "sm90_records.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr float kNoMaximum = -3e38f;
// A new maximum is taken on when a score passes the old one by more than this.
inline constexpr float kSlack = 6.0f;
// Weights are counted from a reference 2 ** kLowest below their maximum at most, where scales are small enough...
inline constexpr float kLowest = 112.0f;
// ...and otherwise so that the largest weight x scale is about 2 ** kPeakExponent, and always below 2 ** 14.
inline constexpr float kPeakExponent = 8.0f;
// Sums of weights are kept this much smaller than the weights, lest they overflow.
inline constexpr float kSumFactor = 0x1p-12f;
inline constexpr float kSumExponent = 12.0f;

// Softmax state of a lane's two heads, in base 2. Weights, their sums and the sums of values are relative to
// 2 ** reference. Without scales the reference is the maximum; with them it also brings weight x scale into fp16's
// range.
struct Softmax {
  float maximum[2] = {kNoMaximum, kNoMaximum};  // an integer
  float reference[2] = {kNoMaximum, kNoMaximum};
  float sum[2] = {0.0f, 0.0f};  // this lane's share, times kSumFactor
};

// x * 2 ** exponent, exactly; `exponent` is an integer from -252 on, or anything lower where the product is zero.
TSM_DEVICE float times_exp2(float x, float exponent) {
  const float half = floorf(0.5f * exponent);
  return x * exp2_fast(half) * exp2_fast(exponent - half);
}

// Moves the references up; the sums follow.
template <int kSums>
TSM_DEVICE void move_references(float first, float second, Softmax& softmax, float (&sums)[kSums][4]) {
  const float kept[2] = {exp2_fast(softmax.reference[0] - first), exp2_fast(softmax.reference[1] - second)};
  // Sums of weights are of one magnitude whatever the scales were, and so are not lost where those grow by any factor.
  softmax.sum[0] = times_exp2(softmax.sum[0], softmax.reference[0] - first);
  softmax.sum[1] = times_exp2(softmax.sum[1], softmax.reference[1] - second);
  softmax.reference[0] = first, softmax.reference[1] = second;
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    sums[n][0] *= kept[0], sums[n][1] *= kept[0], sums[n][2] *= kept[1], sums[n][3] *= kept[1];
  }
}

// The least reference for a head's largest weight x scale to be about 2 ** kPeakExponent. `scale_of(block, i)` is the
// scale of token i of the lane's two in a block.
template <int kBlocks, class ScaleOf>
TSM_DEVICE float reference_of_scaled(const float (&scores)[kBlocks][4], const ScaleOf& scale_of,
                                     const float (&factor)[2], int h) {
  // As logarithms: the products themselves may be too large.
  float peak = -INFINITY;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      peak = fmaxf(peak, scores[block][2 * h + i] * factor[h] + __log2f(scale_of(block, i)));
    }
  }
  return ceilf(quad_max(peak)) - kPeakExponent;
}

// Raises the maxima where a score has passed them by more than kSlack, and the references with them. Warps that hold
// the same scores decide alike.
template <int kLayout, int kBlocks, int kSums, class ScaleOf>
TSM_DEVICE void raise_maxima(const float (&scores)[kBlocks][4], const ScaleOf& scale_of, const float (&factor)[2],
                             Softmax& softmax, float (&sums)[kSums][4]) {
  float peak[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    peak[h] = fmaxf(scores[0][2 * h], scores[0][2 * h + 1]);
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) {
      peak[h] = fmaxf(peak[h], fmaxf(scores[block][2 * h], scores[block][2 * h + 1]));
    }
    peak[h] *= factor[h];
  }
  const bool passed = peak[0] > softmax.maximum[0] + kSlack || peak[1] > softmax.maximum[1] + kSlack;
  if (!__any_sync(~0u, passed)) return;
  constexpr bool kHasScale = Records<kLayout>::kHasScale;
  float reference[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.maximum[h] = fmaxf(softmax.maximum[h], ceilf(quad_max(peak[h])));
    reference[h] = fmaxf(softmax.reference[h], softmax.maximum[h] - (kHasScale ? kLowest : 0.0f));
    if constexpr (kHasScale) reference[h] = fmaxf(reference[h], reference_of_scaled(scores, scale_of, factor, h));
  }
  move_references(reference[0], reference[1], softmax, sums);
}

template <int kBlocks>
TSM_DEVICE float weight_of(const float (&scores)[kBlocks][4], const float (&factor)[2], const Softmax& softmax,
                           int block, int i) {
  return exp2_fast(fmaf(scores[block][i], factor[i / 2], -softmax.reference[i / 2]));
}

// Two tokens' weights of one head, as register `i` of step `k`.
template <int kLayout, int kSteps>
TSM_DEVICE void pack_pair(float low, float high, int k, int i, uint32_t (&weights)[2][kSteps][4]) {
  if constexpr (Records<kLayout>::kLatent == Storage::kBf16) {
    weights[0][k][i] = pack_bf16(low, high);
    const float2 taken = float_pair<__nv_bfloat16>(weights[0][k][i]);
    weights[1][k][i] = pack_bf16(low - taken.x, high - taken.y);
  } else {
    weights[0][k][i] = pack_fp16(low, high);
  }
}

// Whether a weight has outgrown 2 ** 14, with infinities and NaN.
template <int kSteps>
TSM_DEVICE bool outgrown(const uint32_t (&weights)[kSteps][4]) {
  __half2 peak = __half2half2(__ushort_as_half(0));
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = __hmax2(peak, *reinterpret_cast<const __half2*>(&weights[k][i]));
  }
  return !__hble2(peak, __half2half2(__ushort_as_half(0x7400)));
}

// Raises the references so that the largest weight x scale of each head is about 2 ** kPeakExponent.
template <int kBlocks, int kSums, class ScaleOf>
TSM_DEVICE void raise_references(const float (&scores)[kBlocks][4], const ScaleOf& scale_of, const float (&factor)[2],
                                 Softmax& softmax, float (&sums)[kSums][4]) {
  float reference[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    reference[h] = fmaxf(softmax.reference[h], reference_of_scaled(scores, scale_of, factor, h));
  }
  move_references(reference[0], reference[1], softmax, sums);
}

}  // namespace torch_sparse_mla::sm90
