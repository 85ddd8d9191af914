// The wide attention kernel: one block attends with a tile of 64 heads to one part of one row's list.
//
// One warpgroup fetches records, and unpacks each once for all heads into a tile that wgmma reads. Two more attend,
// each with half of the latents, as keys and as values: they add up their partial scores through shared memory, and
// each then has the weights of all heads in registers, times its own chunks' scales.
//
// A tile is unpacked while the tile before is attended to.
#pragma once

#include "sm90_softmax.cuh"
#include "sm90_wide_producer.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr uint32_t kAllValid = (1u << kTokensPerUnpacker) - 1;
inline constexpr int kHeadsPerQueryWarp = kWideHeads / (2 * kWarpgroupWarps);
// Named barriers: one for each pair of warps that exchange scores from 1 on, and one for both warpgroups.
inline constexpr int kPairBarrier = 1;
inline constexpr int kConsumersBarrier = kPairBarrier + kWarpgroupWarps;

using WideScores = float[kWideBlocks][4];
using WideWeights = uint32_t[2][kWideSteps][4];
// A warpgroup's half of the latents: two chunks.
using WideSums = float[2 * kChunkLatents / 8][4];

// ---- consumers

// In loops that are not unrolled, as where results are stored: a block runs this once, and would wait for instructions.
template <int kLayout, class QueryT, class Shared>
TSM_DEVICE void store_queries(const AttendParams& p, const WidePart& part, Shared& shared) {
  using Wide = WideQuery<kLayout, QueryT>;
  constexpr int kTogether = 4;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kHeadsPerQueryWarp;
  const uint16_t* row = p.q + part.row * p.q_row_stride;
#pragma unroll 1
  for (int i = 0; i < kHeadsPerQueryWarp; ++i) {
    const int head = part.head_tile * kWideHeads + first + i;
    const bool present = head < p.heads;
    const uint16_t* source = present ? row + head * Records<kLayout>::kQueryDim : row;
    Wide(shared.queries, first + i, lane).fetch(source, p.q_aligned, present, lane);
  }
  wait_for_words();
#pragma unroll 1
  for (int base = first; base < first + kHeadsPerQueryWarp; base += kTogether) {
    float factors[kTogether], rope_factors[kTogether];
    typename Wide::Numbers numbers[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) Wide(shared.queries, base + i, lane).read(numbers[i]);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) numbers[i].convert(p.scale_log2, factors[i], rope_factors[i]);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      Wide(shared.queries, base + i, lane).write(numbers[i]);
      if (lane == 0) shared.factor[base + i] = factors[i], shared.rope_factor[base + i] = rope_factors[i];
    }
  }
}

// One warp's way through the tiles, with 16 heads and its warpgroup's half of the latents.
template <int kLayout, class QueryT, class Shared>
struct WideConsumer {
  using R = Records<kLayout>;
  using Tile = WideTile<kLayout>;
  using Latent = typename Tile::Latent;
  static constexpr int kHalfColumns = kLatentColumns / 2;
  static constexpr bool kBf16Rope = R::kRope == Storage::kBf16;

  Shared& shared;
  const int half;  // which warpgroup
  const int warp;  // in it
  const Lane lane;
  float factor[2], rope_factor[2];
  int stage = 0;

  TSM_DEVICE WideConsumer(Shared& shared)
      : shared(shared), half(of_warp(threadIdx.x / kWarpgroupThreads)), warp(threadIdx.x / 32 % kWarpgroupWarps) {}

  TSM_DEVICE int head_of(int h) const { return 16 * warp + lane.row + 8 * h; }

  TSM_DEVICE void read_factors() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = shared.factor[head_of(h)];
      if constexpr (Tile::kRopeScale) rope_factor[h] = shared.rope_factor[head_of(h)];
    }
  }

  // A step of a column of this warpgroup's half of the latents.
  TSM_DEVICE static void multiply_latents(const AlongRows& queries, const AlongRows& keys, int column, int step,
                                          bool accumulate, WideScores& scores) {
    multiply_keys_64<Latent>(scores, queries.at(column * kQueryColumnBytes, step),
                             keys.at(column * kTileColumnBytes, step), accumulate);
  }

  // This warpgroup's half of the RoPE part.
  TSM_DEVICE void multiply_rope(WideScores& scores, bool accumulate) const {
    constexpr int kSteps = kColumnSteps / 2;
    const int offset = half * kSteps * kStepBytes;
    const AlongRows queries(shared_address(shared.queries[kRopeColumn]) + offset);
    const AlongRows keys(shared_address(shared.tiles[stage][kRopeColumn]) + offset);
#pragma unroll
    for (int i = 0; i < WideQuery<kLayout, QueryT>::kRopeTerms * kSteps; ++i) {
      const int term = i / kSteps, step = i % kSteps;
      multiply_keys_64<typename Tile::Rope>(scores, queries.at(term * kQueryColumnBytes, step), keys.at(0, step),
                                            accumulate || i > 0);
    }
  }

  // Where the scales of this warpgroup's first chunk are.
  TSM_DEVICE int scale_row() const { return Tile::kChunkScales ? 2 * half : 0; }

  // The scale in row `row` of token 8 * block + 2 * quad, and of the next.
  TSM_DEVICE float2 scale_pair(int row, int block) const {
    return *reinterpret_cast<const float2*>(&shared.scales[stage][row][8 * block + 2 * lane.quad]);
  }

  TSM_DEVICE void scale_scores(int row, WideScores& scores) const {
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      const float2 scale = scale_pair(row, block);
      scores[block][0] *= scale.x, scores[block][1] *= scale.y, scores[block][2] *= scale.x,
          scores[block][3] *= scale.y;
    }
  }

  // scores += more * scale * by_head
  TSM_DEVICE void add_scaled(int row, const WideScores& more, float first, float second, WideScores& scores) const {
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      const float2 scale = scale_pair(row, block);
      scores[block][0] += more[block][0] * first * scale.x, scores[block][1] += more[block][1] * first * scale.y;
      scores[block][2] += more[block][2] * second * scale.x, scores[block][3] += more[block][3] * second * scale.y;
    }
  }

  // This warpgroup's part of the scores, in units of `factor`.
  TSM_DEVICE void score(WideScores& scores) const {
    constexpr bool kRopeAfterScale = Tile::kChunkScales && kBf16Rope;
    const AlongRows queries(shared_address(shared.queries[half * kHalfColumns]));
    const AlongRows keys(shared_address(shared.tiles[stage][half * kHalfColumns]));
    WideScores more;
    products_fence();
#pragma unroll
    for (int i = 0; i < kHalfColumns * kColumnSteps; ++i) {
      // Chunks by turns, where each has scales of its own.
      constexpr int kSums = Tile::kChunkScales ? 2 : 1;
      const int chunk = i % kSums, column = chunk * (kHalfColumns / kSums) + i / kSums / kColumnSteps;
      multiply_latents(queries, keys, column, i / kSums % kColumnSteps, i >= kSums, chunk == 0 ? scores : more);
    }
    if constexpr (kBf16Rope && !kRopeAfterScale) multiply_rope(scores, true);
    if constexpr (Tile::kRopeScale) multiply_rope(more, false);
    products_commit();
    products_wait<0>();
    pin(scores);
    if constexpr (Tile::kChunkScales || Tile::kRopeScale) pin(more);
    if constexpr (R::kHasScale) scale_scores(scale_row(), scores);
    if constexpr (Tile::kChunkScales) add_scaled(scale_row() + 1, more, 1.0f, 1.0f, scores);
    if constexpr (Tile::kRopeScale) add_scaled(Tile::kScaleRows, more, rope_factor[0], rope_factor[1], scores);
    if constexpr (kRopeAfterScale) {
      pin(scores);
      products_fence();
      multiply_rope(scores, true);
      products_commit();
      products_wait<0>();
      pin(scores);
    }
  }

  // Adds the other warpgroup's part: the same bits in both. A thread writes where it has read a tile before.
  TSM_DEVICE void exchange(int tile, WideScores& scores) const {
    const int thread = threadIdx.x % kWarpgroupThreads, mine = (half + tile) % 2;
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      shared.scores[mine][block][thread] =
          make_float4(scores[block][0], scores[block][1], scores[block][2], scores[block][3]);
    }
    named_barrier(kPairBarrier + warp, 64);
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      const float4 other = shared.scores[mine ^ 1][block][thread];
      scores[block][0] += other.x, scores[block][1] += other.y, scores[block][2] += other.z,
          scores[block][3] += other.w;
    }
  }

  TSM_DEVICE void mask_absent(WideScores& scores) const {
    const uint32_t valid = shared.valid[stage][lane.quad];
    if (valid == kAllValid) return;
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(valid >> (2 * block + i % 2) & 1)) scores[block][i] = -INFINITY;
      }
    }
  }

  // The A operands of the values' products: weights times the scales of either chunk, or the two terms of a weight.
  TSM_DEVICE void pack(const WideScores& w, WideWeights& weights) const {
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      float2 scale = make_float2(1.0f, 1.0f), scale_of_second = scale;
      if constexpr (R::kHasScale) scale = scale_pair(scale_row(), block);
      if constexpr (Tile::kChunkScales) scale_of_second = scale_pair(scale_row() + 1, block);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int step = block / 2, i = block % 2 * 2 + h;
        const float low = w[block][2 * h], high = w[block][2 * h + 1];
        pack_pair<kLayout>(low * scale.x, high * scale.y, step, i, weights);
        if constexpr (Tile::kChunkScales) {
          weights[1][step][i] = pack_fp16(low * scale_of_second.x, high * scale_of_second.y);
        }
      }
    }
  }

  // The larger of a token's scales in this warpgroup's chunks, which have one reference.
  TSM_DEVICE float larger_scale(int block, int i) const {
    float2 scale = scale_pair(scale_row(), block);
    if constexpr (Tile::kChunkScales) {
      const float2 second = scale_pair(scale_row() + 1, block);
      scale = make_float2(fmaxf(scale.x, second.x), fmaxf(scale.y, second.y));
    }
    return i == 0 ? scale.x : scale.y;
  }

  // How far the references must rise for the largest weight x scale of each head to be about 2 ** kPeakExponent.
  TSM_DEVICE void excess_of(const WideScores& w, float (&excess)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // As logarithms: the products themselves may be too large.
      float peak = -INFINITY;
#pragma unroll
      for (int block = 0; block < kWideBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          peak = fmaxf(peak, __log2f(w[block][2 * h + i]) + __log2f(larger_scale(block, i)));
        }
      }
      excess[h] = fmaxf(ceilf(quad_max(peak)) - kPeakExponent, 0.0f);
    }
  }

  // From scores to weights and their operands.
  TSM_DEVICE void weigh(WideScores& scores, Softmax& softmax, WideWeights& weights, WideSums& sums) const {
    raise_maxima<kLayout>(scores, [&](int block, int i) { return larger_scale(block, i); }, factor, softmax, sums);
    float total[2] = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[block][i] = weight_of(scores, factor, softmax, block, i);
        total[i / 2] += scores[block][i];
      }
    }
    softmax.sum[0] += total[0] * kSumFactor;
    softmax.sum[1] += total[1] * kSumFactor;
    pack(scores, weights);
    if constexpr (R::kHasScale) {
      if (__any_sync(~0u, outgrown(weights[0]) | (Tile::kChunkScales && outgrown(weights[1])))) {
        float excess[2];
        excess_of(scores, excess);
        move_references(softmax.reference[0] + excess[0], softmax.reference[1] + excess[1], softmax, sums);
#pragma unroll
        for (int block = 0; block < kWideBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[block][i] = times_exp2(scores[block][i], -excess[i / 2]);
        }
        pack(scores, weights);
      }
    }
  }

  TSM_DEVICE void add_values(const WideWeights& weights, WideSums& sums) const {
    constexpr int kChunkColumns = kLatentColumns / kChunks, kChunkBlocks = kChunkLatents / 8;
    const AcrossRows values(shared_address(shared.tiles[stage][half * kHalfColumns]));
    pin(sums);
    products_fence();
#pragma unroll
    for (int term = 0; term < R::kWeightTerms; ++term) {
#pragma unroll
      for (int step = 0; step < kWideSteps; ++step) {
        multiply_values_64<Latent, 0>(sums, weights[term][step], values.at(0, step));
        multiply_values_64<Latent, kChunkBlocks>(sums, weights[Tile::kChunkScales ? 1 : term][step],
                                                 values.at(kChunkColumns * kTileColumnBytes, step));
      }
    }
    products_commit();
    products_wait<0>();
    pin(sums);
  }

  TSM_DEVICE void attend(int tiles, Softmax& softmax, WideSums& sums) {
    for (int tile = 0; tile < tiles; ++tile) {
      stage = tile % kWideStages;
      barrier_wait(shared_address(&shared.full[stage]), tile / kWideStages % 2);
      WideScores scores;
      score(scores);
      exchange(tile, scores);
      mask_absent(scores);
      WideWeights weights;
      weigh(scores, softmax, weights, sums);
      add_values(weights, sums);
      __syncwarp();
      if (lane.index == 0) barrier_arrive(shared_address(&shared.empty[stage]));
    }
  }
};

// ---- results

// Four lanes' four words each, transposed.
TSM_DEVICE void transpose_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = quad & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
      (upper ? words[i] : words[i + distance]) = received;
    }
  }
}

// Writes 128 latents of a chunk of a lane's first head, times `factor`: blocks kFirst on of the sums.
template <FloatType kType, int kFirst>
TSM_DEVICE void store_chunk(void* out, int64_t at, bool present, float factor, const Lane& lane, const WideSums& sums) {
  constexpr int kBlocks = kChunkLatents / 8;
  if constexpr (kType == FloatType::kFp32) {
    if (!present) return;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float (&x)[4] = sums[kFirst + block];
      const float pair[2] = {x[0] * factor, x[1] * factor};
      store_numbers(out, kType, at + 8 * block + 2 * lane.quad, pair);
    }
  } else {
#pragma unroll
    for (int block = 0; block < kBlocks; block += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = sums[kFirst + block + i];
        const float low = x[0] * factor, high = x[1] * factor;
        words[i] = kType == FloatType::kBf16 ? pack_bf16(low, high) : pack_fp16(low, high);
      }
      transpose_quad(words, lane.quad);
      if (!present) continue;
      uint16_t* target = static_cast<uint16_t*>(out) + at + 8 * block + 8 * lane.quad;
      *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Both chunks.
template <FloatType kType>
TSM_DEVICE void store_half(void* out, int64_t at, bool present, float first, float second, const Lane& lane,
                           const WideSums& sums) {
  store_chunk<kType, 0>(out, at, present, first, lane, sums);
  store_chunk<kType, kChunkLatents / 8>(out, at + kChunkLatents, present, second, lane, sums);
}

template <int kFirst>
TSM_DEVICE float peak_of_chunk(const WideSums& sums) {
  float peak = 0.0f;
#pragma unroll
  for (int block = 0; block < kChunkLatents / 8; ++block) {
    peak = fmaxf(peak, fmaxf(fabsf(sums[kFirst + block][0]), fabsf(sums[kFirst + block][1])));
  }
  return quad_max(peak);
}

// The half of the latents of a lane's first head, normalised, to the partial results or to the output.
template <int kLayout>
TSM_DEVICE void store_head(const AttendParams& p, const WidePart& part, int half, int head, const Lane& lane,
                           const Softmax& softmax, const WideSums& sums) {
  constexpr int kSecond = kChunkLatents / 8;
  constexpr float kFactor = (1 << Records<kLayout>::kValueExponent) * kSumFactor;
  const bool present = head < p.heads, writes_lse = half == 0 && lane.quad == 0 && present;
  const float total = quad_sum(softmax.sum[0]);
  const float lse_log2 = total == 0.0f ? -INFINITY : softmax.reference[0] + kSumExponent + __log2f(total);
  float first = total == 0.0f ? 0.0f : kFactor / total, second = first;
  int64_t result = part.row * p.heads + head;
  if (p.splits > 1) {
    result += (part.row * (p.splits - 1) + part.split) * p.heads;
    const Unit unit_of_first = unit_of(peak_of_chunk<0>(sums) * first);
    const Unit unit_of_second = unit_of(peak_of_chunk<kSecond>(sums) * second);
    if (lane.quad == 0 && present) {
      float* units = p.partials.units + result * kChunks + 2 * half;
      units[0] = unit_of_first.unit, units[1] = unit_of_second.unit;
    }
    if (writes_lse) p.partials.lse_log2[result] = lse_log2;
    first *= unit_of_first.inverse, second *= unit_of_second.inverse;
  } else {
    const float lse = lse_log2 * kLn2;
    if (writes_lse) p.lse[result] = lse;
    // Zero where nothing was attended to: the sink's share would be NaN.
    const float share = total == 0.0f || !present ? 0.0f : sink_factor(p.sink, head, lse);
    first *= share, second *= share;
  }
  const int64_t at = result * kLatentDim + 2 * half * kChunkLatents;
  if (p.splits > 1) {
    store_half<FloatType::kFp16>(p.partials.latents, at, present, first, second, lane, sums);
  } else if (p.out_type == FloatType::kBf16) {
    store_half<FloatType::kBf16>(p.out, at, present, first, second, lane, sums);
  } else if (p.out_type == FloatType::kFp16) {
    store_half<FloatType::kFp16>(p.out, at, present, first, second, lane, sums);
  } else {
    store_half<FloatType::kFp32>(p.out, at, present, first, second, lane, sums);
  }
}

// Makes a lane's second head its first.
TSM_DEVICE void turn_heads(Softmax& softmax, WideSums& sums) {
  softmax.sum[0] = softmax.sum[1], softmax.reference[0] = softmax.reference[1];
#pragma unroll
  for (float (&x)[4] : sums) x[0] = x[2], x[1] = x[3];
}

template <int kLayout, class QueryT>
__global__ void __launch_bounds__(kWideThreads, 1) attend_wide_kernel(const __grid_constant__ AttendParams p) {
  using Shared = WideSharedMemory<kLayout, QueryT>;
  auto& shared = *reinterpret_cast<Shared*>(dynamic_shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWideStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), kWarpgroupWarps);
      barrier_init(shared_address(&shared.empty[i]), 2 * kWarpgroupWarps);
    }
    fence_barrier_init();
  }
  launch_dependents();
  __syncthreads();
  wait_for_predecessors();

  if (threadIdx.x >= kWideConsumerThreads) {
    keep_registers<kProducerRegisters>();
    const WidePart part(p);
    Unpacker<kLayout, Shared>(p, part, shared).run();
  } else {
    take_registers<kConsumerRegisters>();
    const WidePart part(p);
    WideConsumer<kLayout, QueryT, Shared> consumer(shared);
    if (part.tiles() > 0) {
      store_queries<kLayout, QueryT>(p, part, shared);
      fence_async_proxy();
      named_barrier(kConsumersBarrier, kWideConsumerThreads);
      consumer.read_factors();
    }
    Softmax softmax;
    WideSums sums = {};
    consumer.attend(part.tiles(), softmax, sums);
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int head = part.head_tile * kWideHeads + consumer.head_of(h);
      store_head<kLayout>(p, part, consumer.half, head, consumer.lane, softmax, sums);
      turn_heads(softmax, sums);
    }
  }
}

}  // namespace torch_sparse_mla::sm90
