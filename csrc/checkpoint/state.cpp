// What a region notes of its parameters and of torch's settings, without Python code for each.
// storage_ops/checkpoint/state/parameters.py and execution.py have the same in Python.
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <iterator>
#include <vector>

namespace storage_ops {
namespace {

struct Parameter {
  at::Tensor tensor;
  int64_t version;
  bool needed_grad;
};

using Parameters = std::vector<Parameter>;

int64_t version_of(const at::Tensor& t) { return t.is_inference() ? -1 : t._version(); }

PyObject* new_noted(PyTypeObject* type, PyObject* given, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* list = nullptr;
    if (!PyArg_ParseTuple(given, "O", &list)) return nullptr;
    Parameters* made = nullptr;
    Ref object = owned(make(type, made));
    const Py_ssize_t size = PyList_Size(list);
    if (size < 0) return nullptr;
    made->reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Ref address = owned(PyObject_GetAttrString(PyList_GetItem(list, i), "_cdata"));
      auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
      if (!impl) return nullptr;
      at::Tensor t(
          c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
      const int64_t version = version_of(t);
      const bool needed_grad = t.requires_grad();
      made->push_back({std::move(t), version, needed_grad});
    }
    return object.release();
  });
}

PyObject* note_versions(PyObject* self, PyObject*) {
  for (Parameter& each : held<Parameters>(self)) each.version = version_of(each.tensor);
  return none();
}

PyObject* written(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref found = owned(PyList_New(0));
    const auto& all = held<Parameters>(self);
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].version >= 0 && version_of(all[i].tensor) != all[i].version) {
        const auto version = static_cast<long long>(all[i].version);
        const Ref pair = owned(Py_BuildValue("nL", static_cast<Py_ssize_t>(i), version));
        if (PyList_Append(found.get(), pair.get()) < 0) throw PythonError();
      }
    }
    return found.release();
  });
}

PyObject* frozen_or_not(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref found = owned(PyList_New(0));
    const auto& all = held<Parameters>(self);
    for (size_t i = 0; i < all.size(); ++i) {
      const bool needed_grad = all[i].needed_grad;
      if (all[i].tensor.requires_grad() == needed_grad) continue;
      PyObject* before = needed_grad ? Py_True : Py_False;
      const Ref pair = owned(Py_BuildValue("nO", static_cast<Py_ssize_t>(i), before));
      if (PyList_Append(found.get(), pair.get()) < 0) throw PythonError();
    }
    return found.release();
  });
}

PyMethodDef methods[] = {{"note_versions", note_versions, METH_NOARGS, nullptr},
                         {"written", written, METH_NOARGS, nullptr},
                         {"frozen_or_not", frozen_or_not, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

// Returns the settings of torch that are on or off, in the order of `_FLAGS` in execution.py.
PyObject* flags(PyObject*, PyObject*) {
  const at::Context& context = at::globalContext();
  const bool all[] = {c10::GradMode::is_enabled(),
                      context.userEnabledFlashSDP(),
                      context.userEnabledMemEfficientSDP(),
                      context.userEnabledMathSDP(),
                      context.userEnabledCuDNNSDP(),
                      context.userEnabledCuDNN(),
                      context.benchmarkCuDNN(),
                      context.deterministicCuDNN()};
  PyObject* made = PyTuple_New(std::size(all));
  for (size_t i = 0; made && i < std::size(all); ++i) {
    PyTuple_SetItem(made, static_cast<Py_ssize_t>(i), PyBool_FromLong(all[i]));
  }
  return made;
}

PyMethodDef functions[] = {{"flags", flags, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_state(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_noted)},
                         {Py_tp_dealloc, slot(destroy<Parameters>)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  PyTypeObject* type =
      type_of("storage_ops._saved_tensors.Noted", sizeof(Object<Parameters>), 0, slots);
  return type && PyModule_AddFunctions(module, functions) == 0 &&
         PyModule_AddObject(module, "Noted", reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace storage_ops
