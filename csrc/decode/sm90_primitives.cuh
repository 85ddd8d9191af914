// The instructions of sm_90 that the decode kernels use, one function each. Shared-memory addresses are 32-bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace torch_sparse_mla::sm90 {

#define TSM_DEVICE __device__ __forceinline__

TSM_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The memory whose size is given at the launch.
TSM_DEVICE uint8_t* dynamic_shared_memory() {
  extern __shared__ __align__(1024) uint8_t bytes[];
  return bytes;
}

// ---- memory barriers in shared memory, and bulk copies that report to them

TSM_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
TSM_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

TSM_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

TSM_DEVICE void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// How long a waiting thread may sleep before it looks again of itself: it is woken when the barrier completes.
inline constexpr uint32_t kLongestSleepNs = 10'000'000;

TSM_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(kLongestSleepNs)
      : "memory");
}

TSM_DEVICE void copy_to_shared(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Fetches the line of 128 bytes that an address lies in into L2.
TSM_DEVICE void prefetch_to_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// ---- words of shared memory

// Begins to copy kBytes, to which both addresses are aligned, or to write zeros if they are not `present`. As an
// ordinary store, it needs fence_async_proxy before the copy engine or wgmma reads it. No register holds what is on its
// way.
template <int kBytes>
TSM_DEVICE void copy_word(uint32_t target, const void* source, bool present) {
  static_assert(kBytes == 16 || kBytes == 4);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(present ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(present ? 4 : 0)
                 : "memory");
  }
}

// Waits for this thread's copies of words, which then are visible to this thread.
TSM_DEVICE void wait_for_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }

TSM_DEVICE void store_shared(uint32_t at, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

TSM_DEVICE void store_shared(uint32_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of the copy engine and of wgmma.
TSM_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

TSM_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- programmatic dependent launch

// Lets the next kernel of the stream start its prologue.
TSM_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernels before this one have finished and their writes are visible.
TSM_DEVICE void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- registers

template <int kCount>
TSM_DEVICE void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
TSM_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- matrix products, and their operands from shared memory

struct Matrices {
  uint32_t r[4];
};

TSM_DEVICE Matrices load_matrices(uint32_t row) {
  Matrices m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.r[0]), "=r"(m.r[1]), "=r"(m.r[2]), "=r"(m.r[3])
               : "r"(row));
  return m;
}

TSM_DEVICE Matrices load_matrices_transposed(uint32_t row) {
  Matrices m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.r[0]), "=r"(m.r[1]), "=r"(m.r[2]), "=r"(m.r[3])
               : "r"(row));
  return m;
}

// sum += a [16 heads x 16] * b [16 x 8]
TSM_DEVICE void multiply_fp16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TSM_DEVICE void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- conversions

TSM_DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

TSM_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two e4m3 codes to fp16, exactly.
TSM_DEVICE uint32_t e4m3_pair_to_fp16(uint16_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}

// Four e4m3 codes to two fp16 pairs, exactly. One statement, in which the conversion takes either half of a register.
TSM_DEVICE void e4m3_to_fp16(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// The kPair-th nibble of each 16-bit half as e2m1, to a pair of fp16 values times 2 ** -14, exactly.
template <int kPair>
TSM_DEVICE uint32_t e2m1_to_fp16(uint32_t codes) {
  constexpr int kNibble = 4 * kPair;
  const uint32_t sign = codes << (12 - kNibble);
  const uint32_t magnitude = kNibble < 9 ? codes << ((9 - kNibble) & 31) : codes >> ((kNibble - 9) & 31);
  return (sign & 0x80008000u) | (magnitude & 0x0E000E00u);
}

TSM_DEVICE uint32_t multiply_pair(uint32_t a, uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

TSM_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- exchange of registers among the four lanes that share a row of a product

TSM_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

TSM_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

TSM_DEVICE float warp_max(float x) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  return x;
}

}  // namespace torch_sparse_mla::sm90
