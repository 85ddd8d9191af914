// Asynchronous matrix products of a warpgroup (wgmma). A product of the second operand reads shared memory as its
// descriptor says: sm90_wide_tile.cuh.
#pragma once

#include <type_traits>

#include "sm90_primitives.cuh"

namespace torch_sparse_mla::sm90 {

// Orders this warpgroup's accesses to sums and operands in registers before later products.
TSM_DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
TSM_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the kPending latest groups are complete.
template <int kPending>
TSM_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the sums to before the wait that this follows.
template <int kBlocks>
TSM_DEVICE void pin(float (&sums)[kBlocks][4]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[block][i])::"memory");
  }
}

#define TSM_SUMS(block) "+f"(sums[block][0]), "+f"(sums[block][1]), "+f"(sums[block][2]), "+f"(sums[block][3])

// clang-format off
#define TSM_MULTIPLY_KEYS(type)                                                                                \
  asm volatile("{\n"                                                                                           \
               ".reg .pred accumulate;\n"                                                                      \
               "setp.ne.b32 accumulate, %26, 0;\n"                                                             \
               "wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type " "                                 \
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, "     \
               "%24, %25, accumulate, 1, 1, 0, 0;\n"                                                           \
               "}"                                                                                             \
               : TSM_SUMS(0), TSM_SUMS(1), TSM_SUMS(2), TSM_SUMS(3), TSM_SUMS(4), TSM_SUMS(5)                  \
               : "l"(queries), "l"(keys), "r"(static_cast<int>(accumulate))                                    \
               : "memory")

#define TSM_MULTIPLY_VALUES(type)                                                                              \
  asm volatile("{\n"                                                                                           \
               ".reg .pred accumulate;\n"                                                                      \
               "setp.ne.b32 accumulate, 1, 0;\n"                                                               \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                                \
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"   \
               "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"  \
               "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "                            \
               "{%64,%65,%66,%67}, %68, accumulate, 1, 1, 1;\n"                                                \
               "}"                                                                                             \
               : TSM_SUMS(kFirst), TSM_SUMS(kFirst + 1), TSM_SUMS(kFirst + 2), TSM_SUMS(kFirst + 3),           \
                 TSM_SUMS(kFirst + 4), TSM_SUMS(kFirst + 5), TSM_SUMS(kFirst + 6), TSM_SUMS(kFirst + 7),       \
                 TSM_SUMS(kFirst + 8), TSM_SUMS(kFirst + 9), TSM_SUMS(kFirst + 10), TSM_SUMS(kFirst + 11),     \
                 TSM_SUMS(kFirst + 12), TSM_SUMS(kFirst + 13), TSM_SUMS(kFirst + 14), TSM_SUMS(kFirst + 15)    \
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values)               \
               : "memory")
// clang-format on

// sums [64 heads x 48 tokens] (+)= queries [64 x 16] * keys [16 x 48], in which the summed dimension runs along rows of
// shared memory. Without `accumulate`, what the sums held is ignored.
template <class Number>
TSM_DEVICE void multiply_keys_64(float (&sums)[6][4], uint64_t queries, uint64_t keys, bool accumulate) {
  if constexpr (std::is_same_v<Number, __half>) {
    TSM_MULTIPLY_KEYS("f16");
  } else {
    TSM_MULTIPLY_KEYS("bf16");
  }
}

// sums [64 heads x 128 latents] += weights [64 x 16] * values [16 x 128], in which the latents run along rows of shared
// memory. The latents are the sums' blocks of eight from kFirst on.
template <class Number, int kFirst, int kBlocks>
TSM_DEVICE void multiply_values_64(float (&sums)[kBlocks][4], const uint32_t (&weights)[4], uint64_t values) {
  static_assert(kFirst + 16 <= kBlocks);
  if constexpr (std::is_same_v<Number, __half>) {
    TSM_MULTIPLY_VALUES("f16");
  } else {
    TSM_MULTIPLY_VALUES("bf16");
  }
}

#undef TSM_MULTIPLY_VALUES
#undef TSM_MULTIPLY_KEYS
#undef TSM_SUMS

}  // namespace torch_sparse_mla::sm90
