// The log of the ops of one forward, with the results that a policy saves, and the cursor of a
// recompute in this log. storage_ops/checkpoint/saved/matching.py has the same log and cursor in
// Python, and explains them. Its functions write the errors of both.
#pragma once
#include "descriptions.h"
#include "unseen.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace storage_ops {

// The Python functions that `setup_results` got as arguments.
struct Texts {
  PyObject *difference, *failure, *modified, *end, *follow, *top_hooks, *origin, *arrive;
};

inline Texts texts;

// ---- ops --------------------------------------------------------------------------------------

struct Op {
  std::string name;            // in the dispatcher
  bool counts = true;          // whether it is logged
  bool is_composite = false;   // it calls other ops, which are logged instead
  bool is_of_library = false;  // not an op of aten
  bool is_collective = false;  // may write to its arguments
  bool is_cast = false;
  bool draws = false;            // uses random numbers
  bool has_kernel = false;       // whether `add_kernel` has added a kernel
  bool adds_to_product = false;  // may add a bias or a mask in place to a product that it computes
  c10::DispatchKeySet autocast;  // the keys for which it has a kernel that casts arguments
};

template <typename F>
void for_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& each : value.toListRef()) for_tensors(each, f);
  }
}

inline bool is_plain(const at::Tensor& t) { return is_plain(t.unsafeGetTensorImpl()); }

inline c10::StorageImpl* key_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

// ---- the arguments of a call --------------------------------------------------------------------

using Call = c10::SmallVector<int64_t, 32>;

inline int64_t hash_of(const std::string& text) {
  return static_cast<int64_t>(std::hash<std::string>()(text));
}

// Names of the nodes of view ops, without "Backward0".
inline std::unordered_set<std::string> view_nodes;

// Returns a number for the name of a node, or 0 for the node of a view op.
inline int64_t number_of(const torch::autograd::Node& node) {
  thread_local std::unordered_map<const void*, int64_t> of_types;
  const auto& type = typeid(node);
  if (std::strstr(type.name(), "PyNode")) return hash_of(node.name());
  auto found = of_types.find(&type);
  if (found == of_types.end()) {
    const std::string name = node.name();
    const bool is_view = view_nodes.count(name.substr(0, name.find("Backward"))) != 0;
    found = of_types.emplace(&type, is_view ? 0 : hash_of(name)).first;
  }
  return found->second;
}

// Returns a number for the origin of a tensor: the name of its node, a parameter, or another leaf.
inline int64_t origin_of(const at::Tensor& t) {
  at::TensorBase base = t.is_view() ? t._base() : t;
  for (const torch::autograd::Node* node = base.grad_fn().get(); node;
       node = node->next_edge(0).function.get()) {
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      base = leaf->variable;
      break;
    }
    if (const int64_t number = number_of(*node)) return number;
  }
  PyObject* root = object_of(base);
  if (!root) return base.requires_grad() ? 1 : 0;
  if (has_class(root, names.parameter)) return reinterpret_cast<int64_t>(root);
  if (has_class(root, names.tensor) && !base.requires_grad()) return 0;
  const WithGil gil;
  if (is_parameter(root)) return reinterpret_cast<int64_t>(root);
  if (!base.requires_grad()) return 0;
  const Ref origin = owned(PyObject_CallFunctionObjArgs(texts.origin, root, nullptr));
  if (PyLong_Check(origin.get())) return PyLong_AsLongLong(origin.get());
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(origin.get(), &size);
  if (!text) throw PythonError();
  return hash_of(std::string(text, static_cast<size_t>(size)));
}

inline void describe_value(const c10::IValue& value, Call& call) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (!t.defined() || t.is_nested() || t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      return;  // from the next forward on, Python describes calls with such tensors
    }
    call.push_back(-t.dim() - 1);
    call.append(t.sizes().begin(), t.sizes().end());
    call.push_back(static_cast<int64_t>(t.scalar_type()));
    call.push_back(origin_of(t));
  } else if (value.isInt()) {
    call.push_back(value.toInt());
  } else if (value.isBool()) {
    call.push_back(value.toBool());
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    call.push_back(bits);
  } else if (value.isString()) {
    call.push_back(hash_of(value.toStringRef()));
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) describe_value(item, call);
  }
}

inline std::unique_ptr<Call> describe_call(const torch::jit::Stack& stack, size_t arguments) {
  auto call = std::make_unique<Call>();
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) describe_value(stack[i], *call);
  return call;
}

// ---- saved results ------------------------------------------------------------------------------

inline c10::IValue alias_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? alias_of(value.toTensor()) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> copy;
  for (const c10::IValue& each : value.toListRef()) copy.push_back(alias_of(each.toTensor()));
  return copy;
}

inline at::Tensor copy_of(const at::Tensor& t) {
  const Unseen unseen;
  return t.clone();
}

struct Result {
  std::vector<c10::IValue> values;
  // All tensors on the same storages, and their versions. A result of aten._unsafe_view has a
  // version counter of its own.
  c10::SmallVector<std::pair<at::Tensor, int64_t>, 3> versions;
  std::vector<std::pair<at::Generator, at::Tensor>> random;  // generator states after the op
  bool offloads = false;
  bool is_written_later = false;  // by the region, which wrote to a copy in the forward
  Ref trips;  // of its bytes to host memory and back. Empty when the result is freed.

  void watch(const at::Tensor& t) { versions.emplace_back(t, t._version()); }
  bool is_modified() const {
    return std::any_of(versions.begin(), versions.end(),
                       [](const auto& each) { return each.first._version() != each.second; });
  }
};

struct Event {
  const Op* op = nullptr;  // null if autograd saves a tensor
  std::unique_ptr<Call> call;
  std::unique_ptr<Result> result;
};

inline const Op end_of_forward;  // the last event

struct Log {
  std::string region;
  std::vector<Event> events;
  std::unordered_set<const Op*> names;  // ops with a saved result
  std::unordered_map<c10::StorageImpl*, Result*> on_storage;
  bool is_complete = false;

  size_t add(const Op* op) {
    events.emplace_back().op = op;
    return events.size() - 1;
  }
};

// ---- a recompute --------------------------------------------------------------------------------

class Cursor {
 public:
  std::string difference;  // a sentence about the first op that differs
  std::string error;       // the error of a callback, which must not throw

  explicit Cursor(Log& log) : log_(log) {}

  // Returns the position of a call in the log if a result may be saved there, else -1.
  int64_t find(const Op* op, const Call* call) {
    if (in_step_ && log_.events[at_].op == op) {
      const auto& before = log_.events[at_].call;
      if (!before || !call || *before == *call) return static_cast<int64_t>(at_++);
    }
    if (in_step_) lose_step(op->name);
    if (!call || !log_.names.count(op)) return -1;
    std::vector<size_t> matches;
    for (size_t i = at_; i < log_.events.size(); ++i) {
      const Event& each = log_.events[i];
      if (each.op == op && (!each.call || *each.call == *call)) matches.push_back(i);
    }
    if (matches.empty()) fail("has no result", op->name);
    if (matches.size() > 1 || !log_.events[matches[0]].call) return -1;
    at_ = matches[0] + 1;
    in_step_ = true;
    return static_cast<int64_t>(matches[0]);
  }

  // Returns true if a call of this op needs a description.
  bool asks(const Op* op) const { return log_.names.count(op) > 0; }

  void use(int64_t position) { last_used_ = position; }

  void see_saved_tensor() {
    if (!in_step_) return;
    if (log_.events[at_].op == nullptr) {
      ++at_;
    } else {
      lose_step("");
    }
  }

  void warn_of_modified(const std::string& op) const {
    const WithGil gil;
    owned(PyObject_CallFunction(texts.modified, "ss", log_.region.c_str(), op.c_str()));
  }

  // Throws the error of a callback.
  void raise_error() {
    if (!error.empty()) throw std::runtime_error(std::exchange(error, ""));
  }

 private:
  void lose_step(const std::string& name) {
    in_step_ = false;
    if (difference.empty()) difference = describe_difference(name);
    const int64_t used = std::exchange(last_used_, -1);
    if (used < 0) return;
    for (size_t i = static_cast<size_t>(used); i < at_; ++i) {
      if (is_last_of_its_kind(i)) return;
    }
    fail("may be of another call", log_.events[static_cast<size_t>(used)].op->name);
  }

  bool is_last_of_its_kind(size_t at) const {
    const Event& event = log_.events[at];
    for (size_t i = at + 1; i < log_.events.size(); ++i) {
      const Event& other = log_.events[i];
      if (other.op == event.op && (!event.call || !other.call || *event.call == *other.call)) {
        return false;
      }
    }
    return true;
  }

  std::string describe_difference(const std::string& name) const {
    Py_ssize_t before = 0;
    for (size_t i = 0; i < at_; ++i) before += log_.events[i].op != nullptr;
    const char* expected = nullptr;
    for (size_t i = at_; i < log_.events.size() && !expected; ++i) {
      const Op* op = log_.events[i].op;
      if (op && op != &end_of_forward) expected = op->name.c_str();
    }
    return text(texts.difference, "nzs", before, expected, name.c_str());
  }

  [[noreturn]] void fail(const char* why, const std::string& op) const {
    throw std::runtime_error(
        text(texts.failure, "ssss", log_.region.c_str(), difference.c_str(), why, op.c_str()));
  }

  template <typename... A>
  static std::string text(PyObject* function, const char* format, A... arguments) {
    const WithGil gil;
    const Ref result = owned(PyObject_CallFunction(function, format, arguments...));
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(result.get(), &size);
    if (!text) throw PythonError();
    return std::string(text, static_cast<size_t>(size));
  }

  Log& log_;
  size_t at_ = 0;
  bool in_step_ = true;
  int64_t last_used_ = -1;
};

}  // namespace storage_ops
