// Stands in for CUDA's headers where there is no nvcc and no GPU: enough of the language and of the runtime for the
// sm_90 decode kernels. See emulator.cpp for how threads run.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct Index {
  uint32_t x;
};
extern Index threadIdx, blockIdx;

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __expf(float x) { return std::exp(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}

// 16-bit numbers.
float fp16_value(uint16_t bits);
float bf16_value(uint16_t bits);
uint16_t fp16_bits(float x);
uint16_t bf16_bits(float x);

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline float2 __half22float2(__half2 x) { return {fp16_value(x.x.bits), fp16_value(x.y.bits)}; }
inline __half __hmax(__half a, __half b) { return {fp16_bits(std::fmax(fp16_value(a.bits), fp16_value(b.bits)))}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
  return {bf16_bits(std::fmax(bf16_value(a.bits), bf16_value(b.bits)))};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
inline bool __hble2(__half2 a, __half2 b) {
  return fp16_value(a.x.bits) <= fp16_value(b.x.bits) && fp16_value(a.y.bits) <= fp16_value(b.y.bits);
}

// Collectives of a warp, and of a block.
uint32_t warp_ballot(bool predicate);
uint32_t warp_read(uint32_t mine, int lane);
void block_barrier(int id, int threads);
int block_threads();
inline uint32_t __ballot_sync(uint32_t, bool predicate) { return warp_ballot(predicate); }
inline bool __any_sync(uint32_t, bool predicate) { return warp_ballot(predicate) != 0; }
inline void __syncwarp() { warp_ballot(true); }
inline uint32_t __shfl_sync(uint32_t, uint32_t x, int lane) { return warp_read(x, lane); }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t x, int other) { return warp_read(x, threadIdx.x % 32 ^ other); }
inline unsigned long long __shfl_sync(uint32_t, unsigned long long x, int lane) {
  const uint32_t low = warp_read(static_cast<uint32_t>(x), lane);
  return static_cast<unsigned long long>(warp_read(static_cast<uint32_t>(x >> 32), lane)) << 32 | low;
}
inline float __shfl_sync(uint32_t, float x, int lane) { return __uint_as_float(warp_read(__float_as_uint(x), lane)); }
inline float __shfl_xor_sync(uint32_t, float x, int other) {
  return __uint_as_float(warp_read(__float_as_uint(x), threadIdx.x % 32 ^ other));
}
inline void __syncthreads() { block_barrier(0, block_threads()); }

// The runtime.
using cudaStream_t = void*;
using cudaError_t = int;
struct dim3 {
  dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};
enum { cudaSuccess = 0 };
enum { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
enum { cudaMemcpyDeviceToHost };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  return *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : 0, cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, cudaStream_t) {
  return std::memcpy(target, source, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

void run_block(uint32_t block, int threads, size_t shared_bytes, void (*thread)(void*), void* argument);

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params), const Params& params) {
  struct Call {
    void (*kernel)(Params);
    const Params* params;
  } call{kernel, &params};
  const auto thread = [](void* argument) {
    const Call* call = static_cast<Call*>(argument);
    call->kernel(*call->params);
  };
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    run_block(block, static_cast<int>(config->blockDim.x), config->dynamicSmemBytes, thread, &call);
  }
  return cudaSuccess;
}
