#include "arguments.h"

#include <cstdlib>
#include <stdexcept>

namespace torch_sparse_mla {
namespace {

constexpr int64_t kAlignmentBytes = 16;

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(dtype);
  }
}

struct MemoryRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

MemoryRange memory_range(const Argument& argument) {
  if (!argument.defined || argument.numel == 0) return {};
  int64_t last = 0;
  for (int64_t d = 0; d < argument.dim; ++d) last += (argument.size(d) - 1) * argument.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(argument.data);
  return {begin, begin + (static_cast<uintptr_t>(last) + 1) * argument.element_bytes};
}

}  // namespace

Argument::Argument(const char* name, const Tensor& tensor) : name(name) { read(tensor); }

Argument::Argument(const char* name, const std::optional<Tensor>& tensor) : name(name) {
  if (tensor) read(*tensor);
}

void Argument::read(const Tensor& tensor) {
  defined = true;
  dtype = tensor.scalar_type();
  element_bytes = tensor.element_size();
  const auto tensor_sizes = tensor.sizes();
  dim = static_cast<int64_t>(tensor_sizes.size());
  sizes = tensor_sizes.data();
  strides = tensor.strides().data();
  numel = tensor.numel();
  contiguous = tensor.is_contiguous();
  data = tensor.data_ptr();
}

void Checks::reject(const char* argument, const std::string& given, const std::string& allowed) const {
  throw std::invalid_argument(std::string("torch_sparse_mla::") + op_ + ": argument '" + argument + "': got " + given +
                              "; allowed: " + allowed);
}

const RecordLayout& Checks::layout(const std::string& name) const {
  std::string names;
  for (const RecordLayout& layout : kRecordLayouts) {
    if (name == layout.name) return layout;
    names += std::string(names.empty() ? "" : ", ") + layout.name;
  }
  reject("layout", "'" + name + "'", "one of " + names);
}

void Checks::dtype(const Argument& argument, std::initializer_list<ScalarType> allowed) const {
  std::string names;
  for (const ScalarType dtype : allowed) {
    if (argument.dtype == dtype) return;
    names += (names.empty() ? "" : " or ") + dtype_name(dtype);
  }
  reject(argument.name, "dtype " + dtype_name(argument.dtype), "dtype " + names);
}

void Checks::shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* names) const {
  bool equal = argument.dim == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; equal && d < argument.dim; ++d) equal = argument.size(d) == shape.begin()[d];
  if (equal) return;
  reject(argument.name, "shape " + list_text(argument.sizes, argument.dim),
         std::string("shape [") + names + "] = " + list_text(shape.begin(), static_cast<int64_t>(shape.size())));
}

void Checks::contiguous(const Argument& argument) const {
  if (argument.contiguous) return;
  reject(argument.name, "strides " + list_text(argument.strides, argument.dim),
         "a contiguous tensor (pass the whole buffer)");
}

void Checks::last_dim_contiguous(const Argument& argument) const {
  const int64_t last = argument.dim - 1;
  if (argument.size(last) <= 1 || argument.stride(last) == 1) return;
  reject(argument.name, "strides " + list_text(argument.strides, argument.dim), "a last stride of 1");
}

void Checks::aligned(const Argument& argument) const {
  if (reinterpret_cast<uintptr_t>(argument.data) % kAlignmentBytes == 0) return;
  reject(argument.name, "a misaligned first byte", "storage aligned to " + std::to_string(kAlignmentBytes) + " bytes");
}

void Checks::cache(const Argument& cache, const RecordLayout& layout) const {
  const std::string record_bytes = std::to_string(layout.record_bytes);
  dtype(cache, {ScalarType::Byte});
  if (cache.dim != 3 || cache.size(2) != layout.record_bytes || cache.size(1) < 1) {
    reject(cache.name, "shape " + list_text(cache.sizes, cache.dim),
           "shape [pages, page_size >= 1, " + record_bytes + "] for layout " + layout.name);
  }
  if (cache.stride(2) != 1 || (cache.size(1) > 1 && cache.stride(1) != layout.record_bytes)) {
    reject(cache.name, "strides " + list_text(cache.strides, cache.dim), "strides [any, " + record_bytes + ", 1]");
  }
  const int64_t page_bytes = cache.size(1) * layout.record_bytes;
  if (cache.size(0) > 1 && (cache.stride(0) < page_bytes || cache.stride(0) % kAlignmentBytes != 0)) {
    reject(cache.name, "a page stride of " + std::to_string(cache.stride(0)) + " bytes",
           "a multiple of " + std::to_string(kAlignmentBytes) + " from " + std::to_string(page_bytes) + " up");
  }
  aligned(cache);
}

void Checks::no_overlap(std::initializer_list<const Argument*> outputs,
                        std::initializer_list<const Argument*> inputs) const {
  const auto refuse_overlap = [this](const Argument& output, const Argument& other) {
    const MemoryRange written = memory_range(output);
    const MemoryRange range = memory_range(other);
    if (written.begin < range.end && range.begin < written.end) {
      reject(output.name, std::string("memory that overlaps '") + other.name + "'", "memory of its own");
    }
  };
  for (const auto& arguments : {inputs, outputs}) {
    for (const Argument* argument : arguments) {
      if (argument->numel > 0 && !argument->data) {
        reject(argument->name, "a tensor whose memory was freed", "a tensor with memory");
      }
    }
  }
  for (const Argument* const* output = outputs.begin(); output != outputs.end(); ++output) {
    for (const Argument* input : inputs) refuse_overlap(**output, *input);
    for (const Argument* const* earlier = outputs.begin(); earlier != output; ++earlier) {
      refuse_overlap(**output, **earlier);
    }
  }
}

std::string list_text(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

bool checked_mode() {
  const char* value = std::getenv("TORCH_SPARSE_MLA_CHECK");
  const std::string flag = value ? value : "0";
  if (flag != "0" && flag != "1") {
    throw std::invalid_argument("torch_sparse_mla: environment variable TORCH_SPARSE_MLA_CHECK: got '" + flag +
                                "'; allowed: 0 or 1");
  }
  return flag == "1";
}

}  // namespace torch_sparse_mla
