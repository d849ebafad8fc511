// Matrix products of fp32, bf16 or fp16 operands that are summed in fp32, on a CPU.
//
// ATen's 16-bit products on a CPU round their result to 16 bits, which makes sums over chunks less
// accurate than an unchunked product. These products can keep sums in fp32. When they round as
// well, they are faster for results larger than the operands, or take less memory.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>

#include "processor.h"
#include "rows/row_math.h"
#include "stable.h"

// On other platforms, ATen's products are used.
#if defined(STORAGE_OPS_X86)

namespace storage_ops {
namespace {

// out (rows, columns) = left (rows, depth) @ right (depth, columns), or out += the same. Strides
// count elements. Rows of `out` are contiguous.
struct Product {
  void* out;
  const void *left, *right;
  int64_t rows, columns, depth;
  int64_t out_row, left_row, left_column, right_row, right_column;
  bool add;
  bool narrow;  // `out` has the 16-bit dtype of the operands, not fp32
  void* spent;  // `left` if it may be overwritten
  bool paired;  // rows of `left` are interleaved, and left_row is the stride of slots
  float* sums;  // (rows, columns), if there are several passes over the depth
  uint32_t* scratch;
  int64_t scratch_slots;
};

constexpr int64_t kBlockRows = 128;  // rows of the left operand that are copied at a time
constexpr int64_t kStep = 32;  // slots of depth of the right operand that are copied at a time

int64_t parts(int64_t total, int64_t size) { return (total + size - 1) / size; }

#define STORAGE_OPS_TILES
#define STORAGE_OPS_LANES 16
#define STORAGE_OPS_ROWS 32
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c")
namespace amx_bf16 {
#include "product_loops.h"
}
#pragma GCC pop_options
#undef STORAGE_OPS_TILES
#undef STORAGE_OPS_LANES
#undef STORAGE_OPS_ROWS

#define STORAGE_OPS_DOT _mm512_dpbf16_ps
#define STORAGE_OPS_LANES 16
#define STORAGE_OPS_ROWS 8
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
namespace avx512_bf16 {
#include "product_loops.h"
}
#pragma GCC pop_options
#undef STORAGE_OPS_DOT

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#include "product_loops.h"
}
#pragma GCC pop_options
#undef STORAGE_OPS_LANES
#undef STORAGE_OPS_ROWS

#define STORAGE_OPS_LANES 8
#define STORAGE_OPS_ROWS 4
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#include "product_loops.h"
}
#pragma GCC pop_options

template <typename T>
void multiply(const Product& p) {
  switch (level()) {
    case kAmxBf16:  // a depth that does not fill a register may have less scratch
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (p.scratch_slots >= amx_bf16::least_scratch<T>(p)) return amx_bf16::multiply<T>(p);
      }
      [[fallthrough]];
    case kAvx512Bf16:
      return avx512_bf16::multiply<T>(p);
    case kAvx512:
      return avx512::multiply<T>(p);
    default:
      return avx2::multiply<T>(p);
  }
}

template <typename T>
bool is_matrix(const T& t, ScalarType dtype) {
  return t.dim() == 2 && t.scalar_type() == dtype;
}

// Returns the checked arguments. `left` and its strides are for the shape (rows, depth).
Product checked(const char* op, const Tensor& out, const Tensor& left, const Tensor& right,
                const Tensor& scratch, bool add, bool transposed) {
  const ScalarType dtype = left.scalar_type();
  const int row = transposed ? 1 : 0, column = 1 - row;
  STORAGE_OPS_CHECK(level() != kNone, op, ": AVX2 and FMA are missing, or switched off.");
  const bool wide = is_matrix(out, ScalarType::Float);
  STORAGE_OPS_CHECK(is_matrix(left, dtype) && is_matrix(right, dtype) &&
                        (wide || is_matrix(out, dtype)) && left.size(row) == out.size(0) &&
                        right.size(1) == out.size(1) && left.size(column) == right.size(0),
                    op, ": `left` must be ", transposed ? "(k, m)" : "(m, k)",
                    " and `right` (k, n), of one dtype. `out` must be (m, n), of float32 or that "
                    "dtype.");
  STORAGE_OPS_CHECK(out.stride(1) == 1 || out.size(1) < 2, op,
                    ": `out` must have contiguous rows.");
  STORAGE_OPS_CHECK(
      scratch.dim() == 1 && scratch.scalar_type() == ScalarType::Float && scratch.is_contiguous(),
      op, ": `scratch` must be a contiguous float32 vector.");
  Product p{};
  p.out = out.mutable_data_ptr();
  p.left = left.const_data_ptr();
  p.right = right.const_data_ptr();
  p.rows = out.size(0), p.columns = out.size(1), p.depth = left.size(column);
  p.out_row = out.stride(0);
  p.left_row = left.stride(row), p.left_column = left.stride(column);
  p.right_row = right.stride(0), p.right_column = right.stride(1);
  p.add = add, p.narrow = !wide;
  p.scratch = static_cast<uint32_t*>(scratch.mutable_data_ptr());
  p.scratch_slots = scratch.size(0);
  return p;
}

void multiply(const char* op, const Product& p, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return multiply<float>(p);
    case ScalarType::BFloat16:
      return multiply<BFloat16>(p);
    case ScalarType::Half:
      return multiply<Half>(p);
    default:
      fail(op, ": `left` must be float32, bfloat16 or float16.");
  }
}

void product(Tensor out, Tensor left, Tensor right, Tensor scratch, bool add) {
  multiply("_product", checked("_product", out, left, right, scratch, add, false),
           left.scalar_type());
}

// The left operand has the shape (depth, rows). It is overwritten, with the memory between its
// rows, if it would otherwise be copied often.
void transposed_product(Tensor out, Tensor left, Tensor right, Tensor scratch, bool add) {
  const char* op = "_transposed_product";
  Product p = checked(op, out, left, right, scratch, add, true);
  p.spent = left.mutable_data_ptr();
  multiply(op, p, left.scalar_type());
}

// Plans need these two before tensors exist, and callers need them for the scratch.
std::tuple<int64_t, int64_t> product_scratch(int64_t rows, int64_t columns, int64_t depth,
                                             int64_t threads, bool rounded, bool direct) {
  STORAGE_OPS_CHECK(rows >= 0 && columns >= 0 && depth >= 0 && threads > 0,
                    "_product_scratch: sizes and threads are ", rows, ", ", columns, ", ", depth,
                    " and ", threads, ". Expected sizes of at least 0, and at least 1 thread.");
  switch (level()) {
    case kAmxBf16:
      return amx_bf16::scratch_of({rows, columns, depth, threads, rounded, direct});
    case kAvx512Bf16:
      return avx512_bf16::scratch_of({rows, columns, depth, threads, rounded, direct});
    case kAvx512:
      return avx512::scratch_of({rows, columns, depth, threads, rounded, direct});
    default:
      return avx2::scratch_of({rows, columns, depth, threads, rounded, direct});
  }
}

std::tuple<std::string, int64_t> product_kind() {
  switch (level()) {
    case kAmxBf16:
      return {"amx_bf16", amx_bf16::kOnePass};
    case kAvx512Bf16:
      return {"avx512_bf16", avx512_bf16::kOnePass};
    case kAvx512:
      return {"avx512", avx512::kOnePass};
    case kAvx2:
      return {"avx2", avx2::kOnePass};
    default:
      return {"", avx2::kOnePass};
  }
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_product", TORCH_BOX(&storage_ops::product));
  m.impl("_transposed_product", TORCH_BOX(&storage_ops::transposed_product));
}

// Ops without tensors use this key. Like CPU, it overrides the ops in plain torch.
STABLE_TORCH_LIBRARY_IMPL(storage_ops, BackendSelect, m) {
  m.impl("_product_scratch", TORCH_BOX(&storage_ops::product_scratch));
  m.impl("_product_kind", TORCH_BOX(&storage_ops::product_kind));
}

#endif
