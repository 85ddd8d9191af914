// Asynchronous products of warpgroups. Operands in shared memory are read through their descriptors, at some time
// between the product and the wait for it, and only then do the sums get their values: until then they hold a mark.
//
// Found and reported: descriptors that the instruction would not take as meant, threads that disagree, sums touched
// while a product is under way, a missing fence, commit or wait, operands whose writer has not fenced them, and stores
// to operands of a product under way.
#include <array>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sm90_wgmma.cuh"
#include "threads.h"

using torch_sparse_mla::sm90::shared_bytes;

namespace {

constexpr int kWarpgroup = 128, kRows = 64, kDepth = 16, kUnitBytes = 16;
constexpr size_t kUnits = 232448 / kUnitBytes;
constexpr uint32_t kMark = 0x7FDEADBE;  // a NaN

void require(bool rule, const char* otherwise) {
  if (!rule) throw std::logic_error(otherwise);
}

// An operand with the 128-byte swizzle.
struct Operand {
  uint32_t start, column_bytes, group_bytes;

  // `across`: its summed dimension runs across rows of memory.
  Operand(uint64_t descriptor, bool across) {
    constexpr uint64_t kFields = 0xC000'3FFF'3FFF'3FFF;
    require((descriptor & ~kFields) == 0, "a descriptor has bits outside of its fields, or a base offset");
    require(descriptor >> 62 == 1, "a descriptor without the 128-byte swizzle");
    start = (descriptor & 0x3FFF) << 4;
    column_bytes = (descriptor >> 16 & 0x3FFF) << 4;
    group_bytes = (descriptor >> 32 & 0x3FFF) << 4;
    require(group_bytes % 1024 == 0 && group_bytes > 0, "groups of rows that are no multiple of 1,024 bytes apart");
    if (across) {
      require(start % 1024 == 0, "an operand across rows that begins off a multiple of 1,024 bytes");
      require(column_bytes % 1024 == 0 && column_bytes > 0, "columns that are no multiple of 1,024 bytes apart");
    } else {
      require(start % 1024 <= 128 - 2 * kDepth && start % 32 == 0, "an operand that begins off its first row");
    }
  }

  // Where the 16-byte unit is that begins at number `number` of row `row`.
  uint32_t unit(int row, int number, int column) const {
    const uint32_t at = start + column * column_bytes + row / 8 * group_bytes + row % 8 * 128 + 2 * number;
    const uint32_t swizzled = at ^ (at >> 7 & 7) << 4;
    require(swizzled + kUnitBytes <= shared_size(), "an operand beyond the shared memory of the launch");
    return swizzled / kUnitBytes;
  }
};

struct Sums {
  std::vector<float> values;
  size_t last;  // the product that they wait for
};

struct Product {
  int blocks;
  bool registers, accumulate;
  uint64_t first, second;
  float (*value)(uint16_t);
  int arrived = 0, waited = 0;
  bool executed = false;
  std::array<Sums*, kWarpgroup> sums = {};
  std::array<std::array<uint32_t, 4>, kWarpgroup> weights = {};
  std::vector<uint32_t> units;
};

struct Thread {
  size_t issued = 0, waited = 0;
  std::vector<size_t> groups;  // products issued when each was closed
  bool fenced = false;
  std::map<float (*)[4], std::unique_ptr<Sums>> sums;
  std::vector<uint32_t> stores;  // units written and not fenced
};

std::vector<Thread> threads;
std::vector<std::vector<std::unique_ptr<Product>>> warpgroups;
std::array<int, kUnits> unfenced, reading;

Thread& self() { return threads[threadIdx.x]; }

void read_unit(const Product& product, uint32_t unit, float (&numbers)[8]) {
  require(unfenced[unit] == 0, "a product reads what its writer has not fenced");
  uint16_t bits[8];
  std::memcpy(bits, shared_bytes + unit * kUnitBytes, sizeof(bits));
  for (int i = 0; i < 8; ++i) numbers[i] = product.value(bits[i]);
}

void list_units(Product& product) {
  const Operand second(product.second, product.registers);
  if (product.registers) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < 8 * product.blocks; n += 8) product.units.push_back(second.unit(k, n % 64, n / 64));
    }
    return;
  }
  for (int n = 0; n < 8 * product.blocks; ++n) {
    for (int k = 0; k < kDepth; k += 8) product.units.push_back(second.unit(n, k, 0));
  }
  const Operand first(product.first, false);
  for (int m = 0; m < kRows; ++m) {
    for (int k = 0; k < kDepth; k += 8) product.units.push_back(first.unit(m, k, 0));
  }
}

void read_operands(const Product& product, float (&a)[kRows][kDepth], float (&b)[kDepth][128]) {
  size_t next = 0;
  float numbers[8];
  if (product.registers) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < 8 * product.blocks; n += 8) {
        read_unit(product, product.units[next++], numbers);
        std::copy_n(numbers, 8, &b[k][n]);
      }
    }
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          const auto bits = static_cast<uint16_t>(product.weights[thread][i] >> 16 * half);
          a[row + 8 * (i % 2)][column + 8 * (i / 2) + half] = product.value(bits);
        }
      }
    }
    return;
  }
  for (int n = 0; n < 8 * product.blocks; ++n) {
    for (int k = 0; k < kDepth; k += 8) {
      read_unit(product, product.units[next++], numbers);
      for (int i = 0; i < 8; ++i) b[k + i][n] = numbers[i];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int k = 0; k < kDepth; k += 8) {
      read_unit(product, product.units[next++], numbers);
      std::copy_n(numbers, 8, &a[m][k]);
    }
  }
}

void execute(Product& product) {
  static float a[kRows][kDepth], b[kDepth][128];
  read_operands(product, a, b);
  const int columns = 8 * product.blocks;
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    float* const sums = product.sums[thread]->values.data();
    for (int i = 0; i < columns / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double total = product.accumulate ? sums[i] : 0.0;
      for (int k = 0; k < kDepth; ++k) total += static_cast<double>(a[row][k]) * b[k][column];
      sums[i] = static_cast<float>(total);
    }
  }
  product.executed = true;
}

// Executes what all threads have issued, in order, up to `end`.
void execute_until(int warpgroup, size_t end) {
  auto& products = warpgroups[warpgroup];
  for (size_t i = 0; i < end; ++i) {
    if (!products[i]->executed) execute(*products[i]);
  }
}

// Takes over the values of sums that no product of this thread is under way for.
Sums& take_sums(Thread& thread, float (*sums)[4], int blocks) {
  auto& taken = thread.sums[sums];
  if (!taken) {
    taken = std::make_unique<Sums>();
    taken->values.assign(&sums[0][0], &sums[0][0] + 4 * blocks);
    std::fill_n(&sums[0][0], 4 * blocks, __uint_as_float(kMark));
  }
  require(taken->values.size() == static_cast<size_t>(4 * blocks), "sums of two shapes in one place");
  return *taken;
}

void give_sums(Thread& thread) {
  for (auto entry = thread.sums.begin(); entry != thread.sums.end();) {
    const auto& [sums, taken] = *entry;
    if (taken->last >= thread.waited) {
      ++entry;
      continue;
    }
    for (size_t i = 0; i < taken->values.size(); ++i) {
      require(__float_as_uint(sums[i / 4][i % 4]) == kMark, "sums were touched while a product was under way");
      sums[i / 4][i % 4] = taken->values[i];
    }
    entry = thread.sums.erase(entry);
  }
}

}  // namespace

void begin_products(int count) {
  threads = std::vector<Thread>(count);
  warpgroups.clear();
  warpgroups.resize((count + kWarpgroup - 1) / kWarpgroup);
  unfenced.fill(0);
  reading.fill(0);
}

void end_products() {
  for (const Thread& thread : threads) {
    require(thread.waited == thread.issued, "a thread ended before its products");
  }
}

namespace torch_sparse_mla::sm90 {

void store_shared(uint32_t at, const void* source, uint32_t bytes) {
  require(at % bytes == 0, "a misaligned store");
  require(at + bytes <= shared_size(), "a store beyond the shared memory of the launch");
  const uint32_t unit = at / kUnitBytes;
  require(reading[unit] == 0, "a store to an operand of a product under way");
  std::memcpy(shared_bytes + at, source, bytes);
  ++unfenced[unit];
  self().stores.push_back(unit);
}

void fence_async_proxy() {
  for (const uint32_t unit : self().stores) --unfenced[unit];
  self().stores.clear();
}

void products_fence() { self().fenced = true; }

void products_commit() { self().groups.push_back(self().issued); }

void wait_for_products(int pending) {
  Thread& thread = self();
  const int warpgroup = threadIdx.x / kWarpgroup;
  auto& products = warpgroups[warpgroup];
  const size_t closed = thread.groups.empty() ? 0 : thread.groups.back();
  require(thread.issued == closed, "a wait while products belong to no group");
  const size_t groups = thread.groups.size();
  const size_t end = groups > static_cast<size_t>(pending) ? thread.groups[groups - 1 - pending] : 0;
  if (end > 0) wait_for([&] { return products[end - 1]->arrived == kWarpgroup; });
  execute_until(warpgroup, end);
  for (; thread.waited < end; ++thread.waited) {
    Product& product = *products[thread.waited];
    if (++product.waited < kWarpgroup) continue;
    for (const uint32_t unit : product.units) --reading[unit];
  }
  give_sums(thread);
  thread.fenced = false;
}

void multiply(float (*sums)[4], int blocks, const uint32_t* weights, uint64_t first, uint64_t second, bool accumulate,
              float (*value)(uint16_t)) {
  Thread& thread = self();
  require(thread.fenced, "a product without a fence since the last wait");
  const int warpgroup = threadIdx.x / kWarpgroup;
  auto& products = warpgroups[warpgroup];
  if (thread.issued == products.size()) {
    auto product = std::make_unique<Product>();
    product->blocks = blocks, product->registers = weights, product->accumulate = accumulate;
    product->first = first, product->second = second, product->value = value;
    list_units(*product);
    for (const uint32_t unit : product->units) ++reading[unit];
    products.push_back(std::move(product));
  }
  Product& product = *products[thread.issued];
  require(product.blocks == blocks && product.registers == (weights != nullptr) && product.accumulate == accumulate &&
              product.first == first && product.second == second && product.value == value,
          "the threads of a warpgroup disagree about a product");
  Sums& taken = take_sums(thread, sums, blocks);
  taken.last = thread.issued;
  product.sums[threadIdx.x % kWarpgroup] = &taken;
  if (weights) std::copy_n(weights, 4, product.weights[threadIdx.x % kWarpgroup].begin());
  ++thread.issued;
  if (++product.arrived == kWarpgroup && toss()) execute_until(warpgroup, thread.issued);
}

}  // namespace torch_sparse_mla::sm90
