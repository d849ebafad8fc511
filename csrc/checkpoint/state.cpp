// Notes the parameters of a region and the settings of torch, without Python code for each of them.
// storage_ops/checkpoint/state/parameters.py and execution.py do the same in Python.
#include "descriptions.h"
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
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

PyTypeObject* noted_type = nullptr;

PyObject* new_noted(PyTypeObject*, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* list = nullptr;
    if (!PyArg_ParseTuple(arguments, "O!", &PyList_Type, &list)) return nullptr;
    std::vector<PyObject*> parameters(static_cast<size_t>(PyList_Size(list)));
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i] = PyList_GetItem(list, static_cast<Py_ssize_t>(i));
    }
    return note_parameters(parameters);
  });
}

PyObject* note_versions(PyObject* self, PyObject*) {
  for (Parameter& parameter : data_of<Parameters>(self))
    parameter.version = version_of(parameter.tensor);
  return none();
}

PyObject* written(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref pairs = owned(PyList_New(0));
    const auto& all = data_of<Parameters>(self);
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].version >= 0 && version_of(all[i].tensor) != all[i].version) {
        const auto version = static_cast<long long>(all[i].version);
        const Ref pair = owned(Py_BuildValue("nL", static_cast<Py_ssize_t>(i), version));
        append(pairs, pair);
      }
    }
    return pairs.release();
  });
}

PyObject* frozen_or_not(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref pairs = owned(PyList_New(0));
    const auto& all = data_of<Parameters>(self);
    for (size_t i = 0; i < all.size(); ++i) {
      const bool needed_grad = all[i].needed_grad;
      if (all[i].tensor.requires_grad() == needed_grad) continue;
      PyObject* before = needed_grad ? Py_True : Py_False;
      const Ref pair = owned(Py_BuildValue("nO", static_cast<Py_ssize_t>(i), before));
      append(pairs, pair);
    }
    return pairs.release();
  });
}

PyMethodDef methods[] = {{"note_versions", note_versions, METH_NOARGS, nullptr},
                         {"written", written, METH_NOARGS, nullptr},
                         {"frozen_or_not", frozen_or_not, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyObject* get_settings(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(settings()); }

PyMethodDef functions[] = {{"settings", get_settings, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

// The settings are those of `_OF_TORCH` in execution.py, and autocast on the CPU and on a GPU.
uint64_t settings() {
  const at::Context& context = at::globalContext();
  const bool flags[] = {context.userEnabledFlashSDP(),
                        context.userEnabledMemEfficientSDP(),
                        context.userEnabledMathSDP(),
                        context.userEnabledCuDNNSDP(),
                        context.userEnabledCuDNN(),
                        context.benchmarkCuDNN(),
                        context.deterministicCuDNN(),
                        context.deterministicAlgorithms(),
                        context.deterministicAlgorithmsWarnOnly(),
                        at::autocast::is_autocast_enabled(at::kCPU),
                        at::autocast::is_autocast_enabled(at::kCUDA),
                        at::autocast::is_autocast_cache_enabled()};
  uint64_t all = 0;
  for (const bool flag : flags) all = all << 1 | flag;
  const c10::ScalarType dtypes[] = {c10::typeMetaToScalarType(c10::get_default_dtype()),
                                    at::autocast::get_autocast_dtype(at::kCPU),
                                    at::autocast::get_autocast_dtype(at::kCUDA)};
  for (const c10::ScalarType dtype : dtypes) all = all << 8 | static_cast<uint8_t>(dtype);
  return all;
}

bool are_unwritten(PyObject* noted) {
  const auto& all = data_of<Parameters>(noted);
  return std::all_of(all.begin(), all.end(), [](const Parameter& each) {
    return each.version < 0 || version_of(each.tensor) == each.version;
  });
}

bool need_the_same_gradients(PyObject* noted) {
  const auto& all = data_of<Parameters>(noted);
  return std::all_of(all.begin(), all.end(), [](const Parameter& each) {
    return each.tensor.requires_grad() == each.needed_grad;
  });
}

PyObject* note_parameters(const std::vector<PyObject*>& parameters) {
  Parameters* noted = nullptr;
  Ref object = owned(make(noted_type, noted));
  noted->reserve(parameters.size());
  for (PyObject* parameter : parameters) {
    at::Tensor t = tensor_of(impl_of(parameter));
    const int64_t version = version_of(t);
    const bool needed_grad = t.requires_grad();
    noted->push_back({std::move(t), version, needed_grad});
  }
  return object.release();
}

bool add_state(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_noted)},
                         {Py_tp_dealloc, slot(destroy<Parameters>)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  noted_type = add_type<Parameters>(module, "storage_ops._saved_tensors.Noted", slots);
  return noted_type && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace storage_ops
