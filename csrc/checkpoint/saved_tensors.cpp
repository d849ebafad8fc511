// Describes and compares the tensors that autograd saves in a region, without Python code. The
// library is for exactly one torch minor. storage_ops/checkpoint/saved/saved_tensors.py has the
// same two classes in Python, and explains them.
//
// Only CPython's stable ABI is used, so one library works with every CPython that has a GIL. The
// functions here have the GIL. default_hooks.cpp does the same as the hooks here without it. Python
// describes tensors of subclasses and tensors without strides.
#include "saved_tensors.h"

#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace {

using namespace storage_ops;

PyTypeObject *saved_type = nullptr, *recomputed_type = nullptr;

// ---- the forward ------------------------------------------------------------------------------

PyObject* pack(PyObject* self, PyObject* object) {
  return guarded([&] {
    const PackHook hook{self, false};
    const at::Tensor t = plain_tensor(object);
    note_saved_tensor(self, t.defined());
    if (hook.notes_all() || has_producer(t)) {
      owned(PyObject_CallFunctionObjArgs(hook.note(), object, nullptr));
    }
    return PyLong_FromSize_t(hook.saved().add(describe(object, t, hook.checksums())));
  });
}

PyMethodDef pack_def{"pack", pack, METH_O, "Describe a tensor that autograd saves."};

PyObject* hook(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject* note;
    int notes_all;
    if (!PyArg_ParseTuple(arguments, "Op", &note, &notes_all)) return nullptr;
    return pack_hook(self, note, notes_all != 0).release();
  });
}

bool is_small(const Description& saved) {
  if (saved.by_python) {
    return owned(PyObject_CallFunctionObjArgs(names.is_small, saved.by_python.get(), nullptr))
               .get() == Py_True;
  }
  const auto sizes = c10::IntArrayRef(saved.layout).slice(0, saved.layout.size() / 2);
  return c10::multiply_integers(sizes) <= (saved.device.is_cpu() ? small.on_cpu : small.elsewhere);
}

PyObject* finish(PyObject* self, PyObject*) {
  return guarded([&] {
    finish_saved_tensors(self);
    return none();
  });
}

PyObject* release_one(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& saved = data_of<Saved>(self);
    const size_t index = index_of(number, saved.tensors.size());
    const std::lock_guard<std::mutex> lock(saved.mutex);
    saved.release(index);
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
  return guarded([&] { return recompute_of(self, stops == Py_True); });
}

PyObject* new_saved(PyTypeObject*, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    int checksums;
    if (!PyArg_ParseTuple(arguments, "p", &checksums)) return nullptr;
    return new_saved_tensors(checksums != 0);
  });
}

// ---- the recompute ----------------------------------------------------------------------------

PyObject* pack_again(PyObject* self, PyObject* object) {
  return guarded([&]() -> PyObject* {
    auto& recomputed = data_of<Recomputed>(self);
    const auto stop = [&]() -> PyObject* {
      recomputed.stopped = recomputed.limit;
      PyErr_SetNone(names.stop);
      return nullptr;
    };
    if (recomputed.stops_before_next()) return stop();
    at::Tensor t = plain_tensor(object);
    const bool stops = recomputed.stops_with_next();
    note_saved_tensor(self, t.defined());
    Description description = describe(object, t, recomputed.saved().checksums);
    Kept kept;
    if (!t.defined()) kept.by_python = Ref::to(object);
    kept.tensor = std::move(t);
    const size_t index = recomputed.add(std::move(description), std::move(kept));
    return stops ? stop() : PyLong_FromSize_t(index);
  });
}

PyMethodDef pack_again_def{"pack", pack_again, METH_O,
                           "Describe and keep a tensor of a recompute."};

PyObject* hook_again(PyObject* self, PyObject*) { return pack_hook_again(self); }

PyObject* object_or_none(const Kept& kept) { return kept.is_there() ? kept.object() : none(); }

PyObject* read(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& recomputed = data_of<Recomputed>(self);
    return object_or_none(recomputed.tensors[index_of(number, recomputed.tensors.size())]);
  });
}

PyObject* has(PyObject* self, PyObject* number) {
  const auto& recomputed = data_of<Recomputed>(self);
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(index < recomputed.tensors.size() && recomputed.tensors[index].is_there());
}

PyObject* take(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& recomputed = data_of<Recomputed>(self);
    const size_t index = index_of(number, recomputed.tensors.size());
    Kept kept;
    {
      const std::lock_guard<std::mutex> lock(recomputed.saved().mutex);
      if (recomputed.tensors[index].is_there()) kept = recomputed.take(index);
    }
    return object_or_none(kept);
  });
}

PyObject* take_in_task(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& recomputed = data_of<Recomputed>(self);
    const size_t index = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) throw PythonError();
    Kept kept;
    {
      const std::lock_guard<std::mutex> lock(recomputed.saved().mutex);
      kept = recomputed.take_in_task(index);
    }
    return object_or_none(kept);
  });
}

PyObject* begin(PyObject* self, PyObject* number) {
  const int task = static_cast<int>(PyLong_AsLong(number));
  if (PyErr_Occurred()) return nullptr;
  begin_task(self, task);
  return none();
}

PyObject* unpack(PyObject* self, PyObject* number) {
  return guarded([&] {
    auto& saved = data_of<Saved>(PyTuple_GetItem(self, 0));
    const size_t index = PyLong_AsSize_t(number);
    if (PyErr_Occurred()) throw PythonError();
    const Kept kept = saved.take_in_task(index);
    if (kept.is_there()) return kept.object();
    return PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 1), number, nullptr);
  });
}

PyMethodDef unpack_def{"unpack", unpack, METH_O, "Return a tensor that autograd reads."};

PyObject* new_unpack_hook(PyObject* self, PyObject* read) {
  return guarded([&] { return unpack_hook(self, read).release(); });
}

PyObject* drop(PyObject* self, PyObject*) { return drop_graphs(self); }

PyObject* fits(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(all_fit(data_of<Recomputed>(self))); });
}

PyObject* list_of(const std::vector<Description>& descriptions, size_t size) {
  Ref list = owned(PyList_New(0));
  for (size_t i = 0; i < size; ++i) {
    const Ref description = python_of(descriptions[i]);
    append(list, description);
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
                               {"unpack_hook", new_unpack_hook, METH_O, nullptr},
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
                                    {"drop_graphs", drop, METH_NOARGS, nullptr},
                                    {"fits", fits, METH_NOARGS, nullptr},
                                    {"before", before, METH_NOARGS, nullptr},
                                    {"after", after, METH_NOARGS, nullptr},
                                    {"is_whole", is_whole, METH_NOARGS, nullptr},
                                    {"stopped_at", stopped_at, METH_NOARGS, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};

// setup(Tensor, Parameter, producers, describe, restore, is_small, without_graph, stop, module,
//       SMALL_ON_CPU, SMALL)
PyObject* setup(PyObject*, PyObject* arguments) {
  Names objects;
  Small limits;
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOOnn", &objects.tensor, &objects.parameter,
                        &objects.producers, &objects.describe, &objects.restore, &objects.is_small,
                        &objects.without_graph, &objects.stop, &objects.module, &limits.on_cpu,
                        &limits.elsewhere)) {
    return nullptr;
  }
  Py_INCREF(arguments);  // never released, so `names` stays valid
  names = objects;
  small = limits;
  return none();
}

// storage_key(value): returns a number that identifies the storage of a plain tensor, or None.
PyObject* storage_key(PyObject*, PyObject* value) {
  return guarded([&] {
    const at::Tensor t = plain_tensor(value);
    return t.defined() ? PyLong_FromVoidPtr(t.storage().unsafeGetStorageImpl()) : none();
  });
}

PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, nullptr},
                           {"storage_key", storage_key, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

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

namespace storage_ops {

PackHook pack_hook_of(PyObject* pack) {
  if (!PyCFunction_Check(pack)) return {};
  const PyCFunction function = PyCFunction_GetFunction(pack);
  if (function == ::pack) return {PyCFunction_GetSelf(pack), false};
  if (function == pack_again) return {PyCFunction_GetSelf(pack), true};
  return {};
}

bool has_producer(const at::Tensor& t) {
  if (PyDict_Size(names.producers) == 0) return false;
  if (!t.defined()) return true;  // `note`, a Python function, decides
  const Ref key = owned(PyLong_FromVoidPtr(t.storage().unsafeGetStorageImpl()));
  PyObject* producer = PyDict_GetItemWithError(names.producers, key.get());
  if (!producer && PyErr_Occurred()) throw PythonError();
  return producer != nullptr;
}

PyObject* new_saved_tensors(bool checksums) {
  Saved* saved = nullptr;
  PyObject* object = make(saved_type, saved);
  if (object) saved->checksums = checksums;
  return object;
}

Ref pack_hook(PyObject* saved, PyObject* note, bool notes_all) {
  const Ref bound = owned(PyTuple_Pack(3, saved, note, notes_all ? Py_True : Py_False));
  return owned(PyCFunction_NewEx(&pack_def, bound.get(), names.module));
}

Ref unpack_hook(PyObject* saved, PyObject* read) {
  const Ref bound = owned(PyTuple_Pack(2, saved, read));
  return owned(PyCFunction_NewEx(&unpack_def, bound.get(), names.module));
}

void finish_saved_tensors(PyObject* self) {
  auto& saved = data_of<Saved>(self);
  saved.unreleased = saved.tensors.size();
  saved.released.assign(saved.unreleased, false);
  saved.are_small = std::all_of(saved.tensors.begin(), saved.tensors.end(), is_small);
}

PyObject* recompute_of(PyObject* saved, bool stops) {
  Recomputed* recomputed = nullptr;
  Ref object = owned(make(recomputed_type, recomputed));
  recomputed->first = Ref::to(saved);
  recomputed->limit = data_of<Saved>(saved).tensors.size();
  recomputed->stops = stops;
  return object.release();
}

PyObject* pack_hook_again(PyObject* recomputed) {
  return PyCFunction_NewEx(&pack_again_def, recomputed, names.module);
}

void begin_task(PyObject* self, int task) {
  auto& recomputed = data_of<Recomputed>(self);
  const std::lock_guard<std::mutex> lock(recomputed.saved().mutex);
  recomputed.task = task;
  recomputed.saved().recomputed = &recomputed;
}

PyObject* drop_graphs(PyObject* self) {
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

bool all_fit(const Recomputed& recomputed) {
  const auto& before = data_of<Saved>(recomputed.first.get()).tensors;
  if (recomputed.described.size() != recomputed.limit) return false;
  std::vector<at::Tensor> checksums_before, checksums;
  for (size_t i = 0; i < recomputed.limit; ++i) {
    const Description &first = before[i], &second = recomputed.described[i];
    if (first.by_python || second.by_python || !first.is_like(second)) return false;
    if (first.parameter != second.parameter) return false;
    if (!recomputed.tensors[i].tensor.defined()) return false;
    if (recomputed.tensors[i].tensor._version() != second.version) return false;
    if (first.is_leaf && first.version != second.version) return false;
    if (first.checksum.defined()) {
      checksums_before.push_back(first.checksum);
      checksums.push_back(second.checksum);
    }
  }
  if (checksums.empty()) return true;
  const WithoutGil no_gil;
  return are_equal(checksums_before, checksums);
}

}  // namespace storage_ops

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
  recomputed_type =
      type_of("storage_ops._saved_tensors.RecomputedTensors", sizeof(Object<Recomputed>),
              Py_TPFLAGS_DISALLOW_INSTANTIATION, recomputed);
  PyObject* module = PyModule_Create(&definition);
  if (!recomputed_type || !module) return nullptr;
  saved_type = add_type<Saved>(module, "storage_ops._saved_tensors.SavedTensors", saved);
  const bool added = saved_type && add_plain_region(module) && add_call_in(module) &&
                     add_default_hooks(module) && add_inputs(module) && add_results(module) &&
                     add_snapshot(module) && add_state(module) && add_walk(module);
  return added ? module : nullptr;
}
