// The names of the stable ABI that the kernels use. No other header of torch may be included here.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace storage_ops {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws an error that Python sees as a RuntimeError. STD_TORCH_CHECK would put a file and line of
// these sources before the message, which do not help users.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace storage_ops

// Raises a RuntimeError with a message of these parts unless the condition holds.
#define STORAGE_OPS_CHECK(condition, ...)               \
  do {                                                  \
    if (!(condition)) ::storage_ops::fail(__VA_ARGS__); \
  } while (false)
