// The tensors that autograd saves in one region, described and compared without Python code, for
// exactly one torch minor. storage_ops/checkpoint/saved/saved_tensors.py has the same two classes
// in Python, and says what they do.
//
// Only CPython's stable ABI is used, so that one library serves every CPython with a GIL. All calls
// hold the GIL, which guards the objects here. A tensor of a subclass, or without strides, is left
// to Python: a call returns its description as an object.
#include "descriptions.h"
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>
#include <vector>

namespace {

using namespace storage_ops;

// ---- what the objects hold --------------------------------------------------------------------

struct Recomputed;

struct Saved {
  std::vector<Description> tensors;
  std::vector<bool> released;
  size_t unreleased = 0;
  Recomputed* recomputed = nullptr;  // that serves the current backward pass, while it is alive
};

struct Recomputed {
  ~Recomputed();
  Ref first;  // the object of the forward
  size_t limit = 0, stopped = 0, there = 0;
  bool stops = false;
  int task = -1;
  std::vector<Description> described;
  std::vector<Kept> tensors;
};

PyTypeObject* recomputed_type = nullptr;

Recomputed::~Recomputed() {
  if (!first) return;
  auto& saved = held<Saved>(first.get());
  if (saved.recomputed == this) saved.recomputed = nullptr;
}

// ---- the forward ------------------------------------------------------------------------------

// Returns true if a region can recompute the storage of a tensor.
bool has_producer(const at::Tensor& t) {
  if (PyDict_Size(names.producers) == 0) return false;
  if (!t.defined()) return true;  // Python looks closer
  const Ref key = owned(PyLong_FromVoidPtr(t.storage().unsafeGetStorageImpl()));
  PyObject* found = PyDict_GetItemWithError(names.producers, key.get());
  if (!found && PyErr_Occurred()) throw PythonError();
  return found != nullptr;
}

PyObject* pack(PyObject* self, PyObject* object) {
  return guarded([&] {
    auto& saved = held<Saved>(PyTuple_GetItem(self, 0));
    const at::Tensor t = plain_tensor(object);
    note_saved_tensor(self, t.defined());
    PyObject* note = PyTuple_GetItem(self, 1);
    if (PyTuple_GetItem(self, 2) == Py_True || has_producer(t)) {
      owned(PyObject_CallFunctionObjArgs(note, object, nullptr));
    }
    saved.tensors.push_back(describe(object, t));
    return PyLong_FromSize_t(saved.tensors.size() - 1);
  });
}

PyMethodDef pack_def{"pack", pack, METH_O, "Describe a tensor that autograd saves."};

PyObject* hook(PyObject* self, PyObject* given) {
  return guarded([&]() -> PyObject* {
    PyObject *note, *notes_all;
    if (!PyArg_ParseTuple(given, "OO", &note, &notes_all)) return nullptr;
    const Ref bound = owned(PyTuple_Pack(3, self, note, notes_all));
    return PyCFunction_NewEx(&pack_def, bound.get(), names.module);
  });
}

PyObject* finish(PyObject* self, PyObject*) {
  auto& saved = held<Saved>(self);
  saved.unreleased = saved.tensors.size();
  saved.released.assign(saved.unreleased, false);
  return none();
}

void release(Saved& saved, size_t index) {
  if (index < saved.released.size() && !saved.released[index]) {
    saved.released[index] = true;
    --saved.unreleased;
  }
}

PyObject* release_one(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& saved = held<Saved>(self);
    release(saved, index_of(number, saved.tensors.size()));
    return none();
  });
}

PyObject* is_released(PyObject* self, PyObject*) {
  return PyBool_FromLong(held<Saved>(self).unreleased == 0);
}

Py_ssize_t count(PyObject* self) {
  return static_cast<Py_ssize_t>(held<Saved>(self).tensors.size());
}

PyObject* recompute(PyObject* self, PyObject* stops) {
  return guarded([&] {
    Recomputed* made = nullptr;
    Ref object = owned(make(recomputed_type, made));
    made->first = Ref::to(self);
    made->limit = held<Saved>(self).tensors.size();
    made->stops = stops == Py_True;
    return object.release();
  });
}

PyObject* new_saved(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&] {
    Saved* made = nullptr;
    return make(type, made);
  });
}

// ---- the recompute ----------------------------------------------------------------------------

PyObject* pack_again(PyObject* self, PyObject* object) {
  return guarded([&]() -> PyObject* {
    auto& again = held<Recomputed>(self);
    at::Tensor t = plain_tensor(object);
    note_saved_tensor(self, t.defined());
    again.described.push_back(describe(object, t));
    Kept kept;
    if (!t.defined()) kept.by_python = Ref::to(object);
    kept.tensor = std::move(t);
    again.tensors.push_back(std::move(kept));
    const size_t number = again.tensors.size();
    again.there = number;
    if (again.stops && number >= again.limit) {
      again.stopped = again.limit;
      PyErr_SetNone(names.stop);
      return nullptr;
    }
    return PyLong_FromSize_t(number - 1);
  });
}

PyMethodDef pack_again_def{"pack", pack_again, METH_O,
                           "Describe and keep a tensor of a recompute."};

PyObject* hook_again(PyObject* self, PyObject*) {
  return PyCFunction_NewEx(&pack_again_def, self, names.module);
}

PyObject* read(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& again = held<Recomputed>(self);
    const Kept& kept = again.tensors[index_of(number, again.tensors.size())];
    return kept.is_there() ? kept.object() : none();
  });
}

PyObject* has(PyObject* self, PyObject* number) {
  const auto& again = held<Recomputed>(self);
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(index < again.tensors.size() && again.tensors[index].is_there());
}

PyObject* taken(Recomputed& again, size_t index) {
  const Kept kept = std::move(again.tensors[index]);
  again.tensors[index] = Kept();
  --again.there;
  return kept.object();
}

PyObject* take(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& again = held<Recomputed>(self);
    const size_t index = index_of(number, again.tensors.size());
    return again.tensors[index].is_there() ? taken(again, index) : none();
  });
}

// Returns a tensor for the backward pass that runs; None where the region looks closer.
PyObject* taken_in_task(Recomputed& again, size_t index) {
  if (again.task < 0 || again.task != torch::autograd::get_current_graph_task_id() ||
      index + 2 == again.stopped || index >= again.tensors.size() ||
      !again.tensors[index].is_there()) {
    return none();
  }
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    release(held<Saved>(again.first.get()), index);
  }
  return taken(again, index);
}

PyObject* take_in_task(PyObject* self, PyObject* number) {
  return guarded([&] {
    const size_t index = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) throw PythonError();
    return taken_in_task(held<Recomputed>(self), index);
  });
}

PyObject* begin(PyObject* self, PyObject* task) {
  auto& again = held<Recomputed>(self);
  again.task = static_cast<int>(PyLong_AsLong(task));
  held<Saved>(again.first.get()).recomputed = &again;
  return PyErr_Occurred() ? nullptr : none();
}

PyObject* unpack(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& saved = held<Saved>(PyTuple_GetItem(self, 0));
    if (saved.recomputed) {
      const size_t index = PyLong_AsSize_t(number);
      if (PyErr_Occurred()) throw PythonError();
      Ref found = owned(taken_in_task(*saved.recomputed, index));
      if (found.get() != Py_None) return found.release();
    }
    return PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 1), number, nullptr);
  });
}

PyMethodDef unpack_def{"unpack", unpack, METH_O, "Return a tensor that autograd reads."};

PyObject* unpack_hook(PyObject* self, PyObject* read) {
  return guarded([&] {
    const Ref bound = owned(PyTuple_Pack(2, self, read));
    return PyCFunction_NewEx(&unpack_def, bound.get(), names.module);
  });
}

PyObject* drop_graphs(PyObject* self, PyObject*) {
  auto& again = held<Recomputed>(self);
  // Modes of Python see a detach, and may raise an error of Python.
  const bool by_python = c10::impl::dispatch_mode_enabled();
  PyObject* done = guarded([&] {
    for (Kept& kept : again.tensors) {
      if (!kept.is_there()) continue;
      if (by_python || kept.by_python) {
        const Ref t = owned(kept.object());
        kept.by_python = owned(PyObject_CallFunctionObjArgs(names.without_graph, t.get(), nullptr));
        kept.tensor.reset();
      } else if (kept.tensor.grad_fn() ||
                 (kept.tensor.is_view() && kept.tensor._base().grad_fn())) {
        kept.tensor = alias_of(kept.tensor);
      }
    }
    return none();
  });
  if (!done) {
    const std::vector<Kept> dropped = std::exchange(again.tensors, {});
    again.there = 0;
  }
  return done;
}

// Returns true if surely each tensor is the one of the forward. Python decides on all others.
bool all_fit(const Recomputed& again) {
  const auto& before = held<Saved>(again.first.get()).tensors;
  if (again.described.size() != again.limit) return false;
  for (size_t i = 0; i < again.limit; ++i) {
    const Description &first = before[i], &second = again.described[i];
    if (first.by_python || second.by_python || !first.is_like(second)) return false;
    if (first.parameter != second.parameter) return false;
    if (!again.tensors[i].tensor.defined()) return false;
    if (again.tensors[i].tensor._version() != second.version) return false;
    if (first.is_leaf && first.version != second.version) return false;
  }
  return true;
}

PyObject* fits(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(all_fit(held<Recomputed>(self))); });
}

PyObject* list_of(const std::vector<Description>& found, size_t size) {
  Ref made = owned(PyList_New(0));
  for (size_t i = 0; i < size; ++i) {
    const Ref each = python_of(found[i]);
    if (PyList_Append(made.get(), each.get()) < 0) throw PythonError();
  }
  return made.release();
}

PyObject* before(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& again = held<Recomputed>(self);
    return list_of(held<Saved>(again.first.get()).tensors, again.limit);
  });
}

PyObject* after(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& again = held<Recomputed>(self);
    return list_of(again.described, again.described.size());
  });
}

Py_ssize_t count_there(PyObject* self) {
  return static_cast<Py_ssize_t>(held<Recomputed>(self).there);
}

PyObject* is_whole(PyObject* self, PyObject*) {
  const auto& again = held<Recomputed>(self);
  return PyBool_FromLong(again.described.size() == again.limit);
}

PyObject* stopped_at(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(held<Recomputed>(self).stopped);
}

// ---- the module -------------------------------------------------------------------------------

PyMethodDef saved_methods[] = {{"hook", hook, METH_VARARGS, nullptr},
                               {"unpack_hook", unpack_hook, METH_O, nullptr},
                               {"finish", finish, METH_NOARGS, nullptr},
                               {"release", release_one, METH_O, nullptr},
                               {"is_released", is_released, METH_NOARGS, nullptr},
                               {"recompute", recompute, METH_O, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

PyMethodDef recomputed_methods[] = {{"hook", hook_again, METH_NOARGS, nullptr},
                                    {"read", read, METH_O, nullptr},
                                    {"has", has, METH_O, nullptr},
                                    {"take", take, METH_O, nullptr},
                                    {"take_in_task", take_in_task, METH_O, nullptr},
                                    {"begin", begin, METH_O, nullptr},
                                    {"drop_graphs", drop_graphs, METH_NOARGS, nullptr},
                                    {"fits", fits, METH_NOARGS, nullptr},
                                    {"before", before, METH_NOARGS, nullptr},
                                    {"after", after, METH_NOARGS, nullptr},
                                    {"is_whole", is_whole, METH_NOARGS, nullptr},
                                    {"stopped_at", stopped_at, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};

// setup(Tensor, Parameter, producers, describe, restore, without_graph, stop, module)
PyObject* setup(PyObject*, PyObject* given) {
  Names found;
  if (!PyArg_ParseTuple(given, "OOOOOOOO", &found.tensor, &found.parameter, &found.producers,
                        &found.describe, &found.restore, &found.without_graph, &found.stop,
                        &found.module)) {
    return nullptr;
  }
  Py_INCREF(given);  // as long as the process runs
  names = found;
  return none();
}

PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT,
                       "_saved_tensors",
                       nullptr,
                       -1,
                       functions,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace

PyObject* storage_ops::self_of_hook(PyObject* pack) {
  if (!PyCFunction_Check(pack)) return nullptr;
  const PyCFunction function = PyCFunction_GetFunction(pack);
  const bool is_ours = function == ::pack || function == pack_again;
  return is_ours ? PyCFunction_GetSelf(pack) : nullptr;
}

PyMODINIT_FUNC PyInit__saved_tensors() {
  PyType_Slot saved[] = {{Py_tp_new, slot(new_saved)},
                         {Py_tp_dealloc, slot(destroy<Saved>)},
                         {Py_tp_methods, saved_methods},
                         {Py_sq_length, slot(count)},
                         {0, nullptr}};
  PyType_Slot recomputed[] = {{Py_tp_dealloc, slot(destroy<Recomputed>)},
                              {Py_tp_methods, recomputed_methods},
                              {Py_sq_length, slot(count_there)},
                              {0, nullptr}};
  PyTypeObject* type =
      type_of("storage_ops._saved_tensors.SavedTensors", sizeof(Object<Saved>), 0, saved);
  recomputed_type =
      type_of("storage_ops._saved_tensors.RecomputedTensors", sizeof(Object<Recomputed>),
              Py_TPFLAGS_DISALLOW_INSTANTIATION, recomputed);
  PyObject* module = PyModule_Create(&definition);
  if (!type || !recomputed_type || !module) return nullptr;
  if (PyModule_AddObject(module, "SavedTensors", reinterpret_cast<PyObject*>(type)) < 0)
    return nullptr;
  return add_results(module) && add_state(module) && add_walk(module) ? module : nullptr;
}
