// The arguments of the CPU and the CUDA row kernel of divergences, and their checks.
#pragma once

#include <string>

#include "cross_entropy_rows.h"
#include "divergence_math.h"

namespace storage_ops {

constexpr int64_t kStatistics = 3;  // rows of `state`: two log-sum-exps and the center

// Tensor arguments of _divergence_rows. Some may be missing.
struct DivergenceTensors {
  Tensor logits, teacher;
  std::optional<Tensor> bias, teacher_bias;
  Tensor state, loss;
  std::optional<Tensor> upstream;
};

// The arguments in the form of the kernels, for logits of type T and arithmetic of type A.
template <typename T, typename A>
struct DivergenceArguments {
  T *logits, *teacher;
  const A *bias, *teacher_bias, *upstream;
  A *state, *loss;
  int64_t rows, columns, stride, teacher_stride, state_stride, upstream_stride;
  A beta, scale;
  bool update, grad, over_teacher;

  // The destination of a row's gradient: it overwrites the logits of one head.
  STORAGE_OPS_INLINE T* gradient(int64_t row) const {
    return over_teacher ? teacher + row * teacher_stride : logits + row * stride;
  }
  // The factor of a row's gradient.
  STORAGE_OPS_INLINE A factor(int64_t row) const { return upstream[row * upstream_stride] * scale; }
};

// The gradient of the forward divergence needs no sum, so one pass computes both.
STORAGE_OPS_INLINE constexpr bool at_once(Divergence kind) { return kind == Divergence::kForward; }

inline void check_divergence(const DivergenceTensors& tensors, bool grad) {
  const auto& [logits, teacher, bias, teacher_bias, state, loss, upstream] = tensors;
  constexpr const char* kOp = "_divergence_rows: ";
  const ScalarType arithmetic = arithmetic_of(logits);
  STORAGE_OPS_CHECK(logits.dim() == 2 && teacher.dim() == 2, kOp, "`logits` must be matrices.");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  for (const Tensor* t : {&logits, &teacher}) {
    STORAGE_OPS_CHECK(t->size(0) == rows && t->size(1) == columns &&
                          t->scalar_type() == logits.scalar_type() &&
                          (t->stride(1) == 1 || columns < 2),
                      kOp, "`logits` must have one shape and dtype, and contiguous rows.");
  }
  for (const auto* t : {&bias, &teacher_bias}) {
    STORAGE_OPS_CHECK(!*t || ((*t)->dim() == 1 && (*t)->size(0) == columns &&
                              (*t)->is_contiguous() && (*t)->scalar_type() == arithmetic),
                      kOp, "biases must be contiguous, of the arithmetic's dtype, one per column.");
  }
  STORAGE_OPS_CHECK(
      state.scalar_type() == arithmetic && state.dim() == 2 && state.size(0) == kStatistics &&
          state.size(1) == rows && (state.stride(1) == 1 || rows < 2),
      kOp, "`state` must be (3, rows) with contiguous rows, in the dtype of the arithmetic.");
  STORAGE_OPS_CHECK(loss.scalar_type() == arithmetic && loss.dim() == 1 && loss.size(0) == rows &&
                        loss.is_contiguous(),
                    kOp, "`loss` must be contiguous, one per row, in the dtype of the arithmetic.");
  STORAGE_OPS_CHECK(
      !grad || (upstream && upstream->scalar_type() == arithmetic && upstream->dim() == 1 &&
                (upstream->size(0) == rows || upstream->size(0) == 1)),
      kOp, "`upstream` must be (rows) or (1), in the dtype of the arithmetic.");
}

inline Divergence divergence_of(const std::string& name) {
  if (name == "forward") return Divergence::kForward;
  if (name == "reverse") return Divergence::kReverse;
  if (name == "jsd") return Divergence::kJsd;
  STORAGE_OPS_CHECK(name == "tvd", "_divergence_rows: `divergence` is ", name,
                    ". Expected forward, reverse, jsd or tvd.");
  return Divergence::kTvd;
}

template <typename T, typename A>
DivergenceArguments<T, A> divergence_arguments(const DivergenceTensors& t, double beta,
                                               double scale, int64_t phases, bool over_teacher) {
  DivergenceArguments<T, A> a{};
  a.logits = static_cast<T*>(t.logits.mutable_data_ptr());
  a.teacher = static_cast<T*>(t.teacher.mutable_data_ptr());
  a.bias = pointer<A>(t.bias);
  a.teacher_bias = pointer<A>(t.teacher_bias);
  a.upstream = pointer<A>(t.upstream);
  a.state = static_cast<A*>(t.state.mutable_data_ptr());
  a.loss = static_cast<A*>(t.loss.mutable_data_ptr());
  a.rows = t.logits.size(0);
  a.columns = t.logits.size(1);
  a.stride = t.logits.stride(0);
  a.teacher_stride = t.teacher.stride(0);
  a.state_stride = t.state.stride(0);
  a.upstream_stride = t.upstream && t.upstream->size(0) > 1 ? t.upstream->stride(0) : 0;
  a.beta = static_cast<A>(beta);
  a.scale = static_cast<A>(scale);
  a.update = phases & kUpdate;
  a.grad = phases & kGradient;
  a.over_teacher = over_teacher;
  return a;
}

}  // namespace storage_ops
