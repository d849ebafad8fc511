// The hooks of a region on torch's stack of saved-tensor hooks, without the GIL and without a
// Python object for each tensor.
//
// The stack has callables of Python (saved_tensors.cpp), so that every other user of the stack sees
// ordinary hooks. torch asks its autograd engine for the hooks of each tensor that it saves. While
// a region runs in a thread, `RegionEngine` answers instead: if the callables on top of the stack
// are the region's, the hooks are objects of C++. For everything else it calls torch's engine.
// Python's hooks are also used for tensors that only Python can describe, and to raise Python
// errors.
#include "plain_region.h"
#include "saved_results.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <stdexcept>

// Exported by torch's Python library. Its header does not compile with the stable ABI of CPython.
c10::impl::PyInterpreter* getPyInterpreter();

namespace storage_ops {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;
using NodePointer = decltype(torch::autograd::Edge::function);  // another class before torch 2.12
using Stack = at::impl::SavedTensorDefaultHooksTLS;

Engine* engine_of_torch = nullptr;  // the same object as long as the process lives

// The two callables of a region. The hooks of its tensors keep them alive.
struct Callables {
  Ref pack, unpack;
  PackHook hook;
  WeakRegion consumed;  // the region whose output a consumer gets, if these are its hooks

  Callables(PyObject* p, PyObject* u)
      : pack(Ref::to(p)), unpack(Ref::to(u)), hook(pack_hook_of(p)), consumed(consumed_region(p)) {}

  // Returns a tensor of a region that does not need Python, or an undefined tensor.
  at::Tensor read_natively(size_t index) const {
    if (hook.is_recompute || !PyCFunction_Check(unpack.get())) return {};
    return storage_ops::read_natively(PyTuple_GetItem(PyCFunction_GetSelf(unpack.get()), 1), index);
  }

  // Returns hooks for a tensor.
  std::unique_ptr<SavedVariableHooks> hooks(const std::shared_ptr<const Callables>& shared) const;

  ~Callables() {
    if (!Py_IsInitialized()) {  // the process ends
      pack.release();
      unpack.release();
      return;
    }
    const WithGil gil;
    pack = Ref();
    unpack = Ref();
  }
};

using Shared = std::shared_ptr<const Callables>;

// The context manager of a region's hooks.
struct Context {
  Shared callables;
  bool is_entered = false;
  Context* outer = nullptr;
};

thread_local Context* running = nullptr;  // of the innermost region that runs in this thread

c10::SafePyObject safe(PyObject* owned) { return {owned, getPyInterpreter()}; }

PyObject* same(PyObject* self, PyObject*) { return Ref::to(self).release(); }
PyMethodDef same_def{"same", same, METH_O, "Return the object that this function is bound to."};

PyObject* raise(PyObject* self, PyObject*) {
  PyObject* error[3];  // class, value and traceback
  for (Py_ssize_t i = 0; i < 3; ++i) {
    PyObject* part = PyTuple_GetItem(self, i);
    error[i] = part == Py_None ? nullptr : Ref::to(part).release();
  }
  PyErr_Restore(error[0], error[1], error[2]);
  return nullptr;
}
PyMethodDef raise_def{"raise", raise, METH_O, "Raise the error that this function is bound to."};

// Returns a function that raises the error that is set now.
Ref fetch_error() {
  PyObject* error[3];
  PyErr_Fetch(&error[0], &error[1], &error[2]);
  const Ref parts(PyTuple_New(3));
  for (Py_ssize_t i = 0; i < 3; ++i) {
    PyTuple_SetItem(parts.get(), i, error[i] ? error[i] : none());
  }
  return Ref(PyCFunction_NewEx(&raise_def, parts.get(), nullptr));
}

// Does not need the GIL.
bool may_have_producer(const at::Tensor& t) {
  if (PyDict_Size(names.producers) == 0) return false;
  const WithGil gil;
  return has_producer(t);
}

// The hooks of one tensor.
class Hooks final : public SavedVariableHooks {
 public:
  explicit Hooks(Shared callables) : callables_(std::move(callables)) {}

  void call_pack_hook(const at::Tensor& t) override {
    const PackHook& hook = callables_->hook;
    Description description;
    // The last tensor of a recompute raises Python's exception of early stop.
    const bool by_python = !is_plain(t.unsafeGetTensorImpl()) || !has_plain_class(t) ||
                           (hook.is_recompute ? hook.recomputed().stops_now()
                                              : hook.notes_all() || may_have_producer(t)) ||
                           !describe_plain(t, description);
    if (by_python) {
      python_ = hooks_of_torch();
      return python_->call_pack_hook(t);
    }
    try {
      note_saved_tensor(hook.self, true);
    } catch (const PythonError&) {
      throw_python_error();
    }
    if (hook.checksums()) description.checksum = checksum_of(t);
    if (hook.is_recompute) {
      Kept kept;
      kept.tensor = t;
      index_ = hook.recomputed().add(std::move(description), std::move(kept));
    } else {
      index_ = hook.saved().add(std::move(description));
    }
  }

  at::Tensor call_unpack_hook() override {
    if (python_) return python_->call_unpack_hook();
    const PackHook& hook = callables_->hook;
    Kept kept = hook.is_recompute ? Kept() : hook.saved().take_in_task(index_);
    if (kept.tensor.defined()) return kept.tensor;
    if (kept.by_python) {
      const WithGil gil;
      const Ref object = std::move(kept.by_python);
      return tensor_of(impl_of(object.get()));
    }
    return read_of_region();
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    if (python_) return python_->retrieve_unpack_hook_data();
    const WithGil gil;
    const Ref number(PyLong_FromSize_t(index_));
    return hooks_of_python(number, callables_->unpack.get())->retrieve_unpack_hook_data();
  }

 private:
  // Lets the region decide.
  at::Tensor read_of_region() const {
    const WithGil gil;
    try {
      const WithoutDynamo eager;
      const at::Tensor read = callables_->read_natively(index_);
      if (read.defined()) return read;
      const Ref number(PyLong_FromSize_t(index_));
      const Ref t =
          owned(PyObject_CallFunctionObjArgs(callables_->unpack.get(), number.get(), nullptr));
      return tensor_of(impl_of(t.get()));
    } catch (const PythonError&) {
      throw_python_error();
    }
  }

  static bool has_plain_class(const at::Tensor& t) {
    PyObject* object = object_of(t);
    return !object || has_class(object, names.tensor) || has_class(object, names.parameter);
  }

  Shared callables_;
  std::unique_ptr<SavedVariableHooks> python_;  // torch's, if it does the work
  size_t index_ = 0;
};

std::unique_ptr<SavedVariableHooks> Callables::hooks(const Shared& shared) const {
  if (SharedRegion region = consumed.lock()) return consumer_hooks(std::move(region));
  return std::make_unique<Hooks>(shared);
}

// Answers for torch's engine in a thread in which a region runs.
// Functions of `Engine` that are not virtual use state of the thread, and not of the engine.
class RegionEngine final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const Stack& hooks = at::SavedTensorDefaultHooks::get_tls_state();
    const bool is_ours =
        running && !hooks.is_tracing && !hooks.stack.empty() &&
        hooks.stack.top().first.ptr(getPyInterpreter()) == running->callables->pack.get();
    if (is_ours) return running->callables->hooks(running->callables);
    return hooks_of_torch();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return engine_of_torch->execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                    outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, NodePointer graph_root,
      torch::autograd::InputBuffer&& input_buffer) override {
    return engine_of_torch->execute_with_graph_task(graph_task, std::move(graph_root),
                                                    std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine_of_torch->make_anomaly_metadata();
  }
};

Engine& engine() {
  static auto* of_regions = new RegionEngine;  // a backward may run while the process ends
  return running ? *of_regions : *engine_of_torch;
}

// ---- the context manager ------------------------------------------------------------------------

PyTypeObject* context_type = nullptr;

PyObject* new_context(PyTypeObject*, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *pack, *unpack;
    if (!PyArg_ParseTuple(arguments, "OO", &pack, &unpack)) return nullptr;
    return hooks_context(pack, unpack);
  });
}

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& context = data_of<Context>(self);
    if (!engine_of_torch) {
      engine_of_torch = &Engine::get_default_engine();
      torch::autograd::set_default_engine_stub(engine);
    }
    const Callables& callables = *context.callables;
    at::SavedTensorDefaultHooks::lazy_initialize();
    at::SavedTensorDefaultHooks::push_hooks(safe(Ref::to(callables.pack.get()).release()),
                                            safe(Ref::to(callables.unpack.get()).release()));
    context.outer = std::exchange(running, &context);
    context.is_entered = true;
    return Ref::to(self).release();
  });
}

PyObject* leave(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& context = data_of<Context>(self);
    if (std::exchange(context.is_entered, false)) {
      running = context.outer;
      at::SavedTensorDefaultHooks::pop_hooks();
    }
    return none();
  });
}

void destroy_context(PyObject* self) {
  Py_XDECREF(leave(self, nullptr));
  destroy<Context>(self);
}

PyMethodDef methods[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                         {"__exit__", leave, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

}  // namespace

std::unique_ptr<SavedVariableHooks> hooks_of_torch() {
  if (!engine_of_torch) return Engine::get_default_engine().get_default_saved_variable_hooks();
  return engine_of_torch->get_default_saved_variable_hooks();
}

std::unique_ptr<SavedVariableHooks> hooks_of_python(const Ref& packed, PyObject* unpack) {
  Stack only;
  only.stack.emplace(safe(PyCFunction_NewEx(&same_def, packed.get(), nullptr)),
                     safe(Ref::to(unpack).release()));
  const Stack before = at::SavedTensorDefaultHooks::get_tls_state();
  at::SavedTensorDefaultHooks::set_tls_state(only);
  auto hooks = hooks_of_torch();
  at::SavedTensorDefaultHooks::set_tls_state(before);
  hooks->call_pack_hook(at::Tensor());
  return hooks;
}

// torch's hooks throw the exception, because its class does not compile with the stable ABI of
// CPython.
void throw_python_error() {
  const WithGil gil;
  const Ref nothing(none());
  const Ref raise_error = fetch_error();
  hooks_of_python(nothing, raise_error.get())->call_unpack_hook();
  throw std::logic_error("A function that raises has returned.");
}

PyObject* hooks_context(PyObject* pack, PyObject* unpack) {
  Context* context = nullptr;
  Ref object = owned(make(context_type, context));
  context->callables = std::make_shared<const Callables>(pack, unpack);
  return object.release();
}

torch::autograd::Engine& torch_engine() { return *engine_of_torch; }

bool add_default_hooks(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_context)},
                         {Py_tp_dealloc, slot(destroy_context)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  context_type = add_type<Context>(module, "storage_ops._saved_tensors.Hooks", slots);
  return context_type != nullptr;
}

}  // namespace storage_ops
