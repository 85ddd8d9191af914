// Argument checks of the native operators: the rules, order and words of torch_sparse_mla/contract.py. PyTorch turns
// std::invalid_argument into ValueError.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "../common/record_layout.h"

namespace torch_sparse_mla {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A tensor argument with what the checks ask for, read once. `defined` is false for an optional argument not given.
struct Argument {
  Argument(const char* name, const Tensor& tensor);
  Argument(const char* name, const std::optional<Tensor>& tensor);

  int64_t size(int64_t d) const { return sizes[d]; }
  int64_t stride(int64_t d) const { return strides[d]; }
  template <class T>
  T* data_as() const {
    return static_cast<T*>(data);
  }

  const char* name;
  bool defined = false;
  ScalarType dtype{};
  size_t element_bytes = 0;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  int64_t numel = 0;
  bool contiguous = true;
  void* data = nullptr;

 private:
  void read(const Tensor& tensor);
};

// The checks of one operator.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  [[noreturn]] void reject(const char* argument, const std::string& given, const std::string& allowed) const;
  const RecordLayout& layout(const std::string& name) const;
  void dtype(const Argument& argument, std::initializer_list<ScalarType> allowed) const;
  void shape(const Argument& argument, std::initializer_list<int64_t> shape, const char* names) const;
  void contiguous(const Argument& argument) const;
  void last_dim_contiguous(const Argument& argument) const;
  void aligned(const Argument& argument) const;
  void cache(const Argument& cache, const RecordLayout& layout) const;
  void no_overlap(std::initializer_list<const Argument*> outputs, std::initializer_list<const Argument*> inputs) const;

 private:
  const char* op_;
};

// "[1, 2, 3]"
std::string list_text(const int64_t* values, int64_t count);

// Whether TORCH_SPARSE_MLA_CHECK asks for checks of data, read from the environment at each call.
bool checked_mode();

}  // namespace torch_sparse_mla
