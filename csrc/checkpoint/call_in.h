// Calls a function inside of context managers.
#pragma once
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <vector>

namespace storage_ops {

// Returns `fn(*args, **kwargs)`, called inside of context managers, outermost first. Returns None
// if one of them suppresses an error, and null if a Python error is set. `kwargs` may be null.
PyObject* call_in(const std::vector<Ref>& contexts, PyObject* fn, PyObject* args, PyObject* kwargs);

}  // namespace storage_ops
