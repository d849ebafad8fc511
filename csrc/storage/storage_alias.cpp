// Returns a byte tensor over another tensor's memory, for torch >= 2.12 without a storage binding.
// Python swaps its data pointer into the storage that must see these bytes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "stable.h"

namespace storage_ops {
namespace {

Tensor alias_bytes(const Tensor& owner) {
  STORAGE_OPS_CHECK(owner.is_contiguous() && owner.element_size() == 1,
                    "_alias_bytes: `owner` must be a contiguous tensor of bytes.");
  const int64_t nbytes = owner.numel();
  const int64_t stride = 1;
  // The deleter's copy of `owner` keeps the memory alive.
  return torch::stable::from_blob(owner.mutable_data_ptr(), {&nbytes, 1}, {&stride, 1},
                                  owner.device(), ScalarType::Byte, [owner](void*) {});
}

}  // namespace
}  // namespace storage_ops

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CPU, m) {
  m.impl("_alias_bytes", TORCH_BOX(&storage_ops::alias_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_alias_bytes", TORCH_BOX(&storage_ops::alias_bytes));
}
