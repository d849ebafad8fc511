// The forward and the recompute of a region in the usual case (plain_region.h).
#include "plain_region.h"

#include "call_in.h"
#include "kept_inputs.h"
#include "saved_results.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace storage_ops {
namespace {

PyObject* or_none(const Ref& object) { return object ? object.get() : Py_None; }

// A tensor that a consumer has saved may be the last owner of a region.
void free_region(PlainRegion* plain) {
  if (!Py_IsInitialized()) return;  // the process ends
  const WithGil gil;
  delete plain;
}

PlainRegion& region_in(PyObject* self) { return *data_of<SharedRegion>(self); }

PyObject* new_region(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *fn, *inputs, *snapshot, *facts, *attention, *contexts, *options, *name, *serial;
    int stops, checks, checksums;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOppp", &fn, &inputs, &snapshot, &facts, &attention,
                          &contexts, &options, &name, &serial, &stops, &checks, &checksums)) {
      return nullptr;
    }
    SharedRegion* shared = nullptr;
    Ref object = owned(make(type, shared));
    *shared = SharedRegion(new PlainRegion, free_region);
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
    plain.saved = owned(new_saved_tensors(checksums != 0));
    plain.stops = stops != 0;
    plain.checks = checks != 0;
    return object.release();
  });
}

// ---- the forward ------------------------------------------------------------------------------

// Called before a tensor is saved that another region may have produced.
PyObject* note(PyObject* self, PyObject* t) {
  return guarded(
      [&] { return call_method(region_of(region_in(self)), "_note_saved", t).release(); });
}

// Called if the region must decide what a saved tensor is.
PyObject* read(PyObject* self, PyObject* index) {
  return guarded(
      [&] { return call_method(region_of(region_in(self)), "_unpack", index).release(); });
}

PyMethodDef note_def{"note", note, METH_O, nullptr};
PyMethodDef read_def{"read", read, METH_O, nullptr};

void add_some(std::vector<Ref>& contexts, PyObject* tuple, Py_ssize_t begin, Py_ssize_t end) {
  for (Py_ssize_t i = begin; i < end; ++i) {
    contexts.push_back(Ref::to(PyTuple_GetItem(tuple, i)));
  }
}

// forward(args, kwargs): runs the function; returns what it returns.
PyObject* forward(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *args, *kwargs;
    if (!PyArg_ParseTuple(arguments, "OO", &args, &kwargs)) return nullptr;
    return run_forward(self, args, kwargs).release();
  });
}

long long number_issued() {
  if (PyObject_Size(functions.groups) == 0) return 0;
  return PyLong_AsLongLong(
      owned(PyObject_CallFunctionObjArgs(functions.number_issued, nullptr)).get());
}

// forward_and_discard(args, kwargs, consumer): runs the function and calls the consumer with its
// output, which is then discarded. Returns what the consumer returns, and None. If the output is
// not a usual one, the consumer is not called. Then the result is None and a list with the output,
// the number of the region's first node, and the number of collectives before.
PyObject* forward_and_discard(PyObject* self, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *args, *kwargs, *consumer;
    if (!PyArg_ParseTuple(arguments, "OOO", &args, &kwargs, &consumer)) return nullptr;
    const SharedRegion shared = data_of<SharedRegion>(self);
    const uint64_t first_node = at::sequence_number::peek();
    const long long before = number_issued();
    Ref hidden = run_forward(self, args, kwargs);
    if (!shared->region && number_issued() == before) {
      Ref outputs = call_consumer(shared, hidden, consumer, first_node);
      if (outputs) return Py_BuildValue("(NO)", outputs.release(), Py_None);
    }
    return Py_BuildValue("(O[NKL])", Py_None, hidden.release(),
                         static_cast<unsigned long long>(first_node), before);
  });
}

// ---- the backward -----------------------------------------------------------------------------

// Removes the hooks that a recompute registers on its inputs.
class Hooked {
 public:
  explicit Hooked(std::vector<Ref> tensors) {
    for (Ref& t : tensors) {
      const Py_ssize_t before = number(t.get());
      before_.emplace_back(std::move(t), before);
    }
  }

  void forget() {
    for (const auto& [t, before] : before_) {
      if (number(t.get()) <= before) continue;
      const Ref count(PyLong_FromSsize_t(before));
      owned(PyObject_CallFunctionObjArgs(functions.forget_hooks, t.get(), count.get(), nullptr));
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

bool is_as_before(PyObject* attention) {
  const Ref same = owned(PyObject_CallFunctionObjArgs(functions.is_as_before, attention, nullptr));
  return same.get() == Py_True;
}

// Runs the function once more, and binds its output. Returns the object with the tensors that it
// saves. Returns null to let Python decide, because the state, an argument or the output has
// changed.
Ref repeat(PlainRegion& plain) {
  if (!is_current(plain.snapshot.get()) || !is_as_before(plain.attention.get())) return {};
  const bool discarded = plain.output && plain.output->is_discarded;
  auto arguments = inputs_again(plain.inputs.get());
  if (!arguments) return {};
  // While the function runs, the end of a backward in another thread may free those of the region.
  const Ref fn = Ref::to(plain.fn.get()), snapshot = Ref::to(plain.snapshot.get()),
            own = Ref::to(plain.contexts.get());
  Hooked hooked(std::move(arguments->needing_grad));
  Ref again = owned(recompute_of(plain.saved.get(), plain.stops && !discarded));
  auto& recomputed = data_of<Recomputed>(again.get());
  std::vector<Ref> contexts;
  {
    const Ref pack = owned(pack_hook_again(again.get()));
    const Ref unpack = owned(PyObject_GetAttrString(again.get(), "read"));
    contexts.push_back(Ref::to(snapshot.get()));
    contexts.push_back(owned(hooks_context(pack.get(), unpack.get())));
    add_some(contexts, own.get(), 1, PyTuple_Size(own.get()));
  }
  const Ref result(call_in(contexts, fn.get(), arguments->args.get(), arguments->kwargs.get()));
  std::optional<Error> error;
  if (!result) error.emplace();
  put_back(snapshot.get());
  owned(drop_graphs(again.get()));
  hooked.forget();
  // TorchScript turns every exception into a RuntimeError.
  if (error && !recomputed.stopped && !error->is_a(names.stop)) {
    owned(PyObject_CallFunctionObjArgs(functions.explain, plain.name.get(), fn.get(),
                                       error->value(), nullptr));
    error->raise();
  }
  if (error && !error->is_a(names.stop) && !error->is_a(PyExc_RuntimeError)) error->raise();
  if (plain.checks && !all_fit(recomputed)) {
    owned(PyObject_CallFunctionObjArgs(functions.check, again.get(), plain.name.get(), own.get(),
                                       nullptr));
  }
  if (discarded && plain.output && !bind(plain, result.get())) return {};
  return again;
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

void call_at_end(const SharedRegion& shared) {
  const std::weak_ptr<PlainRegion> weak = shared;
  const bool retained = torch::autograd::get_current_graph_task_keep_graph();
  torch_engine().queue_callback([weak, retained] {
    const WithGil gil;
    if (const SharedRegion alive = weak.lock()) {
      try {
        end_backward(*alive, retained);
      } catch (const PythonError&) {
        throw_python_error();
      }
    }
  });
}

bool is_in_group() {
  if (functions.group == Py_None) return false;
  const Ref group = owned(PyObject_CallFunctionObjArgs(functions.group, nullptr));
  return group.get() != Py_None;
}

// This node saves noise that its kernel writes only afterwards.
bool is_unwritten(const Recomputed& recomputed, size_t index) {
  if (index + 2 != recomputed.stopped) return false;
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == "RreluWithNoiseBackward0";
}

}  // namespace

PlainRegion::~PlainRegion() { forget_output(*this); }

PyObject* region_of(PlainRegion& plain) {
  const Lock lock(plain.mutex);
  if (!plain.region) {
    const Ref task(PyLong_FromLong(plain.task)), output = parts_of_output(plain);
    const Ref parts =
        owned(PyTuple_Pack(14, or_none(plain.fn), plain.options.get(), plain.name.get(),
                           plain.serial.get(), or_none(plain.contexts), or_none(plain.inputs),
                           or_none(plain.snapshot), or_none(plain.facts), or_none(plain.attention),
                           plain.saved.get(), plain.is_running ? Py_True : Py_False,
                           or_none(plain.recomputed), task.get(), output.get()));
    plain.region = owned(PyObject_CallObject(functions.make, parts.get()));
    plain.output.reset();  // the region in Python has it
  }
  return plain.region.get();
}

Ref call_method(PyObject* object, const char* name, PyObject* argument) {
  const Ref method = owned(PyObject_GetAttrString(object, name));
  return owned(PyObject_CallFunctionObjArgs(method.get(), argument, nullptr));
}

Ref run_forward(PyObject* self, PyObject* args, PyObject* kwargs) {
  PlainRegion& plain = region_in(self);
  const Ref noting = owned(PyCFunction_NewEx(&note_def, self, nullptr));
  const Ref reading = owned(PyCFunction_NewEx(&read_def, self, nullptr));
  const Ref pack = pack_hook(plain.saved.get(), noting.get(), false);
  const Ref unpack = unpack_hook(plain.saved.get(), reading.get());
  std::vector<Ref> contexts;
  contexts.push_back(owned(hooks_context(pack.get(), unpack.get())));
  PyObject* own = plain.contexts.get();
  add_some(contexts, own, 0, std::min<Py_ssize_t>(PyTuple_Size(own), 1));
  plain.is_running = true;
  Ref outputs(call_in(contexts, plain.fn.get(), args, kwargs));
  if (!outputs) {
    Error error;
    if (error.is_a(PyExc_RuntimeError)) {
      owned(PyObject_CallFunctionObjArgs(functions.explain_transform, plain.name.get(),
                                         error.value(), nullptr));
    }
    error.raise();
  }
  finish_snapshot(plain.snapshot.get());
  if (plain.region || !is_unchanged(plain.snapshot.get())) call_method(region_of(plain), "finish");
  plain.is_running = false;
  finish_saved_tensors(plain.saved.get());
  return outputs;
}

Ref recompute_in_task(const SharedRegion& shared) {
  PlainRegion& plain = *shared;
  const int task = torch::autograd::get_current_graph_task_id();
  if (plain.region || plain.is_running || !plain.fn || task == -1 || is_in_group()) return {};
  if (plain.recomputed && plain.task == task) return Ref::to(plain.recomputed.get());
  plain.recomputed = Ref();
  Ref again = repeat(plain);
  if (!again) return {};
  plain.recomputed = Ref::to(again.get());
  plain.task = task;
  begin_task(again.get(), task);
  call_at_end(shared);
  return again;
}

at::Tensor read_natively(PyObject* unpack_target, size_t index) {
  if (!PyCFunction_Check(unpack_target) || PyCFunction_GetFunction(unpack_target) != read) {
    return {};
  }
  const SharedRegion shared = data_of<SharedRegion>(PyCFunction_GetSelf(unpack_target));
  const Lock lock(shared->mutex);
  const Ref again = recompute_in_task(shared);
  if (!again) return {};
  auto& recomputed = data_of<Recomputed>(again.get());
  if (is_unwritten(recomputed, index)) return {};
  Kept kept;
  {
    Saved& saved = recomputed.saved();
    const std::lock_guard<std::mutex> guard(saved.mutex);
    if (index >= recomputed.tensors.size() || !recomputed.tensors[index].is_there()) return {};
    if (!torch::autograd::get_current_graph_task_keep_graph()) saved.release(index);
    kept = recomputed.take(index);
  }
  return kept.tensor.defined() ? kept.tensor : tensor_of(impl_of(kept.by_python.get()));
}

namespace {

PyObject* get_region(PyObject* self, PyObject*) {
  return guarded([&] { return Ref::to(region_of(region_in(self))).release(); });
}

PyMethodDef methods[] = {{"forward", forward, METH_VARARGS, nullptr},
                         {"forward_and_discard", forward_and_discard, METH_VARARGS, nullptr},
                         {"region", get_region, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

// setup_regions(make, explain_transform, explain, check, forget_hooks, group, is_as_before,
//               number_issued, groups, discard, bind, finish, pack, unpack, packed, consumers,
//               set_dynamo)
PyObject* setup_regions(PyObject*, PyObject* arguments) {
  RegionFunctions all;
  PyObject** const places[] = {&all.make,         &all.explain_transform,
                               &all.explain,      &all.check,
                               &all.forget_hooks, &all.group,
                               &all.is_as_before, &all.number_issued,
                               &all.groups,       &all.discard,
                               &all.bind,         &all.finish,
                               &all.pack,         &all.unpack,
                               &all.packed,       &all.consumers,
                               &all.set_dynamo};
  Py_ssize_t at = 0;
  for (PyObject** place : places) {
    *place = PyTuple_GetItem(arguments, at++);
    if (!*place) return nullptr;
  }
  Py_INCREF(arguments);  // never released, so `functions` stays valid
  functions = all;
  return none();
}

PyMethodDef module_functions[] = {{"setup_regions", setup_regions, METH_VARARGS, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_plain_region(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_region)},
                         {Py_tp_dealloc, slot(destroy<SharedRegion>)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  return add_type<SharedRegion>(module, "storage_ops._saved_tensors.PlainRegion", slots) &&
         PyModule_AddFunctions(module, module_functions) == 0;
}

}  // namespace storage_ops
