// A region in the usual case: its arguments are plain tensors, no mode is active, and a recompute
// finds the state that the forward found. Its forward and its recompute need no Python code besides
// the function's own.
//
// storage_ops/checkpoint/region/region.py has the region in Python, for every case. As soon as
// something is unusual, the function `make` creates that one from the parts of this one, and it
// decides everything from then on.
#include "call_in.h"
#include "saved_results.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <vector>

namespace storage_ops {
namespace {

// The Python functions that `setup_regions` got as arguments.
struct Functions {
  PyObject *make, *explain, *check, *forget_hooks, *group, *is_disabled, *functional;
};

Functions functions_of_python;

struct PlainRegion {
  // Freed after the backward that cannot be followed by another.
  Ref fn, inputs, snapshot, contexts, facts, attention;
  Ref options, name, serial, saved;
  Ref region;      // the region in Python, if there is one
  Ref recomputed;  // of the backward pass `task`
  int task = -1;
  bool stops = false, checks = false, is_running = false;
  std::recursive_mutex mutex;

  void free_call() {
    for (Ref* part : {&fn, &inputs, &snapshot, &contexts, &facts, &attention}) *part = Ref();
  }
};

using Shared = std::shared_ptr<PlainRegion>;

PyObject* or_none(const Ref& object) { return object ? object.get() : Py_None; }

// Returns the region in Python.
PyObject* region_of(PyObject* self) {
  PlainRegion& plain = *data_of<Shared>(self);
  if (!plain.region) {
    const Ref parts = owned(PyTuple_Pack(
        12, or_none(plain.fn), plain.options.get(), plain.name.get(), plain.serial.get(),
        or_none(plain.contexts), or_none(plain.inputs), or_none(plain.snapshot),
        or_none(plain.facts), or_none(plain.attention), plain.saved.get(),
        plain.is_running ? Py_True : Py_False, or_none(plain.recomputed)));
    const Ref task(PyLong_FromLong(plain.task));
    plain.region = owned(
        PyObject_CallFunctionObjArgs(functions_of_python.make, parts.get(), task.get(), nullptr));
  }
  return plain.region.get();
}

Ref call_method(PyObject* object, const char* name, PyObject* argument = nullptr) {
  const Ref method = owned(PyObject_GetAttrString(object, name));
  return owned(PyObject_CallFunctionObjArgs(method.get(), argument, nullptr));
}

PyObject* new_region(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *fn, *inputs, *snapshot, *facts, *attention, *contexts, *options, *name, *serial;
    int stops, checks;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOpp", &fn, &inputs, &snapshot, &facts, &attention,
                          &contexts, &options, &name, &serial, &stops, &checks)) {
      return nullptr;
    }
    Shared* shared = nullptr;
    Ref object = owned(make(type, shared));
    *shared = std::make_shared<PlainRegion>();
    PlainRegion& plain = **shared;
    plain.fn = Ref::to(fn);
    plain.inputs = Ref::to(inputs);
    plain.snapshot = Ref::to(snapshot);
    plain.facts = Ref::to(facts);
    plain.attention = Ref::to(attention);
    plain.contexts = Ref::to(contexts);
    plain.options = Ref::to(options);
    plain.name = Ref::to(name);
    plain.serial = Ref::to(serial);
    plain.saved = owned(new_saved_tensors());
    plain.stops = stops != 0;
    plain.checks = checks != 0;
    return object.release();
  });
}

// ---- the forward ------------------------------------------------------------------------------

// Called before a tensor is saved that another region may have produced.
PyObject* note(PyObject* self, PyObject* t) {
  return guarded([&] { return call_method(region_of(self), "_note_saved", t).release(); });
}

// Called if the region must decide what a saved tensor is.
PyObject* read(PyObject* self, PyObject* index) {
  return guarded([&] { return call_method(region_of(self), "_unpack", index).release(); });
}

PyMethodDef note_def{"note", note, METH_O, nullptr};
PyMethodDef read_def{"read", read, METH_O, nullptr};

std::vector<Ref> with_first(Ref first, PyObject* contexts, Py_ssize_t begin, Py_ssize_t end) {
  std::vector<Ref> all;
  all.push_back(std::move(first));
  for (Py_ssize_t i = begin; i < end; ++i) all.push_back(Ref::to(PyTuple_GetItem(contexts, i)));
  return all;
}

// forward(args): runs the function; returns what it returns.
PyObject* forward(PyObject* self, PyObject* args) {
  return guarded([&] {
    PlainRegion& plain = *data_of<Shared>(self);
    const Ref noting = owned(PyCFunction_NewEx(&note_def, self, nullptr));
    const Ref reading = owned(PyCFunction_NewEx(&read_def, self, nullptr));
    const Ref pack = pack_hook(plain.saved.get(), noting.get(), false);
    const Ref unpack = unpack_hook(plain.saved.get(), reading.get());
    Ref hooks = owned(hooks_context(pack.get(), unpack.get()));
    PyObject* own = plain.contexts.get();
    const auto contexts =
        with_first(std::move(hooks), own, 0, std::min<Py_ssize_t>(PyTuple_Size(own), 1));
    plain.is_running = true;
    Ref outputs = owned(call_in(contexts, plain.fn.get(), args, nullptr));
    if (plain.region || !is_unchanged(plain.snapshot.get())) {
      call_method(region_of(self), "finish");
    }
    plain.is_running = false;
    finish_saved_tensors(plain.saved.get());
    return outputs.release();
  });
}

// ---- the backward -----------------------------------------------------------------------------

// Locks a mutex. Other threads get the GIL while this one waits.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    PyThreadState* thread = PyEval_SaveThread();
    mutex_.lock();
    PyEval_RestoreThread(thread);
  }
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

// Removes the hooks that a recompute registers on its inputs.
class Hooked {
 public:
  explicit Hooked(PyObject* tensors) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
      PyObject* t = PyTuple_GetItem(tensors, i);
      if (tensor_of(impl_of(t)).requires_grad()) before_.push_back({Ref::to(t), number(t)});
    }
  }

  void forget() {
    for (const auto& [t, before] : before_) {
      if (number(t.get()) <= before) continue;
      const Ref count(PyLong_FromSsize_t(before));
      owned(PyObject_CallFunctionObjArgs(functions_of_python.forget_hooks, t.get(), count.get(),
                                         nullptr));
    }
  }

 private:
  static Py_ssize_t number(PyObject* t) {
    static PyObject* const attribute = PyUnicode_InternFromString("_backward_hooks");
    const Ref hooks = owned(PyObject_GetAttr(t, attribute));
    return hooks.get() == Py_None ? 0 : PyObject_Size(hooks.get());
  }

  std::vector<std::pair<Ref, Py_ssize_t>> before_;
};

// The Python error that is set. It is dropped if it is not restored.
class Error {
 public:
  Error() {
    PyObject* parts[3];
    PyErr_Fetch(&parts[0], &parts[1], &parts[2]);
    PyErr_NormalizeException(&parts[0], &parts[1], &parts[2]);
    for (int i = 0; i < 3; ++i) parts_[i] = Ref(parts[i]);
  }
  PyObject* value() const { return parts_[1].get(); }
  bool is_a(PyObject* kind) const {
    return PyErr_GivenExceptionMatches(parts_[0].get(), kind) != 0;
  }
  [[noreturn]] void raise() {
    PyErr_Restore(parts_[0].release(), parts_[1].release(), parts_[2].release());
    throw PythonError();
  }

 private:
  Ref parts_[3];
};

bool is_off() {
  const Ref off = owned(PyObject_CallFunctionObjArgs(functions_of_python.is_disabled, nullptr));
  return off.get() == Py_True;
}

bool has_attention(PyObject* before) {
  static PyObject* const name = PyUnicode_InternFromString("scaled_dot_product_attention");
  return owned(PyObject_GetAttr(functions_of_python.functional, name)).get() == before;
}

// Runs the function once more, and keeps the tensors that it saves. Returns false, before that, if
// the state or an argument has changed.
bool repeat(PlainRegion& plain) {
  if (!is_current(plain.snapshot.get()) || !has_attention(plain.attention.get()) || is_off()) {
    return false;
  }
  const Ref args = owned(inputs_again(plain.inputs.get()));
  if (args.get() == Py_None) return false;
  Hooked hooked(args.get());
  Ref again = owned(recompute_of(plain.saved.get(), plain.stops));
  auto& recomputed = data_of<Recomputed>(again.get());
  std::vector<Ref> contexts;
  {
    const Ref pack = owned(pack_hook_again(again.get()));
    const Ref unpack = owned(PyObject_GetAttrString(again.get(), "read"));
    Ref hooks = owned(hooks_context(pack.get(), unpack.get()));
    PyObject* own = plain.contexts.get();
    contexts = with_first(std::move(hooks), own, 1, PyTuple_Size(own));
    contexts.insert(contexts.begin(), Ref::to(plain.snapshot.get()));
  }
  const Ref result(call_in(contexts, plain.fn.get(), args.get(), nullptr));
  std::optional<Error> error;
  if (!result) error.emplace();
  put_back(plain.snapshot.get());
  owned(drop_graphs(again.get()));
  hooked.forget();
  // TorchScript turns every exception into a RuntimeError.
  if (error && !recomputed.stopped && !error->is_a(names.stop)) {
    owned(PyObject_CallFunctionObjArgs(functions_of_python.explain, plain.name.get(),
                                       plain.fn.get(), error->value(), nullptr));
    error->raise();
  }
  if (error && !error->is_a(names.stop) && !error->is_a(PyExc_RuntimeError)) error->raise();
  if (plain.checks && !all_fit(recomputed)) {
    owned(PyObject_CallFunctionObjArgs(functions_of_python.check, again.get(), plain.name.get(),
                                       plain.contexts.get(), nullptr));
  }
  plain.recomputed = std::move(again);
  return true;
}

void end_backward(PlainRegion& plain, bool retained) {
  if (plain.region) {
    call_method(plain.region.get(), "end_backward", retained ? Py_True : Py_False);
  }
  plain.task = -1;
  plain.recomputed = Ref();
  const bool is_released = data_of<Saved>(plain.saved.get()).unreleased == 0;
  if (!retained && is_released && !plain.is_running) plain.free_call();
}

void call_at_end(const Shared& shared) {
  const std::weak_ptr<PlainRegion> weak = shared;
  const bool retained = torch::autograd::get_current_graph_task_keep_graph();
  torch_engine().queue_callback([weak, retained] {
    const WithGil gil;
    if (const Shared alive = weak.lock()) {
      try {
        end_backward(*alive, retained);
      } catch (const PythonError&) {
        throw std::runtime_error(message_of_python());
      }
    }
  });
}

bool is_in_group() {
  if (functions_of_python.group == Py_None) return false;
  const Ref group = owned(PyObject_CallFunctionObjArgs(functions_of_python.group, nullptr));
  return group.get() != Py_None;
}

// This node saves noise that its kernel writes only afterwards.
bool is_unwritten(const Recomputed& recomputed, size_t index) {
  if (index + 2 != recomputed.stopped) return false;
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == "RreluWithNoiseBackward0";
}

}  // namespace

at::Tensor read_natively(PyObject* unpack_target, size_t index) {
  if (!PyCFunction_Check(unpack_target) || PyCFunction_GetFunction(unpack_target) != read)
    return {};
  const Shared shared = data_of<Shared>(PyCFunction_GetSelf(unpack_target));
  PlainRegion& plain = *shared;
  const Lock lock(plain.mutex);
  const int task = torch::autograd::get_current_graph_task_id();
  if (plain.region || plain.is_running || !plain.fn || task == -1 || is_in_group()) return {};
  if (!plain.recomputed || plain.task != task) {
    plain.recomputed = Ref();
    if (!repeat(plain)) return {};
    plain.task = task;
    begin_task(plain.recomputed.get(), task);
    call_at_end(shared);
  }
  auto& recomputed = data_of<Recomputed>(plain.recomputed.get());
  Saved& saved = recomputed.saved();
  if (is_unwritten(recomputed, index)) return {};
  Kept kept;
  {
    const std::lock_guard<std::mutex> guard(saved.mutex);
    if (index >= recomputed.tensors.size() || !recomputed.tensors[index].is_there()) return {};
    if (!torch::autograd::get_current_graph_task_keep_graph()) saved.release(index);
    kept = recomputed.take(index);
  }
  return kept.tensor.defined() ? kept.tensor : tensor_of(impl_of(kept.by_python.get()));
}

namespace {

PyObject* get_region(PyObject* self, PyObject*) {
  return guarded([&] { return Ref::to(region_of(self)).release(); });
}

PyMethodDef methods[] = {{"forward", forward, METH_O, nullptr},
                         {"region", get_region, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

// setup_regions(make, explain, check, forget_hooks, group, is_disabled, functional)
PyObject* setup_regions(PyObject*, PyObject* arguments) {
  Functions all;
  if (!PyArg_ParseTuple(arguments, "OOOOOOO", &all.make, &all.explain, &all.check,
                        &all.forget_hooks, &all.group, &all.is_disabled, &all.functional)) {
    return nullptr;
  }
  Py_INCREF(arguments);  // never released, so `functions_of_python` stays valid
  functions_of_python = all;
  return none();
}

PyMethodDef functions[] = {{"setup_regions", setup_regions, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_plain_region(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_region)},
                         {Py_tp_dealloc, slot(destroy<Shared>)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  return add_type<Shared>(module, "storage_ops._saved_tensors.PlainRegion", slots) &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace storage_ops
