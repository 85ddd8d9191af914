// Workspace size of sparse_ckv_decode: the C++ side of torch_sparse_mla/decode/contract.py, asserted equal in a test.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/record_layout.h"

namespace torch_sparse_mla {

inline constexpr int64_t kHeadsPerTile = 16;
inline constexpr int64_t kTokensPerWorkspaceTile = 64;
inline constexpr int64_t kInvariantTokensPerSplit = 256;
inline constexpr int64_t kMaxPrograms = 264;
inline constexpr int64_t kInvariantProgramsPerLaunch = 1024;

// The wide form of the sm_90 kernels.
inline constexpr int64_t kFewestWideHeads = 33;
inline constexpr int64_t kWideHeadsPerTile = 64;
inline constexpr int64_t kWideTokensPerTile = 48;
inline constexpr int64_t kMaxWidePrograms = 132;
inline constexpr int64_t kWidePartBytes = kLatentDim * 2 + 5 * 4;  // fp16 latents, four units, an lse

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t num_splits(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  if (batch_invariant) return ceil_div(topk, kInvariantTokensPerSplit);
  const int64_t programs = std::max<int64_t>(rows * ceil_div(heads, kHeadsPerTile), 1);
  return std::min(std::max<int64_t>(kMaxPrograms / programs, 1), ceil_div(topk, kTokensPerWorkspaceTile));
}

// Parts that the wide form makes of a row at most.
inline int64_t max_wide_splits(int64_t rows, int64_t heads, int64_t topk) {
  if (heads < kFewestWideHeads) return 1;
  const int64_t programs = std::max<int64_t>(rows * ceil_div(heads, kWideHeadsPerTile), 1);
  return std::max<int64_t>(std::min(kMaxWidePrograms / programs, ceil_div(topk, kWideTokensPerTile)), 1);
}

// How an attention kernel of sm_90 cuts its work up, and the clocks that it takes.
struct Sm90Blocks {
  int64_t heads;
  int64_t tile_tokens;
  int64_t tiles_at_once;
  int64_t tile_clocks;
  int64_t wave_clocks;  // of a block beside its tiles
  int64_t merge_part_clocks;
};
// Fitted to times measured on an H200: a test holds the choice between the forms against those that are committed.
inline constexpr Sm90Blocks kSm90Narrow = {kHeadsPerTile, 32, 2, 1350, 7000, 45};
inline constexpr Sm90Blocks kSm90Wide = {kWideHeadsPerTile, kWideTokensPerTile, 1, 4040, 18500, 60};
// What unpacking records that are not e4m3 makes of a tile in the narrow form.
inline constexpr int64_t kNarrowTileClocksOfOthers = 1950;

// The form that a call is made in: the one that a model of clocks finds faster, or the one that is asked for.
enum class Sm90Form { kByModel, kNarrow, kWide };

struct Sm90Plan {
  bool wide;
  int64_t splits;
  int64_t clocks;  // by the model; 0 where splits are given
};

// Parts of at most `limit`: the fewest clocks by a count of waves over the multiprocessors of an H200.
inline Sm90Plan fewest_clocks(bool wide, int64_t rows, int64_t heads, int64_t topk, Storage latent, int64_t limit) {
  constexpr int64_t kMultiprocessors = 132, kMergeClocks = 2600;
  const Sm90Blocks& kernel = wide ? kSm90Wide : kSm90Narrow;
  const int64_t tile_clocks = wide || latent == Storage::kE4m3 ? kernel.tile_clocks : kNarrowTileClocksOfOthers;
  const int64_t blocks = rows * ceil_div(heads, kernel.heads), tiles = ceil_div(topk, kernel.tile_tokens);
  Sm90Plan best = {wide, 1, INT64_MAX};
  // Of the counts of parts that leave as many rounds of tiles to each, the first is the best.
  for (int64_t splits = 1; splits <= limit;) {
    const int64_t parts = blocks * splits, waves = ceil_div(parts, kMultiprocessors);
    const int64_t merge = splits > 1 ? kMergeClocks + kernel.merge_part_clocks * parts : 0;
    const int64_t rounds = ceil_div(ceil_div(tiles, splits), kernel.tiles_at_once);
    const int64_t clocks = waves * (rounds * kernel.tiles_at_once * tile_clocks + kernel.wave_clocks) + merge;
    if (clocks < best.clocks) best.splits = splits, best.clocks = clocks;
    if (rounds <= 1) break;
    splits = ceil_div(tiles, (rounds - 1) * kernel.tiles_at_once);
  }
  return best;
}

// How the sm_90 kernels make a call: in as many parts as the workspace has room for at most. A batch-invariant call is
// in the form that is asked for, and else narrow, however many rows there are.
inline Sm90Plan sm90_plan(int64_t rows, int64_t heads, int64_t topk, Storage latent, bool batch_invariant,
                          Sm90Form form) {
  const int64_t splits = num_splits(rows, heads, topk, batch_invariant);
  const bool has_wide = heads >= kFewestWideHeads;
  if (batch_invariant) return {has_wide && form == Sm90Form::kWide, splits, 0};
  const Sm90Plan narrow = fewest_clocks(false, rows, heads, topk, latent, splits);
  if (!has_wide || form == Sm90Form::kNarrow) return narrow;
  const Sm90Plan wide = fewest_clocks(true, rows, heads, topk, latent, max_wide_splits(rows, heads, topk));
  return form == Sm90Form::kWide || wide.clocks < narrow.clocks ? wide : narrow;
}

inline int64_t rows_per_launch(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  if (!batch_invariant) return rows;
  const int64_t programs_per_row = num_splits(rows, heads, topk, true) * ceil_div(heads, kHeadsPerTile);
  return std::min(rows, std::max<int64_t>(kInvariantProgramsPerLaunch / std::max<int64_t>(programs_per_row, 1), 1));
}

inline int64_t sparse_ckv_decode_workspace_bytes(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  const int64_t splits = num_splits(rows, heads, topk, batch_invariant);
  const int64_t wide_splits = batch_invariant ? 1 : max_wide_splits(rows, heads, topk);
  const int64_t launched = rows_per_launch(rows, heads, topk, batch_invariant);
  const int64_t size = splits > 1 ? launched * splits * heads * (kLatentDim + 1) * 4 : 0;
  return wide_splits > 1 ? std::max(size, rows * wide_splits * heads * kWidePartBytes) : size;
}

}  // namespace torch_sparse_mla
