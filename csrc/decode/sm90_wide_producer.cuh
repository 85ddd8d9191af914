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
//
// Records come to L2 a tile ahead. bf16 numbers are copied as they are. Codes come to registers, those of a tile's
// first pairs while its stage is waited for.
template <int kLayout, class Shared>
struct Unpacker {
  using R = Records<kLayout>;
  using Tile = WideTile<kLayout>;
  static constexpr int kPairs = kTokensPerUnpacker / 2;
  static constexpr bool kCopiesLatents = R::kLatent == Storage::kBf16;
  static constexpr bool kCopiesRope = R::kRope == Storage::kBf16;
  static constexpr bool kUnpacksRope = R::kRope == Storage::kE4m3;
  // Pairs whose latents are on their way at a time: as many as registers hold.
  static constexpr int kAhead = kPairs / 2;
  static_assert(kPairs == 2 * kAhead);
  static constexpr int kUnitsOfLatents = kLatentDim / 8;
  // Lanes that share a token's RoPE part, and loads of it for all pairs.
  static constexpr int kRopeLanes = kRopeDim / 8;
  static constexpr int kRopeLoads = kPairs * 2 * kRopeLanes / 32;
  static_assert(kTokensPerUnpacker * kRopeLanes % 32 == 0);
  // Latents that are copied have no codes: of any type, and unused.
  using Latents = PackedLatents<kCopiesLatents ? Storage::kE4m3 : R::kLatent>[2];
  struct Codes {
    Latents latents[kAhead];
    PackedRope rope[kRopeLoads];
  };

  const AttendParams& p;
  Shared& shared;
  const int tiles, warp, lane;
  // Of this lane's token in the tile whose slots are taken next: its entry of the list, and how many tokens are left
  // from it on.
  const int32_t* list;
  int left;

  TSM_DEVICE Unpacker(const AttendParams& p, const WidePart& part, Shared& shared)
      : p(p), shared(shared), tiles(part.tiles()), warp(threadIdx.x / 32 % kWarpgroupWarps), lane(threadIdx.x % 32) {
    const int column = part.begin + token_of(lane);
    list = p.indices + part.row * p.indices_row_stride + column;
    left = lane < kTokensPerUnpacker ? part.end - column : 0;
  }

  // A lane's token of this warp, as it lies in the tile.
  TSM_DEVICE int token_of(int i) const { return i / 2 * 8 + 2 * warp + i % 2; }

  // This lane's slot of the tile that `list` stands at; none behind the last.
  TSM_DEVICE uint32_t take_slot() {
    const uint32_t slot = left > 0 ? static_cast<uint32_t>(__ldg(list)) : ~0u;
    list += kWideTokens, left -= kWideTokens;
    return slot;
  }

  // Null for a slot that is none.
  TSM_DEVICE const uint8_t* find(uint32_t slot) const {
    return slot < p.num_slots ? record_of(p, slot, R::kBytes) : nullptr;
  }

  TSM_DEVICE static const uint8_t* of_lane(const uint8_t* record, int lane) {
    return reinterpret_cast<const uint8_t*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(record), lane));
  }

  // ---- what is copied

  template <int kBytes>
  TSM_DEVICE void copy(uint32_t target, const uint8_t* record, int offset) const {
    copy_word<kBytes>(target, record == nullptr ? p.cache : record + offset, record != nullptr);
  }

  // To L2, with the line that the last byte lies in.
  TSM_DEVICE static void prefetch(const uint8_t* record) {
    if (record == nullptr) return;
#pragma unroll
    for (int at = 0; at < R::kBytes; at += 128) prefetch_to_l2(record + at);
    prefetch_to_l2(record + R::kBytes - 1);
  }

  TSM_DEVICE void copy_latents(uint32_t tile, const uint8_t* record) const {
    const uint32_t at = tile + lane / 8 * kTileColumnBytes;
#pragma unroll 4
    for (int i = 0; i < kTokensPerUnpacker; ++i) {
      const uint8_t* source = of_lane(record, i);
      const uint32_t target = at + i / 2 * kSwizzleBytes + swizzled_offset(2 * warp + i % 2, lane % 8);
#pragma unroll
      for (int unit = 0; unit < kUnitsOfLatents; unit += 32) {
        copy<16>(target + unit / 8 * kTileColumnBytes, source, 16 * (unit + lane));
      }
    }
  }

  // Where this lane's eight numbers of the RoPE parts of tokens 32 / kRopeLanes * i on lie.
  TSM_DEVICE uint32_t rope_target(uint32_t tile, int i) const {
    return tile + kRopeColumn * kTileColumnBytes + (lane / (2 * kRopeLanes) + i * 16 / kRopeLanes) * kSwizzleBytes +
           swizzled_offset(2 * warp + lane / kRopeLanes % 2, lane % kRopeLanes);
  }

  TSM_DEVICE void copy_rope(uint32_t tile, const uint8_t* record) const {
#pragma unroll
    for (int i = 0; i < kRopeLoads; ++i) {
      const uint8_t* source = of_lane(record, (32 * i + lane) / kRopeLanes);
      copy<16>(rope_target(tile, i), source, R::kRopeOffset + 16 * (lane % kRopeLanes));
    }
  }

  // ---- codes

  // A lane takes sixteen latents of one token of a pair, and half of the latents further sixteen more: eight lanes that
  // write together write to all banks.
  TSM_DEVICE void load_pair(const uint8_t* record, int pair, Latents& latents) const {
    const int token = lane / 4 % 2, sixteen = lane / 8 * 4 + lane % 4;
    latents[0] = latents[1] = {};
    const uint8_t* source = of_lane(record, 2 * pair + token);
    if (source == nullptr) return;
    latents[0].template load<kLayout>(source, sixteen);
    latents[1].template load<kLayout>(source, sixteen + 16);
  }

  TSM_DEVICE void store_pair(uint32_t tile, int pair, const Latents& latents) const {
    const uint32_t at = tile + lane / 8 * kTileColumnBytes + pair * kSwizzleBytes +
                        swizzled_offset(2 * warp + lane / 4 % 2, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Unit16 units[2];
      latents[i].unpack(units);
      const uint32_t offset = i * (kLatentColumns / 2) * kTileColumnBytes;
      store_shared(at + offset, units[0].words);
      store_shared((at ^ 16) + offset, units[1].words);
    }
  }

  TSM_DEVICE void load_rope(const uint8_t* record, int i, Codes& codes) const {
    codes.rope[i] = {};
    const uint8_t* source = of_lane(record, (32 * i + lane) / kRopeLanes);
    if (source != nullptr) codes.rope[i].load(source + R::kRopeOffset, lane % kRopeLanes);
  }

  // All codes of a tile but the later pairs' latents.
  TSM_DEVICE void load_codes(const uint8_t* record, Codes& codes) const {
    if constexpr (!kCopiesLatents) {
#pragma unroll
      for (int pair = 0; pair < kAhead; ++pair) load_pair(record, pair, codes.latents[pair]);
    }
    if constexpr (kUnpacksRope) {
#pragma unroll
      for (int i = 0; i < kRopeLoads; ++i) load_rope(record, i, codes);
    }
  }

  TSM_DEVICE void store_codes(uint32_t tile, const uint8_t* record, Codes& codes) const {
    if constexpr (!kCopiesLatents) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        store_pair(tile, pair, codes.latents[pair % kAhead]);
        if (pair < kAhead) load_pair(record, pair + kAhead, codes.latents[pair]);
      }
    }
    if constexpr (kUnpacksRope) {
#pragma unroll
      for (int i = 0; i < kRopeLoads; ++i) store_shared(rope_target(tile, i), codes.rope[i].unpack().words);
    }
  }

  // ---- scales of this lane's own token

  // Zero marks a record without a token scale.
  TSM_DEVICE float token_scale(const uint8_t* record) const {
    if (record == nullptr) return 0.0f;
    const float scale = load_record<float>(record + R::kTokenScaleOffset);
    return scale != 0.0f ? scale : 1.0f;
  }

  // Copies what is copied of a tile, and writes what is known of its tokens.
  TSM_DEVICE void fill_in(int stage, const uint8_t* record, float scale) const {
    const uint32_t target = shared_address(shared.tiles[stage]);
    if constexpr (kCopiesLatents) copy_latents(target, record);
    if constexpr (kCopiesRope) copy_rope(target, record);
    const uint32_t valid = __ballot_sync(~0u, record != nullptr);
    if (lane == 0) shared.valid[stage][warp] = static_cast<uint16_t>(valid);
    if (lane >= kTokensPerUnpacker) return;
    const int token = token_of(lane);
    if constexpr (Tile::kChunkScales) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        copy<4>(shared_address(&shared.scales[stage][i][token]), record, R::kScaleOffset + 4 * i);
      }
    } else if constexpr (R::kHasScale) {
      shared.scales[stage][0][token] = scale;
    }
    if constexpr (Tile::kRopeScale) {
      copy<4>(shared_address(&shared.scales[stage][Tile::kScaleRows][token]), record, R::kRopeScaleOffset);
    }
  }

  TSM_DEVICE void run() {
    const uint8_t* record = find(take_slot());
    uint32_t next = take_slot();
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kWideStages;
      // Loads begin behind the fence of the tile before, which would wait for them.
      Codes codes;
      load_codes(record, codes);
      float scale = 0.0f;
      if constexpr (R::kHasScale && !Tile::kChunkScales) scale = token_scale(record);
      const uint8_t* next_record = find(next);
      next = take_slot();
      prefetch(next_record);
      barrier_wait(shared_address(&shared.empty[stage]), (tile / kWideStages + 1) % 2);
      fill_in(stage, record, scale);
      store_codes(shared_address(shared.tiles[stage]), record, codes);
      wait_for_words();
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.full[stage]));
      record = next_record;
    }
  }
};

}  // namespace torch_sparse_mla::sm90
