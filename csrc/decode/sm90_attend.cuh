// The attention kernel: one block attends with a tile of 16 heads to one part of one row's list.
//
// Four producer warps fetch records into a ring of tiles with bulk copies. Two groups of four consumer warps take turns
// at the tiles; within a group each warp owns one chunk of 128 latents, and the four add up their partial scores
// through shared memory. At the end the groups merge, and each writes half of the heads.
#pragma once

#include "sm90_call.cuh"
#include "sm90_softmax.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kGroups = 2;
inline constexpr int kGroupThreads = 32 * kChunks;
inline constexpr int kConsumerThreads = kGroups * kGroupThreads;
inline constexpr int kProducerWarps = 4;
inline constexpr int kThreads = kConsumerThreads + 32 * kProducerWarps;
inline constexpr int kTokensPerProducer = kTileTokens / kProducerWarps;
// Named barriers: one for each group from 1 on.
inline constexpr int kGroupBarrier = 1;

template <int kLayout>
struct SharedMemory {
  static constexpr int kScoreBytes = kChunks * kTokenBlocks * 32 * 16;
  static constexpr int kFixedBytes = kGroups * (2 * kScoreBytes + kChunks * 8 * 16) + 512;
  static constexpr int kFitting = (kSharedBytes - kFixedBytes) / Records<kLayout>::kTileBytes / kGroups * kGroups;
  // A tile of the ring always belongs to the same group, so that no group can take another's phase for its own.
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;

  alignas(128) uint8_t tiles[kStages][Records<kLayout>::kTileBytes];
  alignas(128) float4 scores[kGroups][2][kChunks][kTokenBlocks][32];  // two exchanges a group, in turns
  alignas(16) float query_peaks[kGroups][2][8][kChunks];
  float2 group_state[kGroups][kChunks][8];
  uint8_t valid[kStages][kProducerWarps];  // a bit for each token of a tile
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t handed;

  // What a group hands to the other, over scores that are no longer needed.
  TSM_DEVICE float4* handed_over(int group) {
    static_assert(sizeof(scores[0]) >= 8 * kGroupThreads * sizeof(float4));
    return &scores[group][0][0][0][0];
  }
};

// ---- producer

template <int kLayout>
TSM_DEVICE void produce(const AttendParams& p, const Part<kTileTokens>& part, SharedMemory<kLayout>& shared) {
  using R = Records<kLayout>;
  constexpr int kStages = SharedMemory<kLayout>::kStages;
  const int warp = (threadIdx.x - kConsumerThreads) / 32, lane = threadIdx.x % 32;
  const int token = warp * kTokensPerProducer + lane % kTokensPerProducer;
  const int32_t* indices = p.indices + part.row * p.indices_row_stride;
  const int tiles = part.tiles();
  const auto slot_of = [&](int tile) -> uint32_t {
    const int column = part.begin + tile * kTileTokens + token;
    return column < part.end ? static_cast<uint32_t>(__ldg(indices + column)) : ~0u;
  };

  uint32_t next = slot_of(0);
  int stage = 0;
  uint32_t parity = 1;
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t slot = next;
    next = slot_of(tile + 1);
    const bool present = slot < p.num_slots;
    const uint32_t valid = __ballot_sync(~0u, present) & ((1u << kTokensPerProducer) - 1);
    uint8_t* records = shared.tiles[stage] + warp * kTokensPerProducer * R::kStride;
    const uint32_t full = shared_address(&shared.full[stage]);
    if (tile >= kStages) {
      barrier_wait(shared_address(&shared.empty[stage]), parity);
    } else if (valid != (1u << kTokensPerProducer) - 1) {
      // Absent tokens weigh zero, and zero times what an earlier kernel left here could be NaN. In later rounds the
      // place holds a record of this row.
      for (int i = 0; i < kTokensPerProducer; ++i) {
        if (valid >> i & 1) continue;
        for (int at = 16 * lane; at < R::kBytes; at += 16 * 32) {
          *reinterpret_cast<uint4*>(records + i * R::kStride + at) = make_uint4(0, 0, 0, 0);
        }
      }
      fence_async_proxy();
      __syncwarp();
    }
    // Every lane arrives, here and where a tile is given back: racecheck does not follow one that arrives for its warp.
    if (lane == 0) {
      shared.valid[stage][warp] = static_cast<uint8_t>(valid);
      barrier_arrive_expecting(full, __popc(valid) * R::kBytes);
    } else {
      barrier_arrive(full);
    }
    __syncwarp();
    if (lane < kTokensPerProducer && present) {
      copy_to_shared(shared_address(records + lane * R::kStride), record_of(p, slot, R::kBytes), R::kBytes, full);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// ---- consumer

template <int kLayout, class QueryT>
TSM_DEVICE void load_query(const AttendParams& p, const Part<kTileTokens>& part, int group, int chunk, const Lane& lane,
                           SharedMemory<kLayout>& shared, Query<kLayout, QueryT>& q) {
  typename Query<kLayout, QueryT>::Raw raw[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = part.head_tile * kTileHeads + lane.row + 8 * (half ^ group);
    const uint16_t* source = p.q + part.row * p.q_row_stride + head * Records<kLayout>::kQueryDim;
    raw[half] = q.load(source, p.q_aligned, head < p.heads, chunk, lane);
  }
  if constexpr (Query<kLayout, QueryT>::kHasUnit) {
    // One unit for a head, whichever warp has which chunk.
    float (&peaks)[2][8][kChunks] = shared.query_peaks[group];
    if (lane.quad == 0) peaks[0][lane.row][chunk] = raw[0].peak, peaks[1][lane.row][chunk] = raw[1].peak;
    named_barrier(kGroupBarrier + group, kGroupThreads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = *reinterpret_cast<const float4*>(peaks[half][lane.row]);
      raw[half].peak = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
    }
  }
  q.set(0, raw[0], raw[0].peak, p.scale_log2);
  q.set(1, raw[1], raw[1].peak, p.scale_log2);
}

using Exchange = float4[kChunks][kTokenBlocks][32];

TSM_DEVICE void publish_scores(Exchange& exchange, int chunk, const Lane& lane, const Scores& scores) {
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
    exchange[chunk][block][lane.index] =
        make_float4(scores[block][0], scores[block][1], scores[block][2], scores[block][3]);
  }
}

// Adds the other warps' partial scores to this warp's: the same bits in all four.
TSM_DEVICE void sum_over_chunks(const Exchange& exchange, int chunk, const Lane& lane, Scores& scores) {
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
    const float4 a = exchange[chunk ^ 1][block][lane.index];
    const float4 b = exchange[chunk ^ 2][block][lane.index];
    const float4 c = exchange[chunk ^ 3][block][lane.index];
    scores[block][0] = (scores[block][0] + a.x) + (b.x + c.x);
    scores[block][1] = (scores[block][1] + a.y) + (b.y + c.y);
    scores[block][2] = (scores[block][2] + a.z) + (b.z + c.z);
    scores[block][3] = (scores[block][3] + a.w) + (b.w + c.w);
  }
}

TSM_DEVICE void mask_absent(uint32_t valid, const Lane& lane, Scores& scores) {
  if (valid == ~0u) return;
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(valid >> (8 * block + 2 * lane.quad + i % 2) & 1)) scores[block][i] = -INFINITY;
    }
  }
}

// The A operand of the values' product from weights x scales.
template <int kLayout>
TSM_DEVICE void pack_weights(const Scores& scores, const Scales& scales, const float (&factor)[2],
                             const Softmax& softmax, Weights& weights, float (&total)[2]) {
  total[0] = total[1] = 0.0f;
#pragma unroll
  for (int block = 0; block < kTokenBlocks; ++block) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = weight_of(scores, factor, softmax, block, i);
      total[i / 2] += w[i];
      if constexpr (Records<kLayout>::kHasScale) w[i] *= scales[block][i % 2];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) pack_pair<kLayout>(w[2 * h], w[2 * h + 1], block / 2, block % 2 * 2 + h, weights);
  }
}

// A tile whose partial scores are known to this warp alone.
template <int kLayout>
struct ScoredTile {
  const uint8_t* records;
  int stage;
  KeyCodes keys;
  Scores scores;
  Scales scales;
};

// One warp's way through its group's tiles: the next tile's scores are begun before the last one's are put to use, so
// that the two fill each other's waits.
template <int kLayout, class QueryT>
struct Consumer {
  static constexpr int kStages = SharedMemory<kLayout>::kStages;
  static constexpr bool kHasScale = Records<kLayout>::kHasScale;

  const Query<kLayout, QueryT>& q;
  const int group, chunk;
  const Lane lane;
  SharedMemory<kLayout>& shared;
  int stage = group;
  int buffer = 0;
  uint32_t parity = 0;

  TSM_DEVICE ScoredTile<kLayout> wait_for_tile() {
    ScoredTile<kLayout> tile;
    tile.records = shared.tiles[stage];
    tile.stage = stage;
    barrier_wait(shared_address(&shared.full[stage]), parity);
    load_keys<kLayout>(tile.records, chunk, lane, tile.keys);
    stage += kGroups;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
    return tile;
  }

  TSM_DEVICE void score(ScoredTile<kLayout>& tile) {
    partial_scores<kLayout>(tile.records, tile.keys, q, chunk, lane, tile.scores, tile.scales);
  }

  TSM_DEVICE void publish(const ScoredTile<kLayout>& tile) {
    publish_scores(shared.scores[group][buffer], chunk, lane, tile.scores);
  }

  template <bool kHasNext>
  TSM_DEVICE void step(ScoredTile<kLayout>& tile, Softmax& softmax, ChunkSums& sums) {
    ScoredTile<kLayout> next;
    if constexpr (kHasNext) next = wait_for_tile();
    named_barrier(kGroupBarrier + group, kGroupThreads);
    sum_over_chunks(shared.scores[group][buffer], chunk, lane, tile.scores);
    buffer ^= 1;
    mask_absent(*reinterpret_cast<const uint32_t*>(shared.valid[tile.stage]), lane, tile.scores);
    if constexpr (kHasNext) score(next);
    const auto scale_of = [&](int block, int i) { return tile.scales[block][i]; };
    raise_maxima<kLayout>(tile.scores, scale_of, q.factor, softmax, sums);

    Weights weights;
    float total[2];
    pack_weights<kLayout>(tile.scores, tile.scales, q.factor, softmax, weights, total);
    if (kHasScale && __any_sync(~0u, outgrown(weights[0]))) {
      raise_references(tile.scores, scale_of, q.factor, softmax, sums);
      pack_weights<kLayout>(tile.scores, tile.scales, q.factor, softmax, weights, total);
    }
    softmax.sum[0] += total[0] * kSumFactor;
    softmax.sum[1] += total[1] * kSumFactor;
    if constexpr (kHasNext) publish(next);
    add_values<kLayout>(tile.records, weights, chunk, lane, sums);
    barrier_arrive(shared_address(&shared.empty[tile.stage]));
    if constexpr (kHasNext) tile = next;
  }

  TSM_DEVICE void attend(int tiles, Softmax& softmax, ChunkSums& sums) {
    if (tiles <= group) return;
    ScoredTile<kLayout> tile = wait_for_tile();
    score(tile);
    publish(tile);
    for (int i = group + kGroups; i < tiles; i += kGroups) step<true>(tile, softmax, sums);
    step<false>(tile, softmax, sums);
  }
};

// Half of a group's heads, merged over both groups and normalised.
struct Merged {
  float values[8][4];
  float lse_log2;  // -inf: nothing attended to
};

template <int kLayout>
TSM_DEVICE Merged merge_groups(int group, int chunk, const Lane& lane, const Softmax& softmax, const ChunkSums& sums,
                               SharedMemory<kLayout>& shared) {
  const float sum[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
  const int thread = threadIdx.x % kGroupThreads;
  named_barrier(kGroupBarrier + group, kGroupThreads);  // the group has read its last scores
  float4* given = shared.handed_over(group) + thread;
#pragma unroll
  for (int ch = 0; ch < 8; ++ch) {
    given[ch * kGroupThreads] = make_float4(sums[2 * ch][2], sums[2 * ch + 1][2], sums[2 * ch][3], sums[2 * ch + 1][3]);
  }
  if (lane.quad == 0) {
    shared.group_state[group][chunk][lane.row] = make_float2(softmax.reference[1], sum[1]);
  }
  // racecheck follows this one, and no named barrier of both groups.
  barrier_arrive(shared_address(&shared.handed));
  barrier_wait(shared_address(&shared.handed), 0);

  const float2 other = shared.group_state[group ^ 1][chunk][lane.row];
  const float reference = fmaxf(softmax.reference[0], other.x);
  const float own_share = exp2_fast(softmax.reference[0] - reference), other_share = exp2_fast(other.x - reference);
  const float total = own_share * sum[0] + other_share * other.y;
  // Values are 2 ** kValueExponent larger than their operands, and sums of weights kSumFactor smaller.
  constexpr float kFactor = (1 << Records<kLayout>::kValueExponent) * kSumFactor;
  const float inverse = total == 0.0f ? 0.0f : kFactor / total;
  const float own_factor = own_share * inverse, other_factor = other_share * inverse;

  Merged merged;
  const float4* received = shared.handed_over(group ^ 1) + thread;
#pragma unroll
  for (int ch = 0; ch < 8; ++ch) {
    const float4 x = received[ch * kGroupThreads];
    merged.values[ch][0] = own_factor * sums[2 * ch][0] + other_factor * x.x;
    merged.values[ch][1] = own_factor * sums[2 * ch + 1][0] + other_factor * x.y;
    merged.values[ch][2] = own_factor * sums[2 * ch][1] + other_factor * x.z;
    merged.values[ch][3] = own_factor * sums[2 * ch + 1][1] + other_factor * x.w;
  }
  merged.lse_log2 = total == 0.0f ? -INFINITY : reference + kSumExponent + __log2f(total);
  return merged;
}

// ---- results

// Writes a lane's latents times `factor` from element `at` on.
template <int kLayout>
TSM_DEVICE void store_runs(void* out, FloatType type, int64_t at, float factor, const Lane& lane,
                           const Merged& merged) {
  for_each_run<kLayout>(merged.values, lane, [&](int latent, const auto& x) {
    constexpr int kCount = sizeof(x) / sizeof(float);
    float scaled[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) scaled[i] = x[i] * factor;
    store_numbers(out, type, at + latent, scaled);
  });
}

template <int kLayout>
TSM_DEVICE void store_partial(const Partials& partials, int64_t result, bool present, int chunk, const Lane& lane,
                              const Merged& merged) {
  float peak = 0.0f;
#pragma unroll
  for (int ch = 0; ch < 8; ++ch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) peak = fmaxf(peak, fabsf(merged.values[ch][i]));
  }
  const Unit scale = unit_of(quad_max(peak));
  if (!present) return;
  if (lane.quad == 0) {
    partials.units[result * kChunks + chunk] = scale.unit;
    if (chunk == 0) partials.lse_log2[result] = merged.lse_log2;
  }
  store_runs<kLayout>(partials.latents, FloatType::kFp16, result * kLatentDim + chunk * kChunkLatents, scale.inverse,
                      lane, merged);
}

template <int kLayout>
TSM_DEVICE void store_final(const AttendParams& p, int64_t result, int head, int chunk, const Lane& lane,
                            const Merged& merged) {
  const float lse = merged.lse_log2 * kLn2;
  if (chunk == 0 && lane.quad == 0) p.lse[result] = lse;
  const float factor = merged.lse_log2 == -INFINITY ? 0.0f : sink_factor(p.sink, head, lse);
  store_runs<kLayout>(p.out, p.out_type, result * kLatentDim + chunk * kChunkLatents, factor, lane, merged);
}

template <int kLayout, class QueryT>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ AttendParams p) {
  auto& shared = *reinterpret_cast<SharedMemory<kLayout>*>(dynamic_shared_memory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < SharedMemory<kLayout>::kStages; ++i) {
      barrier_init(shared_address(&shared.full[i]), 32 * kProducerWarps);
      barrier_init(shared_address(&shared.empty[i]), kGroupThreads);
    }
    barrier_init(shared_address(&shared.handed), kConsumerThreads);
    fence_barrier_init();
  }
  launch_dependents();
  __syncthreads();
  wait_for_predecessors();

  if (threadIdx.x >= kConsumerThreads) {
    keep_registers<40>();
    produce<kLayout>(p, Part<kTileTokens>(p), shared);
  } else {
    take_registers<232>();
    const Part<kTileTokens> part(p);
    const Lane lane;
    const int group = threadIdx.x / kGroupThreads, chunk = threadIdx.x / 32 % kChunks;
    // The second group holds its two halves of the heads the other way round: each ends up with its first.
    Query<kLayout, QueryT> q;
    load_query(p, part, group, chunk, lane, shared, q);
    Softmax softmax;
    ChunkSums sums = {};
    Consumer<kLayout, QueryT>{q, group, chunk, lane, shared}.attend(part.tiles(), softmax, sums);
    const Merged merged = merge_groups<kLayout>(group, chunk, lane, softmax, sums, shared);
    const int head = part.head_tile * kTileHeads + lane.row + 8 * group;
    if (p.splits > 1) {
      const int64_t result = (part.row * p.splits + part.split) * p.heads + head;
      store_partial<kLayout>(p.partials, result, head < p.heads, chunk, lane, merged);
    } else if (head < p.heads) {
      store_final<kLayout>(p, part.row * p.heads + head, head, chunk, lane, merged);
    }
  }
}

}  // namespace torch_sparse_mla::sm90
