// The functions that the files of this library call in one another.
#pragma once
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <vector>

namespace storage_ops {

// Returns the object that one of our pack hooks is bound to; null for any other hook.
PyObject* self_of_hook(PyObject* pack);

// Notes that autograd saves a tensor with the pack hook that is bound to `hooks`.
void note_saved_tensor(PyObject* hooks, bool is_plain);

// Returns a new `Noted` object with the present versions of parameters.
PyObject* note_parameters(const std::vector<PyObject*>& parameters);

// Add types and functions to the module. Return false if a Python error is set.
bool add_results(PyObject* module);
bool add_state(PyObject* module);
bool add_walk(PyObject* module);

}  // namespace storage_ops
