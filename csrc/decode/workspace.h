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

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t num_splits(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  if (batch_invariant) return ceil_div(topk, kInvariantTokensPerSplit);
  const int64_t programs = std::max<int64_t>(rows * ceil_div(heads, kHeadsPerTile), 1);
  return std::min(std::max<int64_t>(kMaxPrograms / programs, 1), ceil_div(topk, kTokensPerWorkspaceTile));
}

// Parts of the sm_90 kernels: at most num_splits, so that the workspace is large enough. The fewest clocks by a count
// of waves over the multiprocessors of an H200. The constants are fitted to times measured there at 1 to 128 rows.
inline int64_t sm90_splits(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  if (batch_invariant) return num_splits(rows, heads, topk, true);
  constexpr int64_t kMultiprocessors = 132, kTileTokens = 32;
  constexpr int64_t kTilesAtOnce = 2;  // a block's two groups
  constexpr int64_t kTileClocks = 1350, kWaveClocks = 7000, kMergeClocks = 2600, kMergePartClocks = 45;
  const int64_t blocks = rows * ceil_div(heads, kHeadsPerTile), tiles = ceil_div(topk, kTileTokens);
  int64_t best = 1, best_clocks = INT64_MAX;
  for (int64_t splits = 1; splits <= num_splits(rows, heads, topk, false); ++splits) {
    const int64_t parts = blocks * splits, waves = ceil_div(parts, kMultiprocessors);
    const int64_t merge = splits > 1 ? kMergeClocks + kMergePartClocks * parts : 0;
    const int64_t rounds = ceil_div(ceil_div(tiles, splits), kTilesAtOnce);
    const int64_t clocks = waves * (rounds * kTilesAtOnce * kTileClocks + kWaveClocks) + merge;
    if (clocks < best_clocks) best = splits, best_clocks = clocks;
  }
  return best;
}

inline int64_t rows_per_launch(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  if (!batch_invariant) return rows;
  const int64_t programs_per_row = num_splits(rows, heads, topk, true) * ceil_div(heads, kHeadsPerTile);
  return std::min(rows, std::max<int64_t>(kInvariantProgramsPerLaunch / std::max<int64_t>(programs_per_row, 1), 1));
}

inline int64_t sparse_ckv_decode_workspace_bytes(int64_t rows, int64_t heads, int64_t topk, bool batch_invariant) {
  const int64_t splits = num_splits(rows, heads, topk, batch_invariant);
  if (splits == 1) return 0;
  return rows_per_launch(rows, heads, topk, batch_invariant) * splits * heads * (kLatentDim + 1) * 4;
}

}  // namespace torch_sparse_mla
