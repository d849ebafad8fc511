// What the hooks of saved tensors and the results that policies save have to do with one another.
#pragma once
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <vector>

namespace storage_ops {

// Returns what one of our pack hooks is bound to; null for another hook.
PyObject* self_of_hook(PyObject* pack);

// Notes that autograd saves a tensor, by the hook that is bound to this object.
void note_saved_tensor(PyObject* hooks, bool is_plain);

// Returns what is noted of parameters now, a new object.
PyObject* note_parameters(const std::vector<PyObject*>& parameters);

// Add types and functions to the module.
bool add_results(PyObject* module);
bool add_state(PyObject* module);
bool add_walk(PyObject* module);

}  // namespace storage_ops
