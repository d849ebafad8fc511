// What the CPU and the CUDA row kernel check about their arguments, and their dispatch on dtype.
#pragma once

#include "stable.h"

namespace storage_ops {

inline ScalarType arithmetic_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_rows(const Tensor& logits, const Tensor& target,
                       const std::optional<Tensor>& bias, const Tensor& scale, const Tensor& nll) {
  constexpr const char* kOp = "_cross_entropy_rows: ";
  STD_TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) < 2), kOp,
                  "logits must be a matrix with contiguous rows");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const ScalarType arithmetic = arithmetic_of(logits);
  STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == rows && target.is_contiguous(), kOp,
                  "target must be contiguous with one index per row of logits");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == columns && bias->is_contiguous() &&
                            bias->scalar_type() == logits.scalar_type()),
                  kOp, "bias must be contiguous, of logits' dtype, with one value per column");
  STD_TORCH_CHECK(scale.scalar_type() == arithmetic && scale.is_contiguous() &&
                      (scale.dim() == 0 || (scale.dim() == 1 && scale.size(0) == rows)),
                  kOp, "scale must be one value or one per row, in the dtype of the arithmetic");
  STD_TORCH_CHECK(nll.scalar_type() == arithmetic && nll.is_contiguous() && nll.dim() == 1 &&
                      nll.size(0) == rows,
                  kOp, "nll must be contiguous, one value per row, in the dtype of the arithmetic");
}

// Calls `body(logit, arithmetic, index)` with a value of each of the three types in use.
template <typename Body>
void for_dtypes(const Tensor& logits, const Tensor& target, Body body) {
  const auto with_index = [&](auto logit, auto arithmetic) {
    switch (target.scalar_type()) {
      case ScalarType::Long:
        return body(logit, arithmetic, int64_t());
      case ScalarType::Int:
        return body(logit, arithmetic, int32_t());
      default:
        STD_TORCH_CHECK(false, "_cross_entropy_rows: target must be int32 or int64");
    }
  };
  switch (logits.scalar_type()) {
    case ScalarType::Double:
      return with_index(double(), double());
    case ScalarType::Float:
      return with_index(float(), float());
    case ScalarType::BFloat16:
      return with_index(BFloat16(0.0f), float());
    case ScalarType::Half:
      return with_index(Half(0.0f), float());
    default:
      STD_TORCH_CHECK(false,
                      "_cross_entropy_rows: logits must be float64, float32, bfloat16 or float16");
  }
}

}  // namespace storage_ops
