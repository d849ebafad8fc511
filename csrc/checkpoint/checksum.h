// Checksums of the bytes of tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace storage_ops {

// Returns a 64-bit checksum of a plain tensor. checksums.py has the same in Python, and explains
// it. Modes, hooks and policies do not see the ops. Does not need the GIL.
at::Tensor checksum_of(const at::TensorBase& t);

// Returns true if each checksum is equal to the one with the same index. It waits once for each
// device. Does not need the GIL.
bool are_equal(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second);

}  // namespace storage_ops
