// Runs the sm_90 decode kernels on the CPU, a block at a time and a thread at a time, exact in everything but rounding
// of sums: warps and their matrix products, shared memory full of NaN at first, barriers, and bulk copies that arrive
// late and out of order. Threads are fibers; one gives way where it would wait. A block in which all wait is reported.
#include <ucontext.h>

#include <array>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "sm90_primitives.cuh"
#include "sparse_ckv_decode_sm90.h"
#include "threads.h"

Index threadIdx, blockIdx;

namespace torch_sparse_mla::sm90 {
alignas(1024) uint8_t shared_bytes[232448];
}

using torch_sparse_mla::sm90::shared_bytes;

namespace {

constexpr size_t kStackBytes = 96 << 10;

// What 32 lanes hand to one another. Two sets in turns: a fast lane is at most one exchange ahead.
struct Warp {
  std::array<std::array<uint32_t, 32>, 2> words[6];
  int arrived = 0;
  int live = 32;
  uint64_t exchanges = 0;
};

struct Gathering {
  int arrived = 0;
  uint64_t rounds = 0;
};

struct Barrier {
  int arrivals = 0;
  int pending = 0;
  int64_t bytes = 0;
  uint64_t phases = 0;

  void settle() {
    if (pending > 0 || bytes > 0) return;
    pending = arrivals;
    ++phases;
  }
};

struct Copy {
  uint32_t target;
  const void* source;
  int bytes;
  uint32_t barrier;
};

// A word on its way to shared memory, for the thread that sent for it.
struct Word {
  uint32_t target;
  const void* source;  // null: zeros
  int bytes;
};

struct Block {
  std::vector<ucontext_t> fibers;
  std::vector<bool> done;
  std::vector<const std::function<bool()>*> waits_for;  // null: it can go on
  std::vector<Warp> warps;
  std::map<int, Gathering> gatherings;
  std::map<uint32_t, Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<std::vector<Word>> words;
  ucontext_t scheduler;
  int current = 0;
  bool progress = false;
  std::string error;
  size_t shared = 0;
  int registers = 0;  // that threads asked for in all
  void (*thread)(void*) = nullptr;
  void* argument = nullptr;
};

Block* block = nullptr;
std::mt19937 random_number(1);

void give_way() {
  const int self = block->current;
  swapcontext(&block->fibers[self], &block->scheduler);
}

void wait_until(const std::function<bool()>& done) {
  if (!done()) {
    block->waits_for[block->current] = &done;
    give_way();
    block->waits_for[block->current] = nullptr;
  }
  block->progress = true;
}

// Each lane's words, once every lane of the warp has brought its own.
template <int kWords>
std::array<std::array<uint32_t, 32>, kWords> exchange(const std::array<uint32_t, kWords>& mine) {
  Warp& warp = block->warps[threadIdx.x / 32];
  const uint64_t turn = warp.exchanges;
  for (int i = 0; i < kWords; ++i) warp.words[i][turn % 2][threadIdx.x % 32] = mine[i];
  if (++warp.arrived == warp.live) {
    warp.arrived = 0;
    ++warp.exchanges;
  }
  wait_until([&] { return warp.exchanges > turn; });
  std::array<std::array<uint32_t, 32>, kWords> all;
  for (int i = 0; i < kWords; ++i) all[i] = warp.words[i][turn % 2];
  return all;
}

void fiber_main() {
  try {
    block->thread(block->argument);
  } catch (const std::exception& error) {
    block->error = error.what();
  }
  block->done[block->current] = true;
  Warp& warp = block->warps[block->current / 32];
  if (warp.arrived > 0) block->error = "a lane ended while others of its warp wait for it";
  --warp.live;
  block->progress = true;
  give_way();
}

void deliver_some_copies() {
  while (!block->copies.empty() && random_number() % 4) {
    const size_t chosen = random_number() % block->copies.size();
    const Copy copy = block->copies[chosen];
    block->copies.erase(block->copies.begin() + chosen);
    std::memcpy(shared_bytes + copy.target, copy.source, copy.bytes);
    Barrier& barrier = block->barriers.at(copy.barrier);
    barrier.bytes -= copy.bytes;
    barrier.settle();
    block->progress = true;
  }
}

float half_of(const std::array<uint32_t, 32>& words, int lane, int half, float (*value)(uint16_t)) {
  return value(static_cast<uint16_t>(words[lane] >> 16 * half));
}

void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (*value)(uint16_t)) {
  const auto all = exchange<6>({a[0], a[1], a[2], a[3], b0, b1});
  const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    double total = sum[i];
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, half = k % 2;
      const float x = half_of(all[i / 2 + 2 * (k / 8)], 4 * row + lane, half, value);
      const float y = half_of(all[4 + k / 8], 4 * (2 * quad + i % 2) + lane, half, value);
      total += static_cast<double>(x) * y;
    }
    sum[i] = static_cast<float>(total);
  }
}

uint16_t matrix_element(const std::array<uint32_t, 32>& rows, int matrix, int row, int column) {
  uint16_t element;
  std::memcpy(&element, shared_bytes + rows[8 * matrix + row] + 2 * column, 2);
  return element;
}

}  // namespace

void wait_for(const std::function<bool()>& done) { wait_until(done); }

size_t shared_size() { return block->shared; }

bool toss() { return random_number() % 2; }

int block_threads() { return static_cast<int>(block->fibers.size()); }

uint32_t warp_ballot(bool predicate) {
  const auto all = exchange<1>({predicate});
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= (all[0][lane] & 1) << lane;
  return ballot;
}

uint32_t warp_read(uint32_t mine, int lane) { return exchange<1>({mine})[0][lane % 32]; }

void block_barrier(int id, int threads) {
  Gathering& gathering = block->gatherings[id];
  const uint64_t round = gathering.rounds;
  if (++gathering.arrived == threads) {
    gathering.arrived = 0;
    ++gathering.rounds;
  }
  wait_until([&] { return gathering.rounds > round; });
}

void run_block(uint32_t index, int threads, size_t shared, void (*thread)(void*), void* argument) {
  if (shared > sizeof(shared_bytes)) throw std::logic_error("too much shared memory");
  Block here;
  block = &here;
  std::memset(shared_bytes, 0xFF, sizeof(shared_bytes));
  here.fibers.resize(threads);
  // Kept from block to block, and never cleared: that would take longer than most blocks run.
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < static_cast<size_t>(threads)) stacks.emplace_back(new char[kStackBytes]);
  here.done.assign(threads, false);
  here.waits_for.assign(threads, nullptr);
  here.warps.resize(threads / 32);
  here.words.resize(threads);
  here.shared = shared;
  here.thread = thread;
  here.argument = argument;
  for (int i = 0; i < threads; ++i) {
    getcontext(&here.fibers[i]);
    here.fibers[i].uc_stack.ss_sp = stacks[i].get();
    here.fibers[i].uc_stack.ss_size = kStackBytes;
    makecontext(&here.fibers[i], fiber_main, 0);
  }
  begin_products(threads);
  blockIdx = {index};
  // In one block of two a warp lags behind, so that others run into what it has not read yet.
  const int slow_warp = random_number() % (2 * here.warps.size());
  // And in every block a lane, behind its own warp.
  const int slow_thread = random_number() % threads;
  for (bool all_done = false; !all_done;) {
    all_done = true;
    here.progress = false;
    const int shift = random_number() % threads;
    for (int i = 0; i < threads; ++i) {
      const int next = (i + shift) % threads;
      if (here.done[next]) continue;
      all_done = false;
      if (here.waits_for[next] && !(*here.waits_for[next])()) continue;
      if ((next / 32 == slow_warp || next == slow_thread) && random_number() % 8) {
        here.progress = true;
        continue;
      }
      here.current = next;
      threadIdx = {static_cast<uint32_t>(next)};
      swapcontext(&here.scheduler, &here.fibers[next]);
      if (!here.error.empty()) throw std::logic_error(here.error);
    }
    const bool waits_for_copies = !here.copies.empty();
    deliver_some_copies();
    if (!all_done && !here.progress && !waits_for_copies) throw std::logic_error("every thread of the block waits");
  }
  if (!here.copies.empty()) throw std::logic_error("a block ended before its copies");
  for (const auto& words : here.words) {
    if (!words.empty()) throw std::logic_error("a thread ended before its words had come");
  }
  // What a block was launched with is all that its threads can share out.
  if (here.registers > 65536 / threads / 8 * 8 * threads) throw std::logic_error("more registers than the block has");
  end_products();
}

float bf16_value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

uint16_t bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float decoded_fp16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float fp16_value(uint16_t bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) all[i] = decoded_fp16(static_cast<uint16_t>(i));
    return all;
  }();
  return values[bits];
}

uint16_t fp16_bits(float x) {
  const uint16_t sign = __float_as_uint(x) >> 16 & 0x8000;
  if (std::isnan(x)) return 0x7FFF;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return sign | 0x7C00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  const int exponent = std::ilogb(magnitude);
  // A mantissa that rounds up to 2048 carries into the exponent.
  const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + mantissa);
}

namespace torch_sparse_mla::sm90 {

void set_registers(int count) {
  if (count % 8 || count < 24 || count > 240) throw std::logic_error("no count of registers");
  block->registers += count;
}

void barrier_init(uint32_t at, int arrivals) { block->barriers[at] = {arrivals, arrivals, 0, 0}; }

void barrier_arrive_expecting(uint32_t at, int bytes) {
  Barrier& barrier = block->barriers.at(at);
  if (barrier.pending == 0) throw std::logic_error("one arrival too many");
  --barrier.pending;
  barrier.bytes += bytes;
  barrier.settle();
}

void barrier_wait(uint32_t at, uint32_t parity) {
  const Barrier& barrier = block->barriers.at(at);
  wait_until([&] { return barrier.phases % 2 != parity; });
}

void copy_to_shared(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16)
    throw std::logic_error("a misaligned copy");
  block->copies.push_back({target, source, bytes, barrier});
}

static constexpr uint8_t kZeros[16] = {};

void copy_word(uint32_t target, const void* source, bool present, int bytes) {
  if (target % bytes || reinterpret_cast<uintptr_t>(source) % bytes) throw std::logic_error("a misaligned word");
  // It comes at once, or not before it is waited for.
  if (toss()) return store_shared(target, present ? source : kZeros, bytes);
  block->words[threadIdx.x].push_back({target, present ? source : nullptr, bytes});
}

void wait_for_words() {
  auto& words = block->words[threadIdx.x];
  for (const Word& word : words) store_shared(word.target, word.source ? word.source : kZeros, word.bytes);
  words.clear();
}

Matrices load_matrices(uint32_t row) {
  const auto rows = exchange<1>({row})[0];
  const int lane = threadIdx.x % 32;
  Matrices m;
  for (int i = 0; i < 4; ++i) {
    m.r[i] = matrix_element(rows, i, lane / 4, lane % 4 * 2) |
             static_cast<uint32_t>(matrix_element(rows, i, lane / 4, lane % 4 * 2 + 1)) << 16;
  }
  return m;
}

Matrices load_matrices_transposed(uint32_t row) {
  const auto rows = exchange<1>({row})[0];
  const int lane = threadIdx.x % 32;
  Matrices m;
  for (int i = 0; i < 4; ++i) {
    m.r[i] = matrix_element(rows, i, lane % 4 * 2, lane / 4) |
             static_cast<uint32_t>(matrix_element(rows, i, lane % 4 * 2 + 1, lane / 4)) << 16;
  }
  return m;
}

void multiply_fp16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply(sum, a, b0, b1, fp16_value);
}

void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply(sum, a, b0, b1, bf16_value);
}

uint32_t e4m3_pair_to_fp16(uint16_t codes) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = codes >> 8 * i & 0xFF;
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                            : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
    if ((code & 0x7F) == 0x7F) x = NAN;
    pair |= static_cast<uint32_t>(fp16_bits(code & 0x80 ? -x : x)) << 16 * i;
  }
  return pair;
}

}  // namespace torch_sparse_mla::sm90

// Returns null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* emulate_sparse_ckv_decode(
    const torch_sparse_mla::SparseCkvDecode* call, int layout, void* workspace, bool batch_invariant, int form) {
  static std::string message;
  try {
    torch_sparse_mla::SparseCkvDecode complete = *call;
    complete.layout = torch_sparse_mla::kRecordLayouts[layout];
    if (const char* reason = torch_sparse_mla::sm90_unsupported(complete, 0)) return reason;
    torch_sparse_mla::sparse_ckv_decode_sm90(complete, workspace, batch_invariant,
                                             static_cast<torch_sparse_mla::Sm90Form>(form), 0, nullptr);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
