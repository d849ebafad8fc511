// The dtypes that kernels support, and the dtypes in which they compute.
#pragma once

#include "stable.h"

namespace storage_ops {

inline ScalarType arithmetic_of(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Calls `body(number, arithmetic)` with a number of the element type of `t`, and one of its
// arithmetic type. `name` is the name of `t` in errors.
template <typename Body>
void for_dtypes(const char* name, const Tensor& t, Body body) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return body(double(), double());
    case ScalarType::Float:
      return body(float(), float());
    case ScalarType::BFloat16:
      return body(BFloat16(0.0f), float());
    case ScalarType::Half:
      return body(Half(0.0f), float());
    default:
      fail(name, " must be float64, float32, bfloat16 or float16.");
  }
}

}  // namespace storage_ops
