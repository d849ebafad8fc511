// Descriptions of tensors that autograd saves, in C++ with the stable ABI of CPython.
#pragma once
#include "checksum.h"
#include "python_objects.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <string>

// Exported by torch's Python library. Its header does not compile with the stable ABI of CPython.
PyObject* THPVariable_Wrap(const at::TensorBase& t);

namespace storage_ops {

// The Python objects that `setup` got as arguments.
struct Names {
  PyObject *tensor, *parameter, *producers, *describe, *restore, *is_small, *without_graph, *stop,
      *module;
};

inline Names names;

struct Description {
  Ref by_python;  // Python's description of a tensor that is not plain; then nothing else is set
  c10::SmallVector<int64_t, 8> layout;  // the sizes, and after them the strides
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;
  bool is_leaf = false;
  const void* parameter = nullptr;
  int64_t version = 0;
  at::Tensor checksum;  // undefined if it was not asked for

  // Compares everything but checksums.
  bool is_like(const Description& other) const {
    return dtype == other.dtype && device == other.device && layout == other.layout;
  }
};

// A tensor of a recompute.
struct Kept {
  at::Tensor tensor;
  Ref by_python;  // a tensor that is not plain

  bool is_there() const { return tensor.defined() || by_python; }
  PyObject* object() const {
    return tensor.defined() ? THPVariable_Wrap(tensor) : Ref::to(by_python.get()).release();
  }
};

// Returns a tensor with the same bytes and version counter, but without an autograd history. No
// op is dispatched.
inline at::Tensor alias_of(const at::Tensor& t) {
  // shallow_copy_and_detach would otherwise call aten.detach of active Python modes.
  c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKey::Python);
  auto* impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
}

// Returns true for a strided tensor that is not of a subclass or a transform, and has no symbols.
inline bool is_plain(c10::TensorImpl* impl) {
  return impl->layout() == c10::kStrided && impl->has_storage() &&
         !impl->has_symbolic_sizes_strides() && !impl->is_python_dispatch() &&
         !impl->is_inference() && !impl->key_set().has(c10::DispatchKey::NestedTensor) &&
         !impl->key_set().has(c10::DispatchKey::FuncTorchGradWrapper) &&
         !impl->key_set().has(c10::DispatchKey::FuncTorchBatched) &&
         !impl->key_set().has(c10::DispatchKey::Functionalize);
}

inline c10::TensorImpl* impl_of(PyObject* t) {
  static PyObject* const name = PyUnicode_InternFromString("_cdata");
  const Ref address = owned(PyObject_GetAttr(t, name));
  auto* impl = static_cast<c10::TensorImpl*>(PyLong_AsVoidPtr(address.get()));
  if (!impl) throw PythonError();
  return impl;
}

inline at::Tensor tensor_of(c10::TensorImpl* impl) {
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

// Returns the tensor of a Python object, or an undefined tensor if Python must describe it.
inline at::Tensor plain_tensor(PyObject* t) {
  PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(t));
  if (kind != names.tensor && kind != names.parameter) return {};
  c10::TensorImpl* impl = impl_of(t);
  return is_plain(impl) ? tensor_of(impl) : at::Tensor();
}

inline bool is_parameter(PyObject* t) {
  PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(t));
  if (kind == names.tensor) return false;
  if (kind == names.parameter) return true;
  const int is_instance = PyObject_IsInstance(t, names.parameter);
  if (is_instance < 0) throw PythonError();
  return is_instance != 0;
}

// Returns the Python object of a tensor, or null if it has none. The object lives as long as the
// tensor. The second function is for torch 2.10 and 2.11.
template <typename Slot>
auto object_in(const Slot& slot, int) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}
template <typename Slot>
PyObject* object_in(const Slot& slot, long) {
  return slot._unchecked_untagged_pyobj();
}
inline PyObject* object_of(const at::TensorBase& t) {
  return object_in(*t.unsafeGetTensorImpl()->pyobj_slot(), 0);
}

inline bool has_class(PyObject* object, PyObject* kind) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == kind;
}

// Describes a plain tensor. Does not need the GIL. Returns false if the tensor, or the tensor that
// it is a view of, has a class other than Tensor and Parameter. Then `parameter` is not set.
inline bool describe_plain(const at::TensorBase& t, Description& description) {
  description.layout.append(t.sizes().begin(), t.sizes().end());
  description.layout.append(t.strides().begin(), t.strides().end());
  description.dtype = t.scalar_type();
  description.device = t.device();
  description.version = t._version();
  const bool is_view = t.is_view();
  const at::TensorBase& root = is_view ? t._base() : t;
  description.is_leaf = root.is_leaf();
  if (is_view && !description.is_leaf) return true;  // only a leaf can be a parameter
  PyObject* object = object_of(root);
  if (object && has_class(object, names.parameter)) description.parameter = object;
  return !object || description.parameter || has_class(object, names.tensor);
}

// Describes a tensor, with the GIL. `t` is undefined if the object is not a plain tensor.
inline Description describe(PyObject* object, const at::Tensor& t, bool with_checksum) {
  Description description;
  if (!t.defined()) {
    description.by_python = owned(PyObject_CallFunctionObjArgs(
        names.describe, object, with_checksum ? Py_True : Py_False, nullptr));
    return description;
  }
  if (!describe_plain(t, description)) {  // a view of a tensor of another class
    PyObject* root = object_of(t._base());
    if (is_parameter(root)) description.parameter = root;
  }
  if (with_checksum) {
    const WithoutGil no_gil;
    description.checksum = checksum_of(t);
  }
  return description;
}

inline Ref tuple_of(const int64_t* values, size_t size) {
  Ref tuple = owned(PyTuple_New(static_cast<Py_ssize_t>(size)));
  for (size_t i = 0; i < size; ++i) {
    Ref value = owned(PyLong_FromLongLong(values[i]));
    PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), value.release());
  }
  return tuple;
}

// Returns the Python object of a description, which Python compares and prints.
inline Ref python_of(const Description& description) {
  if (description.by_python) return Ref::to(description.by_python.get());
  const size_t dims = description.layout.size() / 2;
  const Ref sizes = tuple_of(description.layout.data(), dims);
  const Ref strides = tuple_of(description.layout.data() + dims, dims);
  const std::string dtype(c10::getDtypeNames(description.dtype).first),
      device = description.device.str();
  const Ref parameter = description.parameter
                            ? owned(PyLong_FromVoidPtr(const_cast<void*>(description.parameter)))
                            : Ref::to(Py_None);
  const Ref checksum = description.checksum.defined()
                           ? owned(THPVariable_Wrap(description.checksum))
                           : Ref::to(Py_None);
  return owned(PyObject_CallFunction(names.restore, "OOssOOLO", sizes.get(), strides.get(),
                                     dtype.c_str(), device.c_str(), parameter.get(),
                                     description.is_leaf ? Py_True : Py_False,
                                     static_cast<long long>(description.version), checksum.get()));
}

// Returns an index. Raises an IndexError if the index is not below `limit`.
inline size_t index_of(PyObject* number, size_t limit) {
  const size_t index = PyLong_AsSize_t(number);
  if (PyErr_Occurred()) throw PythonError();
  if (index >= limit) {
    PyErr_SetString(PyExc_IndexError, "No tensor was saved under this index.");
    throw PythonError();
  }
  return index;
}

}  // namespace storage_ops
