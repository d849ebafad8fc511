// The arguments of a region, from its call to its recompute.
#pragma once
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace storage_ops {

struct Arguments {
  Ref args, kwargs;
  std::vector<Ref> needing_grad;  // the tensors among them that need a gradient
};

// Returns the arguments in a `KeptInputs` for a recompute, or nothing if a tensor has changed.
std::optional<Arguments> inputs_again(PyObject* inputs);

// Returns true if a tensor in a `KeptInputs` has this storage, while the forward runs.
bool has_input_with(PyObject* inputs, const c10::StorageImpl* storage);

}  // namespace storage_ops
