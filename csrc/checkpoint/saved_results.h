// The functions that the files of this library call in one another.
#pragma once
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <cstdint>
#include <vector>

namespace storage_ops {

// Notes that autograd saves a tensor with the pack hook that is bound to `hooks`.
void note_saved_tensor(PyObject* hooks, bool is_plain);

// Returns a number that encodes settings of torch. Different settings have different numbers.
uint64_t settings();

// Returns a new `Noted` object with the present versions of parameters: of these, or of those that
// a known walk has seen.
PyObject* note_parameters(const std::vector<PyObject*>& parameters);
PyObject* note_parameters(PyObject* seen);

// Compares the noted parameters with the present ones.
bool are_unwritten(PyObject* noted);
bool need_the_same_gradients(PyObject* noted);

// Snapshot.is_unchanged, Snapshot.is_current, Snapshot.finish and Snapshot.put_back.
bool is_unchanged(PyObject* snapshot);
bool is_current(PyObject* snapshot);
void finish_snapshot(PyObject* snapshot);
void put_back(PyObject* snapshot);

// Walk.see and Seen.is_unchanged.
PyObject* see_walk(PyObject* walk, PyObject* roots);
bool is_walk_unchanged(PyObject* seen);

// Returns the buffers that a known walk has seen.
const std::vector<PyObject*>& buffers_of(PyObject* seen);

// Add types and functions to the module. Return false if a Python error is set.
bool add_call_in(PyObject* module);
bool add_inputs(PyObject* module);
bool add_plain_region(PyObject* module);
bool add_results(PyObject* module);
bool add_snapshot(PyObject* module);
bool add_state(PyObject* module);
bool add_walk(PyObject* module);

}  // namespace storage_ops
