// Describes and compares the tensors that autograd saves in a region, without Python code. The
// library is for exactly one torch minor. storage_ops/checkpoint/saved/saved_tensors.py has the
// same two classes in Python, and explains them.
//
// Only CPython's stable ABI is used, so one library works with every CPython that has a GIL. Every
// caller has the GIL, which guards the objects here. Python describes tensors of subclasses and
// tensors without strides.
#include "descriptions.h"
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>
#include <vector>

namespace {

using namespace storage_ops;

// ---- data of the objects ----------------------------------------------------------------------

struct Recomputed;

struct Saved {
  std::vector<Description> tensors;
  std::vector<bool> released;
  size_t unreleased = 0;
  Recomputed* recomputed = nullptr;  // serves the current backward pass; null if it was freed
};

struct Recomputed {
  ~Recomputed();
  Ref first;  // the `SavedTensors` of the forward
  size_t limit = 0, stopped = 0, unread = 0;
  bool stops = false;
  int task = -1;
  std::vector<Description> described;
  std::vector<Kept> tensors;
};

PyTypeObject* recomputed_type = nullptr;

Recomputed::~Recomputed() {
  if (!first) return;
  auto& saved = data_of<Saved>(first.get());
  if (saved.recomputed == this) saved.recomputed = nullptr;
}

// ---- the forward ------------------------------------------------------------------------------

// Returns true if a region can recompute the storage of a tensor.
bool has_producer(const at::Tensor& t) {
  if (PyDict_Size(names.producers) == 0) return false;
  if (!t.defined()) return true;  // `note`, a Python function, decides
  const Ref key = owned(PyLong_FromVoidPtr(t.storage().unsafeGetStorageImpl()));
  PyObject* producer = PyDict_GetItemWithError(names.producers, key.get());
  if (!producer && PyErr_Occurred()) throw PythonError();
  return producer != nullptr;
}

PyObject* pack(PyObject* self, PyObject* object) {
  return guarded([&] {
    auto& saved = data_of<Saved>(PyTuple_GetItem(self, 0));
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

PyObject* hook(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *note, *notes_all;
    if (!PyArg_ParseTuple(arguments, "OO", &note, &notes_all)) return nullptr;
    const Ref bound = owned(PyTuple_Pack(3, self, note, notes_all));
    return PyCFunction_NewEx(&pack_def, bound.get(), names.module);
  });
}

PyObject* finish(PyObject* self, PyObject*) {
  auto& saved = data_of<Saved>(self);
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
    auto& saved = data_of<Saved>(self);
    release(saved, index_of(number, saved.tensors.size()));
    return none();
  });
}

PyObject* is_released(PyObject* self, PyObject*) {
  return PyBool_FromLong(data_of<Saved>(self).unreleased == 0);
}

Py_ssize_t count(PyObject* self) {
  return static_cast<Py_ssize_t>(data_of<Saved>(self).tensors.size());
}

PyObject* recompute(PyObject* self, PyObject* stops) {
  return guarded([&] {
    Recomputed* recomputed = nullptr;
    Ref object = owned(make(recomputed_type, recomputed));
    recomputed->first = Ref::to(self);
    recomputed->limit = data_of<Saved>(self).tensors.size();
    recomputed->stops = stops == Py_True;
    return object.release();
  });
}

PyObject* new_saved(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&] {
    Saved* saved = nullptr;
    return make(type, saved);
  });
}

// ---- the recompute ----------------------------------------------------------------------------

PyObject* pack_again(PyObject* self, PyObject* object) {
  return guarded([&]() -> PyObject* {
    auto& recomputed = data_of<Recomputed>(self);
    at::Tensor t = plain_tensor(object);
    note_saved_tensor(self, t.defined());
    recomputed.described.push_back(describe(object, t));
    Kept kept;
    if (!t.defined()) kept.by_python = Ref::to(object);
    kept.tensor = std::move(t);
    recomputed.tensors.push_back(std::move(kept));
    const size_t number = recomputed.tensors.size();
    recomputed.unread = number;
    if (recomputed.stops && number >= recomputed.limit) {
      recomputed.stopped = recomputed.limit;
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
    auto& recomputed = data_of<Recomputed>(self);
    const Kept& kept = recomputed.tensors[index_of(number, recomputed.tensors.size())];
    return kept.is_there() ? kept.object() : none();
  });
}

PyObject* has(PyObject* self, PyObject* number) {
  const auto& recomputed = data_of<Recomputed>(self);
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(index < recomputed.tensors.size() && recomputed.tensors[index].is_there());
}

PyObject* taken(Recomputed& recomputed, size_t index) {
  const Kept kept = std::move(recomputed.tensors[index]);
  recomputed.tensors[index] = Kept();
  --recomputed.unread;
  return kept.object();
}

PyObject* take(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& recomputed = data_of<Recomputed>(self);
    const size_t index = index_of(number, recomputed.tensors.size());
    return recomputed.tensors[index].is_there() ? taken(recomputed, index) : none();
  });
}

// Returns a tensor for the running backward pass, or None to let the region decide.
PyObject* taken_in_task(Recomputed& recomputed, size_t index) {
  if (recomputed.task < 0 || recomputed.task != torch::autograd::get_current_graph_task_id() ||
      index + 2 == recomputed.stopped || index >= recomputed.tensors.size() ||
      !recomputed.tensors[index].is_there()) {
    return none();
  }
  if (!torch::autograd::get_current_graph_task_keep_graph()) {
    release(data_of<Saved>(recomputed.first.get()), index);
  }
  return taken(recomputed, index);
}

PyObject* take_in_task(PyObject* self, PyObject* number) {
  return guarded([&] {
    const size_t index = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) throw PythonError();
    return taken_in_task(data_of<Recomputed>(self), index);
  });
}

PyObject* begin(PyObject* self, PyObject* task) {
  auto& recomputed = data_of<Recomputed>(self);
  recomputed.task = static_cast<int>(PyLong_AsLong(task));
  data_of<Saved>(recomputed.first.get()).recomputed = &recomputed;
  return PyErr_Occurred() ? nullptr : none();
}

PyObject* unpack(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& saved = data_of<Saved>(PyTuple_GetItem(self, 0));
    if (saved.recomputed) {
      const size_t index = PyLong_AsSize_t(number);
      if (PyErr_Occurred()) throw PythonError();
      Ref t = owned(taken_in_task(*saved.recomputed, index));
      if (t.get() != Py_None) return t.release();
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
  auto& recomputed = data_of<Recomputed>(self);
  // Python modes see the detach, and may raise a Python error.
  const bool by_python = c10::impl::dispatch_mode_enabled();
  PyObject* done = guarded([&] {
    for (Kept& kept : recomputed.tensors) {
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
    const std::vector<Kept> dropped = std::exchange(recomputed.tensors, {});
    recomputed.unread = 0;
  }
  return done;
}

// Returns true if each tensor certainly matches the one of the forward. Else Python decides.
bool all_fit(const Recomputed& recomputed) {
  const auto& before = data_of<Saved>(recomputed.first.get()).tensors;
  if (recomputed.described.size() != recomputed.limit) return false;
  for (size_t i = 0; i < recomputed.limit; ++i) {
    const Description &first = before[i], &second = recomputed.described[i];
    if (first.by_python || second.by_python || !first.is_like(second)) return false;
    if (first.parameter != second.parameter) return false;
    if (!recomputed.tensors[i].tensor.defined()) return false;
    if (recomputed.tensors[i].tensor._version() != second.version) return false;
    if (first.is_leaf && first.version != second.version) return false;
  }
  return true;
}

PyObject* fits(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(all_fit(data_of<Recomputed>(self))); });
}

PyObject* list_of(const std::vector<Description>& descriptions, size_t size) {
  Ref list = owned(PyList_New(0));
  for (size_t i = 0; i < size; ++i) {
    const Ref description = python_of(descriptions[i]);
    if (PyList_Append(list.get(), description.get()) < 0) throw PythonError();
  }
  return list.release();
}

PyObject* before(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& recomputed = data_of<Recomputed>(self);
    return list_of(data_of<Saved>(recomputed.first.get()).tensors, recomputed.limit);
  });
}

PyObject* after(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& recomputed = data_of<Recomputed>(self);
    return list_of(recomputed.described, recomputed.described.size());
  });
}

Py_ssize_t count_unread(PyObject* self) {
  return static_cast<Py_ssize_t>(data_of<Recomputed>(self).unread);
}

PyObject* is_whole(PyObject* self, PyObject*) {
  const auto& recomputed = data_of<Recomputed>(self);
  return PyBool_FromLong(recomputed.described.size() == recomputed.limit);
}

PyObject* stopped_at(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(data_of<Recomputed>(self).stopped);
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
PyObject* setup(PyObject*, PyObject* arguments) {
  Names objects;
  if (!PyArg_ParseTuple(arguments, "OOOOOOOO", &objects.tensor, &objects.parameter,
                        &objects.producers, &objects.describe, &objects.restore,
                        &objects.without_graph, &objects.stop, &objects.module)) {
    return nullptr;
  }
  Py_INCREF(arguments);  // never released, so `names` stays valid
  names = objects;
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
                              {Py_sq_length, slot(count_unread)},
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
