// What the blocks of the wide attention kernel are made of, and their producers: a warpgroup that unpacks records into
// tiles.
#pragma once

#include "sm90_call.cuh"
#include "sm90_wide_tile.cuh"

namespace torch_sparse_mla::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;
inline constexpr int kWideConsumerThreads = 2 * kWarpgroupThreads;
inline constexpr int kWideThreads = kWideConsumerThreads + kWarpgroupThreads;
// Of a thread, once the warpgroups have shared out anew what the block was launched with. A warpgroup that asks for
// more than is left waits for ever.
inline constexpr int kLaunchRegisters = 65536 / kWideThreads / 8 * 8;
inline constexpr int kProducerRegisters = 72;
inline constexpr int kConsumerRegisters = 216;
static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * kLaunchRegisters);
inline constexpr int kWideStages = 2;
inline constexpr int kTokensPerUnpacker = kWideTokens / kWarpgroupWarps;

using WidePart = Part<kWideTokens>;

template <int kLayout, class QueryT>
struct WideSharedMemory {
  using Tile = WideTile<kLayout>;
  static constexpr int kScaleRows = Tile::kScaleRows + Tile::kRopeScale;

  alignas(kSwizzleBytes) uint8_t queries[WideQuery<kLayout, QueryT>::kColumns][kQueryColumnBytes];
  alignas(kSwizzleBytes) uint8_t tiles[kWideStages][Tile::kColumns][kTileColumnBytes];
  float4 scores[2][kWideBlocks][kWarpgroupThreads];
  alignas(16) float scales[kWideStages][kScaleRows > 0 ? kScaleRows : 1][kWideTokens];
  float factor[kWideHeads];
  float rope_factor[kWideHeads];
  uint64_t full[kWideStages];
  uint64_t empty[kWideStages];
  uint16_t valid[kWideStages][kWarpgroupWarps];  // a bit for each token of a producer warp
};

// ---- producer

// One warp's tokens of every tile: a pair of each eight, so that a lane's rows are all permuted alike, and the tokens
// of a lane of the scores are one warp's.
template <int kLayout, class Shared>
struct Unpacker {
  using R = Records<kLayout>;
  using Tile = WideTile<kLayout>;
  using Latents = PackedLatents<R::kLatent>;
  using Rope = PackedRope<R::kRope>;
  static constexpr int kPairs = kTokensPerUnpacker / 2;
  // As many pairs are being loaded at a time as registers hold.
  static constexpr int kBatch = R::kLatent == Storage::kBf16 ? 2 : 3;
  static constexpr bool kHasRope = R::kRope != Storage::kNone;
  // Lanes that share a token's RoPE part, and loads of it for all pairs.
  static constexpr int kRopeLanes = kRopeDim / 8;
  static constexpr int kRopeLoads = kPairs * 2 * kRopeLanes / 32;
  static_assert(kPairs % kBatch == 0 && kTokensPerUnpacker * kRopeLanes % 32 == 0);

  const AttendParams& p;
  const WidePart& part;
  Shared& shared;
  const int warp, lane;

  // A lane's token of this warp, as it lies in the tile.
  TSM_DEVICE int token_of(int i) const { return i / 2 * 8 + 2 * warp + i % 2; }

  TSM_DEVICE uint32_t slot_of(int tile) const {
    const int column = part.begin + tile * kWideTokens + token_of(lane);
    const bool counted = lane < kTokensPerUnpacker && column < part.end;
    return counted ? static_cast<uint32_t>(__ldg(p.indices + part.row * p.indices_row_stride + column)) : ~0u;
  }

  // A lane takes sixteen latents of one token of a pair, and half of the latents further sixteen more: eight lanes that
  // write together write to all banks.
  TSM_DEVICE void load(uint32_t slot, int first, Latents (&latents)[kBatch][2]) const {
    const int token = lane / 4 % 2, sixteen = lane / 8 * 4 + lane % 4;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      latents[i][0] = latents[i][1] = {};
      const uint32_t source = __shfl_sync(~0u, slot, 2 * (first + i) + token);
      if (source >= p.num_slots) continue;
      const uint8_t* record = record_of(p, source, R::kBytes);
      latents[i][0].template load<kLayout>(record, sixteen);
      latents[i][1].template load<kLayout>(record, sixteen + 16);
    }
  }

  TSM_DEVICE void store(uint32_t tile, int first, const Latents (&latents)[kBatch][2]) const {
    const uint32_t at = tile + lane / 8 * kTileColumnBytes + first * kSwizzleBytes +
                        swizzled_offset(2 * warp + lane / 4 % 2, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) {
      Unit16 units[2];
      latents[i / 2][i % 2].unpack(units);
      const uint32_t offset = i / 2 * kSwizzleBytes + i % 2 * (kLatentColumns / 2) * kTileColumnBytes;
      store_shared(at + offset, units[0].words);
      store_shared((at ^ 16) + offset, units[1].words);
    }
  }

  // What a tile has beside its latents.
  struct Rest {
    Rope rope[kHasRope ? kRopeLoads : 1];
    float scales[Shared::kScaleRows > 0 ? Shared::kScaleRows : 1];
  };

  TSM_DEVICE void load_rest(uint32_t slot, Rest& rest) const {
    if constexpr (kHasRope) {
#pragma unroll
      for (int i = 0; i < kRopeLoads; ++i) {
        rest.rope[i] = {};
        const uint32_t source = __shfl_sync(~0u, slot, (32 * i + lane) / kRopeLanes);
        if (source >= p.num_slots) continue;
        rest.rope[i].load(record_of(p, source, R::kBytes) + R::kRopeOffset, lane % kRopeLanes);
      }
    }
    // Of this lane's own token.
#pragma unroll
    for (int i = 0; i < Shared::kScaleRows; ++i) rest.scales[i] = 0.0f;
    if (slot >= p.num_slots) return;
    const uint8_t* record = record_of(p, slot, R::kBytes);
    if constexpr (Tile::kChunkScales) {
      const float4 scales = load_record<float4>(record + R::kScaleOffset);
      rest.scales[0] = scales.x, rest.scales[1] = scales.y, rest.scales[2] = scales.z, rest.scales[3] = scales.w;
    } else if constexpr (R::kHasScale) {
      const float scale = load_record<float>(record + R::kTokenScaleOffset);
      // Zero marks a record without a token scale.
      rest.scales[0] = scale != 0.0f ? scale : 1.0f;
    }
    if constexpr (Tile::kRopeScale) {
      rest.scales[Tile::kScaleRows] = load_record<float>(record + R::kRopeScaleOffset);
    }
  }

  TSM_DEVICE void store_rest(int stage, uint32_t tile, const Rest& rest) const {
    if constexpr (kHasRope) {
      const uint32_t at = tile + kRopeColumn * kTileColumnBytes + lane / (2 * kRopeLanes) * kSwizzleBytes +
                          swizzled_offset(2 * warp + lane / kRopeLanes % 2, lane % kRopeLanes);
#pragma unroll
      for (int i = 0; i < kRopeLoads; ++i) {
        store_shared(at + i * (16 / kRopeLanes) * kSwizzleBytes, rest.rope[i].unpack().words);
      }
    }
    if (lane >= kTokensPerUnpacker) return;
#pragma unroll
    for (int i = 0; i < Shared::kScaleRows; ++i) shared.scales[stage][i][token_of(lane)] = rest.scales[i];
  }

  TSM_DEVICE void run() {
    const int tiles = part.tiles();
    uint32_t slot = slot_of(0), next = slot_of(1);
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kWideStages;
      const uint32_t target = shared_address(shared.tiles[stage]);
#pragma unroll 1
      for (int first = 0; first < kPairs; first += kBatch) {
        Latents latents[kBatch][2];
        load(slot, first, latents);
        if (first == 0) {
          Rest rest;
          load_rest(slot, rest);
          if (next < p.num_slots) prefetch_to_l2(record_of(p, next, R::kBytes), R::kBytes);
          barrier_wait(shared_address(&shared.empty[stage]), (tile / kWideStages + 1) % 2);
          const uint32_t valid = __ballot_sync(~0u, slot < p.num_slots);
          if (lane == 0) shared.valid[stage][warp] = static_cast<uint16_t>(valid);
          store_rest(stage, target, rest);
        }
        store(target, first, latents);
      }
      slot = next;
      next = slot_of(tile + 2);
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.full[stage]));
    }
  }
};

}  // namespace torch_sparse_mla::sm90
