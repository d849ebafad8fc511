// Keeps the arguments of a call as autograd keeps tensors, if they are plain tensors, other plain
// values and tuples of both. storage_ops/checkpoint/region/inputs.py does the same for all
// arguments, and explains it.
#include "kept_inputs.h"

#include "descriptions.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>

namespace storage_ops {
namespace {

// A value among the arguments: a tensor, a tuple of values, or another value that cannot change.
struct Value {
  Ref other;  // null for a tensor and for a tuple
  size_t tensor = 0;
  bool is_tuple = false;
  std::vector<Value> items;
};

struct Input {
  torch::autograd::SavedVariable saved;
  c10::SmallVector<int64_t, 5> strides;
  bool needs_grad;
  const c10::StorageImpl* storage;  // alive while the forward runs
};

struct Inputs {
  std::vector<Input> tensors;
  Value args;
  std::vector<std::pair<Ref, Value>> kwargs;
  bool has_producer = false;
};

bool has_attributes(PyObject* t) {
  const Ref attributes = owned(PyObject_GenericGetDict(t, nullptr));
  return PyDict_Size(attributes.get()) != 0;
}

bool is_constant(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
         PyFloat_CheckExact(value) || PyUnicode_CheckExact(value);
}

// Keeps a value. Returns false if Python must do it.
bool keep(Inputs& inputs, PyObject* object, Value& value) {
  if (is_constant(object)) {
    value.other = Ref::to(object);
    return true;
  }
  if (PyTuple_CheckExact(object)) {
    value.is_tuple = true;
    value.items.resize(static_cast<size_t>(PyTuple_Size(object)));
    for (size_t i = 0; i < value.items.size(); ++i) {
      PyObject* item = PyTuple_GetItem(object, static_cast<Py_ssize_t>(i));
      if (!keep(inputs, item, value.items[i])) return false;
    }
    return true;
  }
  const at::Tensor t = plain_tensor(object);
  if (!t.defined() || !has_class(object, names.tensor) || has_attributes(object)) return false;
  if (!t.is_cpu() && !t.is_cuda() && !t.is_meta()) return false;
  value.tensor = inputs.tensors.size();
  inputs.has_producer |= has_producer(t);
  inputs.tensors.push_back({{t, false},
                            {t.strides().begin(), t.strides().end()},
                            t.requires_grad(),
                            t.storage().unsafeGetStorageImpl()});
  return true;
}

bool keep_all(Inputs& inputs, PyObject* args, PyObject* kwargs) {
  inputs.tensors.reserve(static_cast<size_t>(PyTuple_Size(args)));
  if (!keep(inputs, args, inputs.args)) return false;
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(kwargs, &position, &key, &value)) {
    auto& [name, kept] = inputs.kwargs.emplace_back(Ref::to(key), Value());
    if (!keep(inputs, value, kept)) return false;
  }
  return true;
}

// Returns a value again. `tensors` are the objects of the tensors; null stands for `...`.
Ref rebuild(const Value& value, const std::vector<Ref>* tensors) {
  if (value.other) return Ref::to(value.other.get());
  if (!value.is_tuple) return Ref::to(tensors ? (*tensors)[value.tensor].get() : Py_Ellipsis);
  Ref tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(value.items.size())));
  for (size_t i = 0; i < value.items.size(); ++i) {
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i),
                    rebuild(value.items[i], tensors).release());
  }
  return tuple;
}

Ref rebuild_kwargs(const Inputs& inputs, const std::vector<Ref>* tensors) {
  Ref kwargs = owned(PyDict_New());
  for (const auto& [name, value] : inputs.kwargs) {
    const Ref object = rebuild(value, tensors);
    if (PyDict_SetItem(kwargs.get(), name.get(), object.get()) < 0) throw PythonError();
  }
  return kwargs;
}

Ref list_of(const std::vector<Ref>& objects) {
  Ref list = owned(PyList_New(0));
  for (const Ref& each : objects) {
    append(list, each);
  }
  return list;
}

// KeptInputs(args, kwargs): keeps arguments. Returns None if Python must do it: for other values,
// tensors with attributes or of other classes, and if there are hooks for saved tensors.
PyObject* new_inputs(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *args, *kwargs;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &args, &PyDict_Type, &kwargs)) {
      return nullptr;
    }
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return none();
    Inputs kept;
    if (!keep_all(kept, args, kwargs)) return none();
    Inputs* inputs = nullptr;
    Ref object = owned(make(type, inputs));
    *inputs = std::move(kept);
    return object.release();
  });
}

// again(): returns the arguments by position and by name for a recompute, and a list of the tensors
// among them that need a gradient. Returns None if a tensor has changed.
PyObject* again(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto arguments = inputs_again(self);
    if (!arguments) return none();
    const Ref needing = list_of(arguments->needing_grad);
    return PyTuple_Pack(3, arguments->args.get(), arguments->kwargs.get(), needing.get());
  });
}

// unpack(number): returns one tensor.
PyObject* unpack(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& tensors = data_of<Inputs>(self).tensors;
    return THPVariable_Wrap(tensors[index_of(number, tensors.size())].saved.unpack());
  });
}

// structure(): returns the arguments with `...` in place of each tensor.
PyObject* structure(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& inputs = data_of<Inputs>(self);
    const Ref args = rebuild(inputs.args, nullptr), kwargs = rebuild_kwargs(inputs, nullptr);
    return PyTuple_Pack(2, args.get(), kwargs.get());
  });
}

// traits(): returns for each tensor whether it needed a gradient, and its strides.
PyObject* traits(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref list = owned(PyList_New(0));
    for (const Input& input : data_of<Inputs>(self).tensors) {
      const Ref strides = tuple_of(input.strides.data(), input.strides.size());
      PyObject* needs_grad = input.needs_grad ? Py_True : Py_False;
      const Ref pair = owned(PyTuple_Pack(2, needs_grad, strides.get()));
      append(list, pair);
    }
    return list.release();
  });
}

// has_producer(): returns True if another region can recompute the storage of a tensor.
PyObject* get_has_producer(PyObject* self, PyObject*) {
  return PyBool_FromLong(data_of<Inputs>(self).has_producer);
}

Py_ssize_t count(PyObject* self) {
  return static_cast<Py_ssize_t>(data_of<Inputs>(self).tensors.size());
}

PyMethodDef methods[] = {{"again", again, METH_NOARGS, nullptr},
                         {"unpack", unpack, METH_O, nullptr},
                         {"structure", structure, METH_NOARGS, nullptr},
                         {"traits", traits, METH_NOARGS, nullptr},
                         {"has_producer", get_has_producer, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

std::optional<Arguments> inputs_again(PyObject* object) {
  const auto& inputs = data_of<Inputs>(object);
  Arguments arguments;
  std::vector<Ref> tensors;
  for (const Input& input : inputs.tensors) {
    at::Tensor t;
    try {
      t = input.saved.unpack();
    } catch (const c10::Error&) {  // the tensor was modified in place
      return std::nullopt;
    }
    if (t.requires_grad() != input.needs_grad || t.strides() != c10::IntArrayRef(input.strides)) {
      return std::nullopt;
    }
    tensors.push_back(owned(THPVariable_Wrap(t)));
    if (input.needs_grad) arguments.needing_grad.push_back(Ref::to(tensors.back().get()));
  }
  arguments.args = rebuild(inputs.args, &tensors);
  arguments.kwargs = rebuild_kwargs(inputs, &tensors);
  return arguments;
}

bool has_input_with(PyObject* object, const c10::StorageImpl* storage) {
  const auto& tensors = data_of<Inputs>(object).tensors;
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const Input& input) { return input.storage == storage; });
}

bool add_inputs(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_inputs)},
                         {Py_tp_dealloc, slot(destroy<Inputs>)},
                         {Py_tp_methods, methods},
                         {Py_sq_length, slot(count)},
                         {0, nullptr}};
  return add_type<Inputs>(module, "storage_ops._saved_tensors.KeptInputs", slots) != nullptr;
}

}  // namespace storage_ops
