// A warpgroup that multiplies once, as it should or with one mistake: does the emulator see it?
#include <stdexcept>
#include <string>

#include "sm90_wide_tile.cuh"

namespace torch_sparse_mla::sm90 {
namespace {

enum Mistake {
  kNone,
  kNoFence,
  kNoCommit,
  kNoWait,
  kOperandNotFenced,
  kOperandOverwritten,
  kSumsTouched,
  kThreadsDisagree,
  kNoSwizzle,
  kOffRow,
  kOddGroups,
  kOffColumn,
  kBeyondMemory,
  kWordNotWaited,
  kWordNotFenced,
  kWordMisaligned,
  kMistakes
};

constexpr uint32_t kQueries = 0, kKeys = kQueryColumnBytes, kBytes = kKeys + 2 * kTileColumnBytes;

// Several, since any may come at once.
void copy_words(int offset) {
  alignas(16) static const uint8_t source[32] = {};
  for (uint32_t i = 0; i < 8; ++i) copy_word<16>(kKeys + 128 * (threadIdx.x % 6 * 8 + i), source + offset, true);
}

void multiply_once(Mistake mistake) {
  for (uint32_t at = 16 * threadIdx.x; at < kBytes; at += 16 * 128) store_shared(at, make_uint4(0, 0, 0, 0));
  if (mistake != kOperandNotFenced) fence_async_proxy();
  if (mistake == kWordNotFenced || mistake == kWordMisaligned) copy_words(mistake == kWordMisaligned);
  if (mistake == kWordNotFenced) wait_for_words();
  __syncthreads();
  float sums[16][4] = {};
  uint64_t queries = AlongRows(kQueries).at(0, 1), keys = AlongRows(kKeys).at(0, 1);
  const uint64_t other_keys = AlongRows(kKeys).at(0, 2);
  if (mistake == kNoSwizzle) queries &= ~(uint64_t{3} << 62);
  if (mistake == kOffRow) queries = AlongRows(kQueries + 128).at(0, 1);
  if (mistake == kOddGroups) keys += uint64_t{1} << 32;
  if (mistake == kThreadsDisagree && threadIdx.x == 77) keys = other_keys;
  if (mistake == kBeyondMemory) keys = AlongRows(kBytes - 1024).at(0, 1);
  if (mistake != kNoFence) products_fence();
  if (mistake == kOffColumn) {
    multiply_values_64<__half, 0>(sums, {0, 0, 0, 0}, AcrossRows(kKeys + kStepBytes).at(0, 0));
  } else {
    multiply_keys_64<__half>(reinterpret_cast<float (&)[6][4]>(sums), queries, keys, false);
  }
  if (mistake == kSumsTouched) sums[0][0] = 1.0f;
  if (mistake != kNoCommit) products_commit();
  if (mistake == kOperandOverwritten) store_shared(kKeys + 1024 + 16 * threadIdx.x, make_uint4(0, 0, 0, 0));
  if (mistake == kNoWait) return;
  products_wait<0>();
  for (int block = 0; block < 6; ++block) {
    for (int i = 0; i < 4; ++i) {
      if (sums[block][i] != 0.0f) throw std::logic_error("a wrong product");
    }
  }
  __syncthreads();
  if (mistake == kWordNotWaited) copy_words(0);
}

}  // namespace
}  // namespace torch_sparse_mla::sm90

// Returns what the emulator says, or null.
extern "C" __attribute__((visibility("default"))) const char* emulate_mistake(int mistake) {
  using namespace torch_sparse_mla::sm90;
  static std::string message;
  if (mistake < 0 || mistake >= kMistakes) return "no such mistake";
  try {
    const auto thread = [](void* chosen) { multiply_once(*static_cast<Mistake*>(chosen)); };
    auto chosen = static_cast<Mistake>(mistake);
    run_block(0, 128, kBytes, thread, &chosen);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
