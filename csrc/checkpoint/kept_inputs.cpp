// Keeps the arguments of a call as autograd keeps tensors, if all of them are plain tensors.
// storage_ops/checkpoint/region/inputs.py does the same for all arguments, and explains it.
#include "descriptions.h"
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <vector>

namespace storage_ops {
namespace {

struct Input {
  torch::autograd::SavedVariable saved;
  c10::SmallVector<int64_t, 5> strides;
  bool needs_grad;
};

using Inputs = std::vector<Input>;

bool has_attributes(PyObject* t) {
  const Ref attributes = owned(PyObject_GenericGetDict(t, nullptr));
  return PyDict_Size(attributes.get()) != 0;
}

// KeptInputs(arguments): keeps a tuple of tensors. Returns None if Python must do it: for other
// values, tensors with attributes or of other classes, and if there are hooks for saved tensors.
PyObject* new_inputs(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* tensors = nullptr;
    if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &tensors)) return nullptr;
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return none();
    Inputs kept;
    kept.reserve(static_cast<size_t>(PyTuple_Size(tensors)));
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
      PyObject* object = PyTuple_GetItem(tensors, i);
      const at::Tensor t = plain_tensor(object);
      if (!t.defined() || !has_class(object, names.tensor) || has_attributes(object)) return none();
      kept.push_back({{t, false}, {t.strides().begin(), t.strides().end()}, t.requires_grad()});
    }
    Inputs* inputs = nullptr;
    Ref object = owned(make(type, inputs));
    *inputs = std::move(kept);
    return object.release();
  });
}

// again(): returns the tuple for a recompute, or None if a tensor has changed.
PyObject* again(PyObject* self, PyObject*) { return inputs_again(self); }

// unpack(number): returns one tensor.
PyObject* unpack(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& inputs = data_of<Inputs>(self);
    return THPVariable_Wrap(inputs[index_of(number, inputs.size())].saved.unpack());
  });
}

// traits(): returns for each tensor whether it needed a gradient, and its strides.
PyObject* traits(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref list = owned(PyList_New(0));
    for (const Input& input : data_of<Inputs>(self)) {
      const Ref strides = tuple_of(input.strides.data(), input.strides.size());
      PyObject* needs_grad = input.needs_grad ? Py_True : Py_False;
      const Ref pair = owned(PyTuple_Pack(2, needs_grad, strides.get()));
      if (PyList_Append(list.get(), pair.get()) < 0) throw PythonError();
    }
    return list.release();
  });
}

PyMethodDef methods[] = {{"again", again, METH_NOARGS, nullptr},
                         {"unpack", unpack, METH_O, nullptr},
                         {"traits", traits, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* inputs_again(PyObject* self) {
  return guarded([&]() -> PyObject* {
    const auto& inputs = data_of<Inputs>(self);
    Ref tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(inputs.size())));
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Input& input = inputs[i];
      at::Tensor t;
      try {
        t = input.saved.unpack();
      } catch (const c10::Error&) {  // the tensor was modified in place
        return none();
      }
      if (t.requires_grad() != input.needs_grad || t.strides() != c10::IntArrayRef(input.strides)) {
        return none();
      }
      PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i),
                      owned(THPVariable_Wrap(t)).release());
    }
    return tuple.release();
  });
}

bool add_inputs(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_inputs)},
                         {Py_tp_dealloc, slot(destroy<Inputs>)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  return add_type<Inputs>(module, "storage_ops._saved_tensors.KeptInputs", slots) != nullptr;
}

}  // namespace storage_ops
