// The symbol exists only in libtorch_cuda. Looking it up in the copy that the process has loaded, instead of linking to
// it, lets one shared object load beside the CPU and the CUDA builds of PyTorch.
#include "cuda_stream.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace torch_sparse_mla {
namespace {

constexpr const char* kLibrary = "libtorch_cuda.so";
constexpr const char* kSymbol = "aoti_torch_get_current_cuda_stream";
using GetCurrentStream = int32_t (*)(int32_t device_index, void** stream);

GetCurrentStream find_symbol() {
  void* library = dlopen(kLibrary, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) {
    throw std::runtime_error(std::string("torch_sparse_mla: no current CUDA stream: ") + kLibrary +
                             " is not loaded in this process; install a CUDA build of PyTorch");
  }
  void* symbol = dlsym(library, kSymbol);
  if (!symbol) {
    throw std::runtime_error(std::string("torch_sparse_mla: no current CUDA stream: ") + kLibrary + " has no symbol " +
                             kSymbol + "; PyTorch 2.11 or newer is needed");
  }
  return reinterpret_cast<GetCurrentStream>(symbol);
}

}  // namespace

void* current_cuda_stream(int32_t device_index) {
  // A look-up that throws is tried again at the next call.
  static const GetCurrentStream get_current_stream = find_symbol();
  void* stream = nullptr;
  if (get_current_stream(device_index, &stream) != 0) {
    throw std::runtime_error("torch_sparse_mla: no current CUDA stream on device " + std::to_string(device_index));
  }
  return stream;
}

}  // namespace torch_sparse_mla
