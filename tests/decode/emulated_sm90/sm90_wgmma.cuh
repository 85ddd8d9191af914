// Stands in for csrc/decode/sm90_wgmma.cuh: the same functions, as products.cpp carries them out.
#pragma once

#include "sm90_primitives.cuh"

namespace torch_sparse_mla::sm90 {

void products_fence();
void products_commit();
void wait_for_products(int pending);
template <int kPending>
void products_wait() {
  wait_for_products(kPending);
}

template <int kBlocks>
void pin(float (&)[kBlocks][4]) {}

// The sums are `blocks` of eight columns. `weights`: the first operand, where it is in registers.
void multiply(float (*sums)[4], int blocks, const uint32_t* weights, uint64_t first, uint64_t second, bool accumulate,
              float (*value)(uint16_t));

template <class Number>
void multiply_keys_64(float (&sums)[6][4], uint64_t queries, uint64_t keys, bool accumulate) {
  multiply(sums, 6, nullptr, queries, keys, accumulate, std::is_same_v<Number, __half> ? fp16_value : bf16_value);
}

template <class Number, int kFirst, int kBlocks>
void multiply_values_64(float (&sums)[kBlocks][4], const uint32_t (&weights)[4], uint64_t values) {
  static_assert(kFirst + 16 <= kBlocks);
  multiply(sums + kFirst, 16, weights, 0, values, true, std::is_same_v<Number, __half> ? fp16_value : bf16_value);
}

}  // namespace torch_sparse_mla::sm90
