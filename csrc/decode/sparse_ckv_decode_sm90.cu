// Host side of the sm_90a decode kernels: which calls they take, how rows are split, how kernels are launched.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "sm90_attend.cuh"
#include "sm90_attend_wide.cuh"
#include "sm90_merge.cuh"
#include "sparse_ckv_decode_sm90.h"
#include "workspace.h"

namespace torch_sparse_mla {
namespace {

constexpr int kMaxDevices = 64;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("torch_sparse_mla::sparse_ckv_decode: ") + what + ": " +
                           cudaGetErrorString(error));
}

// Makes a device current for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Compute capability as a number such as 90. Asked of the driver once for each device.
int capability_of(int device) {
  static std::atomic<int> known[kMaxDevices];
  if (device < kMaxDevices && known[device]) return known[device];
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  if (device < kMaxDevices) known[device] = 10 * major + minor;
  return 10 * major + minor;
}

// Launches with programmatic dependent launch: the kernel's prologue overlaps the end of the kernel before it.
template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
            const Params& params) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

// The driver loads a kernel when it is first asked about, which not every driver does while a graph is being captured:
// the merge kernels that this call may not need, another may.
void load_merge_kernels() {
  cudaFuncAttributes attributes;
  for (const auto kernel : {sm90::merge_kernel<1>, sm90::merge_kernel<2>, sm90::merge_kernel<8>}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  }
}

struct AttendKernel {
  void (*kernel)(sm90::AttendParams);
  int threads;
  int shared_bytes;
};

template <int kLayout, class QueryT, bool kWide>
AttendKernel attend_kernel() {
  if constexpr (kWide) {
    constexpr int kBytes = sizeof(sm90::WideSharedMemory<kLayout, QueryT>);
    static_assert(kBytes <= sm90::kSharedBytes);
    return {sm90::attend_wide_kernel<kLayout, QueryT>, sm90::kWideThreads, kBytes};
  } else {
    constexpr int kBytes = sizeof(sm90::SharedMemory<kLayout>);
    static_assert(kBytes <= sm90::kSharedBytes);
    return {sm90::attend_kernel<kLayout, QueryT>, sm90::kThreads, kBytes};
  }
}

// Once for each device: the opt-in to more shared memory belongs to its context, as loaded kernels do. Both forms: the
// one that this call does not run, another may, in a graph that is being captured.
template <int kLayout, class QueryT>
void load_kernels(int device) {
  static std::atomic<bool> ready[kMaxDevices];
  if (device < kMaxDevices && ready[device]) return;
  for (const AttendKernel& attend : {attend_kernel<kLayout, QueryT, false>(), attend_kernel<kLayout, QueryT, true>()}) {
    check_cuda(cudaFuncSetAttribute(attend.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, attend.shared_bytes),
               "cudaFuncSetAttribute");
  }
  load_merge_kernels();
  if (device < kMaxDevices) ready[device] = true;
}

template <int kLayout, class QueryT>
void launch_form(const sm90::AttendParams& params, int64_t rows, bool wide, int device, cudaStream_t stream) {
  load_kernels<kLayout, QueryT>(device);
  const AttendKernel attend = wide ? attend_kernel<kLayout, QueryT, true>() : attend_kernel<kLayout, QueryT, false>();
  const int64_t blocks = rows * params.head_tiles * params.splits;
  launch(attend.kernel, blocks, attend.threads, attend.shared_bytes, stream, params);
}

template <int kLayout>
bool launch_layout(const sm90::AttendParams& params, FloatType q_type, int64_t rows, bool wide, int device,
                   cudaStream_t stream) {
  if (q_type == FloatType::kBf16) {
    launch_form<kLayout, __nv_bfloat16>(params, rows, wide, device, stream);
    return true;
  }
  if constexpr (kRecordLayouts[kLayout].latent != Storage::kBf16) {
    launch_form<kLayout, __half>(params, rows, wide, device, stream);
    return true;
  }
  return false;
}

template <int kLayout = 0>
void launch_named(const RecordLayout& layout, const sm90::AttendParams& params, FloatType q_type, int64_t rows,
                  bool wide, int device, cudaStream_t stream) {
  if constexpr (kLayout < kNumRecordLayouts) {
    if (layout.record_bytes != kRecordLayouts[kLayout].record_bytes) {
      return launch_named<kLayout + 1>(layout, params, q_type, rows, wide, device, stream);
    }
    if (launch_layout<kLayout>(params, q_type, rows, wide, device, stream)) return;
  }
  throw std::runtime_error(std::string("torch_sparse_mla::sparse_ckv_decode: no sm_90 kernel for ") + layout.name);
}

// Division of slots, which are below 2 ** 31, by the page size as a multiplication and a shift.
void set_page_size(sm90::AttendParams& params, int64_t page_size) {
  const uint64_t size = std::min<uint64_t>(page_size, uint64_t{1} << 31);
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < size) ++shift;
  params.page_size = static_cast<uint32_t>(size);
  params.page_shift = shift;
  params.page_multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - size)) / size + 1);
}

sm90::AttendParams attend_params(const SparseCkvDecode& call, const Sm90Plan& plan, bool batch_invariant) {
  sm90::AttendParams params = {};
  params.q = static_cast<const uint16_t*>(call.q);
  params.q_row_stride = call.q_row_stride;
  params.q_aligned = reinterpret_cast<uintptr_t>(call.q) % 16 == 0 && call.q_row_stride % 8 == 0;
  params.cache = call.cache;
  params.page_stride = call.page_stride;
  set_page_size(params, call.page_size);
  params.num_slots = static_cast<uint32_t>(std::min<int64_t>(call.num_slots, int64_t{1} << 31));
  params.indices = call.indices;
  params.indices_row_stride = call.indices_row_stride;
  params.lengths = call.lengths;
  params.sink = call.sink;
  params.out = call.out;
  params.out_type = call.out_type;
  params.lse = static_cast<float*>(call.lse);
  params.scale_log2 = static_cast<float>(call.softmax_scale * 1.4426950408889634);
  params.heads = call.heads;
  params.topk = call.topk;
  params.splits = static_cast<int>(plan.splits);
  params.head_tiles = static_cast<int>(ceil_div(call.heads, (plan.wide ? kSm90Wide : kSm90Narrow).heads));
  params.tokens_per_split = batch_invariant ? static_cast<int>(kInvariantTokensPerSplit) : 0;
  return params;
}

template <int kSplitLanes>
void launch_merge(const sm90::MergeParams& merge, cudaStream_t stream) {
  const int64_t threads = int64_t{merge.results} * (kLatentDim / sm90::kMergeLatents) * kSplitLanes;
  launch(sm90::merge_kernel<kSplitLanes>, ceil_div(threads, sm90::kMergeThreads), sm90::kMergeThreads, 0, stream,
         merge);
}

// As many threads share the parts of a latent as keep each to a few loads.
void launch_merge(const sm90::AttendParams& attend, int64_t rows, cudaStream_t stream) {
  sm90::MergeParams merge = {};
  merge.partials = attend.partials;
  merge.sink = attend.sink;
  merge.out = attend.out;
  merge.out_type = attend.out_type;
  merge.lse = attend.lse;
  merge.results = static_cast<uint32_t>(rows * attend.heads);
  merge.heads = attend.heads;
  merge.splits = attend.splits;
  if (attend.splits <= sm90::kMergeLoads) {
    launch_merge<1>(merge, stream);
  } else if (attend.splits <= 2 * sm90::kMergeLoads) {
    launch_merge<2>(merge, stream);
  } else {
    launch_merge<8>(merge, stream);
  }
}

// Cuts the workspace up. It has room for fp32 latents, which the portable kernels put there.
sm90::Partials partials_in(void* workspace, int64_t results) {
  sm90::Partials partials = {};
  partials.latents = static_cast<uint16_t*>(workspace);
  partials.units = reinterpret_cast<float*>(partials.latents + results * kLatentDim);
  partials.lse_log2 = partials.units + results * sm90::kChunks;
  return partials;
}

int64_t element_bytes(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

}  // namespace

const char* sm90_unsupported(const SparseCkvDecode& call, int device) {
  if (capability_of(device) != 90) return "the GPU is not sm_90";
  if (call.q_type == FloatType::kFp32) return "float32 queries";
  if (call.q_type == FloatType::kFp16 && call.layout.latent == Storage::kBf16) return "float16 queries, bf16 records";
  if (reinterpret_cast<uintptr_t>(call.out) % 16 != 0) return "an output that is not aligned to 16 bytes";
  const float scale = static_cast<float>(call.softmax_scale * 1.4426950408889634);
  if (!(scale >= FLT_MIN && scale <= FLT_MAX)) return "a softmax scale that is not a positive normal number";
  return nullptr;
}

void sparse_ckv_decode_sm90(const SparseCkvDecode& call, void* workspace, bool batch_invariant, Sm90Form form,
                            int device, void* stream) {
  static_assert(kSm90Narrow.heads == sm90::kTileHeads && kSm90Narrow.tile_tokens == sm90::kTileTokens);
  static_assert(kSm90Wide.heads == sm90::kWideHeads && kSm90Wide.tile_tokens == sm90::kWideTokens);
  const CurrentDevice current(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const Sm90Plan plan = sm90_plan(call.rows, call.heads, call.topk, call.layout.latent, batch_invariant, form);
  const int64_t step = rows_per_launch(call.rows, call.heads, call.topk, batch_invariant);
  sm90::AttendParams params = attend_params(call, plan, batch_invariant);
  for (int64_t first = 0; first < call.rows; first += step) {
    const int64_t rows = std::min(step, call.rows - first);
    const int64_t results = first * call.heads;
    params.q = static_cast<const uint16_t*>(call.q) + first * call.q_row_stride;
    params.indices = call.indices + first * call.indices_row_stride;
    params.lengths = call.lengths ? call.lengths + first : nullptr;
    params.out = static_cast<char*>(call.out) + results * kLatentDim * element_bytes(call.out_type);
    params.lse = static_cast<float*>(call.lse) + results;
    if (plan.splits > 1) params.partials = partials_in(workspace, rows * plan.splits * call.heads);
    launch_named(call.layout, params, call.q_type, rows, plan.wide, device, cuda_stream);
    if (plan.splits > 1) launch_merge(params, rows, cuda_stream);
  }
}

void sm90_copy_lists(const SparseCkvDecode& call, int32_t* indices, int32_t* lengths, int device, void* stream) {
  const CurrentDevice current(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(cuda_stream, &status), "cudaStreamIsCapturing");
  if (status != cudaStreamCaptureStatusNone) {
    throw std::runtime_error(
        "torch_sparse_mla::sparse_ckv_decode: TORCH_SPARSE_MLA_CHECK=1 synchronises and cannot run while a CUDA graph "
        "is "
        "being captured; check in eager mode first, then capture with TORCH_SPARSE_MLA_CHECK=0");
  }
  // Row by row: a row stride may be 0, which a two-dimensional copy refuses.
  for (int64_t row = 0; row < call.rows; ++row) {
    check_cuda(cudaMemcpyAsync(indices + row * call.topk, call.indices + row * call.indices_row_stride,
                               sizeof(int32_t) * call.topk, cudaMemcpyDeviceToHost, cuda_stream),
               "cudaMemcpyAsync");
  }
  if (call.lengths) {
    check_cuda(cudaMemcpyAsync(lengths, call.lengths, sizeof(int32_t) * call.rows, cudaMemcpyDeviceToHost, cuda_stream),
               "cudaMemcpyAsync");
  }
  check_cuda(cudaStreamSynchronize(cuda_stream), "cudaStreamSynchronize");
}

}  // namespace torch_sparse_mla
