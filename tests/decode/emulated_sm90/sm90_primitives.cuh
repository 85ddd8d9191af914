// Stands in for csrc/decode/sm90_primitives.cuh: the same functions, as emulator.cpp carries them out.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "cuda_runtime.h"

// One block runs at a time.
#define __shared__ static
#define TSM_DEVICE inline

namespace torch_sparse_mla::sm90 {

extern uint8_t shared_bytes[];

inline uint8_t* dynamic_shared_memory() { return shared_bytes; }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - shared_bytes);
}

void barrier_init(uint32_t barrier, int arrivals);
inline void fence_barrier_init() {}
void barrier_arrive_expecting(uint32_t barrier, int bytes);
inline void barrier_arrive(uint32_t barrier) { barrier_arrive_expecting(barrier, 0); }
void barrier_wait(uint32_t barrier, uint32_t parity);
void copy_to_shared(uint32_t target, const void* source, int bytes, uint32_t barrier);
inline void prefetch_to_l2(const void* source) {
  // Beyond what may be read, this ends the process.
  volatile char byte = *static_cast<const char*>(source);
}
void copy_word(uint32_t target, const void* source, bool present, int bytes);
template <int kBytes>
void copy_word(uint32_t target, const void* source, bool present) {
  static_assert(kBytes == 16 || kBytes == 4);
  copy_word(target, source, present, kBytes);
}
void wait_for_words();
void store_shared(uint32_t at, const void* source, uint32_t bytes);
template <class Word>
void store_shared(uint32_t at, Word x) {
  static_assert(std::is_same_v<Word, uint4> || std::is_same_v<Word, uint32_t>);
  store_shared(at, &x, sizeof(x));
}
void fence_async_proxy();
inline void named_barrier(int id, int threads) { block_barrier(id, threads); }
inline void launch_dependents() {}
inline void wait_for_predecessors() {}
void set_registers(int count);
template <int kCount>
void keep_registers() {
  set_registers(kCount);
}
template <int kCount>
void take_registers() {
  set_registers(kCount);
}

struct Matrices {
  uint32_t r[4];
};
Matrices load_matrices(uint32_t row);
Matrices load_matrices_transposed(uint32_t row);
void multiply_fp16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

inline uint32_t pack_fp16(float low, float high) {
  return fp16_bits(low) | static_cast<uint32_t>(fp16_bits(high)) << 16;
}
inline uint32_t pack_bf16(float low, float high) {
  return bf16_bits(low) | static_cast<uint32_t>(bf16_bits(high)) << 16;
}
uint32_t e4m3_pair_to_fp16(uint16_t codes);
inline void e4m3_to_fp16(uint32_t codes, uint32_t& low, uint32_t& high) {
  low = e4m3_pair_to_fp16(static_cast<uint16_t>(codes));
  high = e4m3_pair_to_fp16(static_cast<uint16_t>(codes >> 16));
}
template <int kPair>
uint32_t e2m1_to_fp16(uint32_t codes) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const uint32_t code = codes >> (16 * half + 4 * kPair) & 0xF;
    result |= ((code & 8) << 12 | (code & 7) << 9) << 16 * half;
  }
  return result;
}
inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return pack_fp16(fp16_value(a & 0xFFFF) * fp16_value(b & 0xFFFF), fp16_value(a >> 16) * fp16_value(b >> 16));
}
// Results below the normal numbers are flushed to zero.
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(~0u, x, 1));
  return std::fmax(x, __shfl_xor_sync(~0u, x, 2));
}
inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
inline float warp_max(float x) {
  for (int other = 16; other > 0; other /= 2) x = std::fmax(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

}  // namespace torch_sparse_mla::sm90
