// Saves the results of the ops of a selective policy in a region, without Python code for each op.
// storage_ops/checkpoint/selective/selective.py has the same two contexts in Python.
#include "saved_results.h"

#include "op_callback.h"
#include "policy_kernels.h"
#include "saved_tensors.h"
// Python.h, which they include, comes first.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/mm_ops.h>

namespace storage_ops {
namespace {

PyTypeObject *policy_type = nullptr, *context_type = nullptr;

struct Results {
  Store store;
};

// The context manager of a region's forward or recompute.
struct Context {
  Ref results;
  bool is_recompute = false, is_pushed = false;
  Frame frame;
  Ref hooks;  // report saved tensors, if the hooks of the region are Python's
  std::string difference;
};

// ---- kernels ------------------------------------------------------------------------------------

using Make = torch::CppFunction (*)(Kernel);

const std::unordered_map<std::string, Make>& typed_kernels() {
  static const std::unordered_map<std::string, Make> kernels = {
      {"aten::mm", Typed<at::_ops::mm>::make},
      {"aten::addmm", Typed<at::_ops::addmm>::make},
      {"aten::bmm", Typed<at::_ops::bmm>::make},
      {"aten::_unsafe_view", Typed<at::_ops::_unsafe_view>::make},
      {"aten::_scaled_dot_product_flash_attention",
       Typed<at::_ops::_scaled_dot_product_flash_attention>::make},
      {"aten::_scaled_dot_product_flash_attention_for_cpu",
       Typed<at::_ops::_scaled_dot_product_flash_attention_for_cpu>::make},
  };
  return kernels;
}

bool is_functional(const c10::FunctionSchema& schema) {
  const auto aliases = [](const c10::Argument& value) { return value.alias_info() != nullptr; };
  const auto &arguments = schema.arguments(), &returns = schema.returns();
  return std::none_of(arguments.begin(), arguments.end(), aliases) &&
         std::none_of(returns.begin(), returns.end(), aliases);
}

// Adds our kernel for an op. Returns false if a kernel cannot intercept the op.
bool add_kernel(Op* op, const c10::OperatorHandle& handle) {
  if (op->has_kernel) return true;
  if (op->is_composite || op->is_collective || !is_functional(handle.schema()) ||
      handle.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
    return false;
  }
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>;
  const auto colon = op->name.find("::");
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, op->name.substr(0, colon),
      std::make_optional(c10::DispatchKey::ADInplaceOrView), __FILE__, __LINE__);
  Kernel kernel(op, handle);
  const auto known = typed_kernels().find(op->name);
  library->impl(op->name.substr(colon + 2).c_str(),
                known != typed_kernels().end() ? known->second(std::move(kernel))
                                               : torch::CppFunction::makeFromBoxedFunctor(
                                                     std::make_unique<Boxed>(std::move(kernel))));
  libraries->push_back(std::move(library));
  op->has_kernel = true;
  return true;
}

std::optional<c10::OperatorHandle> handle_of(const std::string& name) {
  const auto dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
}

std::unordered_set<size_t> numbers_in(PyObject* list) {
  std::unordered_set<size_t> numbers;
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    numbers.insert(PyLong_AsSize_t(PyList_GetItem(list, i)));
  }
  return numbers;
}

// Reads a `Row` of op_sets.py. Returns the name of the op. `families` has the index of each.
std::string name_and_calls(PyObject* row, Chosen& chosen,
                           std::unordered_map<std::string, size_t>& families) {
  const char *name = nullptr, *family = nullptr;
  PyObject *named = nullptr, *saved = nullptr, *offloaded = nullptr;
  long long right = -1;
  int others = 1, offloads = 0;
  if (!PyArg_ParseTuple(row, "sLpO!psO!O!", &name, &right, &others, &PyList_Type, &named, &offloads,
                        &family, &PyList_Type, &saved, &PyList_Type, &offloaded)) {
    throw PythonError();
  }
  chosen.offloads = offloads != 0;
  chosen.right = right;
  chosen.others = others != 0;
  for (Py_ssize_t i = 0; i < PyList_Size(named); ++i) {
    PyObject* shape = PyList_GetItem(named, i);
    auto& sizes = chosen.named.emplace_back();
    for (Py_ssize_t dim = 0; dim < PyTuple_Size(shape); ++dim) {
      sizes.push_back(PyLong_AsLongLong(PyTuple_GetItem(shape, dim)));
    }
  }
  if (*family) chosen.family = families.emplace(family, families.size()).first->second;
  chosen.saved = numbers_in(saved);
  chosen.offloaded = numbers_in(offloaded);
  if (PyErr_Occurred()) throw PythonError();
  return name;
}

// policy(rows, k): returns a policy, or None if a kernel cannot intercept one of the ops.
PyObject* policy(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject* rows = nullptr;
    Py_ssize_t k = 1;
    if (!PyArg_ParseTuple(arguments, "On", &rows, &k)) return nullptr;
    Policy* policy = nullptr;
    Ref object = owned(make(policy_type, policy));
    policy->k = static_cast<size_t>(k);
    std::unordered_map<std::string, size_t> families;
    for (Py_ssize_t i = 0; i < PyList_Size(rows); ++i) {
      Chosen chosen;
      const auto handle = handle_of(name_and_calls(PyList_GetItem(rows, i), chosen, families));
      Op* op = handle ? ops().of(*handle) : nullptr;
      if (!op || !add_kernel(op, *handle)) return none();
      policy->ops.emplace(op, std::move(chosen));
    }
    // The outputs of these ops may share the storage of a saved result.
    std::vector<std::string> sharing = {"aten::_unsafe_view", "aten::unsafe_split.Tensor",
                                        "aten::unsafe_split_with_sizes"};
    {
      const std::lock_guard<std::mutex> lock(ops().mutex);
      for (const auto& [name, op] : ops().by_name) {
        if (op->is_of_library && !op->has_kernel) sharing.push_back(name);
      }
    }
    for (const std::string& name : sharing) {
      const auto handle = handle_of(name);
      if (handle) add_kernel(ops().of(*handle), *handle);
    }
    return object.release();
  });
}

PyObject* needs_python(PyObject* self, PyObject* region) {
  const char* name = PyUnicode_AsUTF8AndSize(region, nullptr);
  return name ? PyBool_FromLong(data_of<Policy>(self).needs_python(name)) : nullptr;
}

PyObject* ops_of_libraries(PyObject*, PyObject*) {
  const std::lock_guard<std::mutex> lock(ops().mutex);
  return PyLong_FromSize_t(ops().of_libraries);
}

PyObject* leave_to_python(PyObject*, PyObject*) {
  abandon_all(true);
  return none();
}

// ---- contexts -----------------------------------------------------------------------------------

thread_local at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

void push(Frame& frame) {
  if (!top_frame) {
    running_ops.clear();
    callback = at::addThreadLocalCallback(
        at::RecordFunctionCallback(op_begins, op_ends).scopes({at::RecordScope::FUNCTION}));
  }
  frame.outer = top_frame;
  top_frame = &frame;
}

void pop(Frame& frame) {
  Frame** at = &top_frame;
  while (*at && *at != &frame) at = &(*at)->outer;
  if (*at) *at = frame.outer;
  if (!top_frame && callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(std::exchange(callback, at::INVALID_CALLBACK_HANDLE));
  }
}

void note_saved_tensor(Frame& frame, bool is_plain) {
  if (!is_plain) abandon_all(true);  // only Python can see the ops of such tensors
  if (frame.is_idle()) return;
  if (!frame.cursor) {
    frame.store->log.add(nullptr);
  } else {
    frame.cursor->raise_error();
    frame.cursor->see_saved_tensor();
  }
}

PyObject* note(PyObject* self, PyObject* t) {
  return guarded([&] {
    note_saved_tensor(data_of<Context>(self).frame, plain_tensor(t).defined());
    return none();
  });
}

PyMethodDef note_def{"note", note, METH_O, "Note that autograd saves a tensor."};

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto& context = data_of<Context>(self);
    Store& store = data_of<Results>(context.results.get()).store;
    context.frame = Frame();
    context.frame.store = &store;
    if (context.is_recompute) {
      context.difference.clear();
      if (!store.log.is_complete) {
        store.is_repeating = true;
        return Ref::to(self).release();
      }
      if (store.away) owned(PyObject_CallMethod(store.away.get(), "fetch", nullptr));
      context.frame.cursor = std::make_unique<Cursor>(store.log);
    }
    const Ref hooks = owned(PyObject_CallFunctionObjArgs(texts.top_hooks, Py_False, nullptr));
    if (hooks.get() != Py_None) {
      PyObject* pack = PyTuple_GetItem(hooks.get(), 0);
      context.frame.hooks = pack_hook_of(pack).self;
      if (!context.frame.hooks) {
        const Ref callback = owned(PyCFunction_NewEx(&note_def, self, nullptr));
        context.hooks =
            owned(PyObject_CallFunctionObjArgs(texts.follow, callback.get(), hooks.get(), nullptr));
      }
    }
    push(context.frame);
    context.is_pushed = true;
    return Ref::to(self).release();
  });
}

PyObject* names_of(const std::vector<const Op*>& ops) {
  Ref names = owned(PyList_New(0));
  for (const Op* op : ops) {
    const Ref name = owned(PyUnicode_FromString(op->name.c_str()));
    append(names, name);
  }
  return names.release();
}

// Returns the tensors of a result, and all that share their storages.
Ref tensors_of(const Result& result) {
  const Ref values = owned(PyList_New(0)), others = owned(PyList_New(0));
  const auto add = [](const Ref& list, const at::Tensor& t) {
    const Ref object = owned(THPVariable_Wrap(t));
    append(list, object);
  };
  for (const c10::IValue& value : result.values) {
    for_tensors(value, [&](const at::Tensor& t) { add(values, t); });
  }
  for (const auto& [t, version] : result.versions) add(others, t);
  return owned(PyTuple_Pack(2, values.get(), others.get()));
}

// Ends the log of a forward. Drops results that the forward has modified in place.
PyObject* finish(Store& store) {
  Log& log = store.log;
  log.on_storage.clear();
  log.is_complete = true;
  if (store.is_abandoned) return none();
  std::vector<const Op*> modified, all;
  size_t results = 0;
  for (Event& each : log.events) {
    results += each.result != nullptr;
    if (each.result && each.result->is_modified()) {
      modified.push_back(each.op);
      each.result.reset();
    }
  }
  if (results == 0) {
    for (const Event& each : log.events) {
      if (each.op) all.push_back(each.op);
    }
  }
  log.add(&end_of_forward);
  const Ref names(names_of(all)), lost(names_of(modified)), offloaded = owned(PyList_New(0));
  std::vector<Result*> leaving;
  for (Event& each : log.events) {
    if (!each.result || !each.result->offloads) continue;
    leaving.push_back(each.result.get());
    const Ref tensors = tensors_of(*each.result);
    append(offloaded, tensors);
  }
  const Ref away = owned(PyObject_CallFunction(texts.end, "sOOO", log.region.c_str(), names.get(),
                                               lost.get(), offloaded.get()));
  if (away.get() == Py_None) return none();
  store.away = Ref::to(PyTuple_GetItem(away.get(), 0));
  for (size_t i = 0; i < leaving.size(); ++i) {
    PyObject* trips = PyTuple_GetItem(away.get(), 1);
    leaving[i]->trips = Ref::to(PyList_GetItem(trips, static_cast<Py_ssize_t>(i)));
  }
  return none();
}

PyObject* leave(PyObject* self, PyObject* error) {
  return guarded([&]() -> PyObject* {
    auto& context = data_of<Context>(self);
    PyObject* kind = PyTuple_GetItem(error, 0);
    Store& store = *context.frame.store;
    if (context.is_recompute) store.is_repeating = false;
    if (std::exchange(context.is_pushed, false)) pop(context.frame);
    if (context.hooks) {
      const Ref hooks = std::move(context.hooks);
      const Ref method = owned(PyObject_GetAttrString(hooks.get(), "__exit__"));
      owned(PyObject_CallObject(method.get(), error));
    }
    if (!context.is_recompute) return kind == Py_None ? finish(store) : none();
    const auto cursor = std::move(context.frame.cursor);
    if (cursor) {
      context.difference = cursor->difference;
      if (kind == Py_None || kind == names.stop) cursor->raise_error();
    }
    return none();
  });
}

PyObject* difference(PyObject* self, void*) {
  const auto& context = data_of<Context>(self);
  const auto& cursor = context.frame.cursor;
  return PyUnicode_FromString((cursor ? cursor->difference : context.difference).c_str());
}

void destroy_context(PyObject* self) {
  auto& context = data_of<Context>(self);
  if (context.is_pushed) pop(context.frame);
  destroy<Context>(self);
}

PyObject* context_for(PyObject* self, bool is_recompute) {
  return guarded([&] {
    Context* context = nullptr;
    Ref object = owned(make(context_type, context));
    context->results = Ref::to(self);
    context->is_recompute = is_recompute;
    return object.release();
  });
}

PyObject* forward(PyObject* self, PyObject*) { return context_for(self, false); }
PyObject* recompute(PyObject* self, PyObject*) { return context_for(self, true); }

PyObject* new_results(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* policy = nullptr;
    const char* region = nullptr;
    int preserves_random = 1;
    if (!PyArg_ParseTuple(arguments, "O!sp", policy_type, &policy, &region, &preserves_random)) {
      return nullptr;
    }
    Results* results = nullptr;
    Ref object = owned(make(type, results));
    results->store.policy_object = Ref::to(policy);
    results->store.policy = &data_of<Policy>(policy);
    results->store.preserves_random = preserves_random != 0;
    results->store.log.region = region;
    return object.release();
  });
}

// setup_results(difference, failure, modified, end, follow, top_hooks, origin, arrive, ignored,
//               view_nodes)
PyObject* setup_results(PyObject*, PyObject* arguments) {
  Texts functions;
  PyObject *ignored = nullptr, *views = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOOO", &functions.difference, &functions.failure,
                        &functions.modified, &functions.end, &functions.follow,
                        &functions.top_hooks, &functions.origin, &functions.arrive, &ignored,
                        &views)) {
    return nullptr;
  }
  for (auto [list, names] : {std::pair(ignored, &ops().ignored), std::pair(views, &view_nodes)}) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
      const char* name = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), nullptr);
      if (!name) return nullptr;
      names->insert(name);
    }
  }
  Py_INCREF(arguments);  // never released, so `texts` stays valid
  texts = functions;
  return none();
}

PyMethodDef functions[] = {{"setup_results", setup_results, METH_VARARGS, nullptr},
                           {"policy", policy, METH_VARARGS, nullptr},
                           {"leave_to_python", leave_to_python, METH_NOARGS, nullptr},
                           {"ops_of_libraries", ops_of_libraries, METH_NOARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyMethodDef policy_methods[] = {{"needs_python", needs_python, METH_O, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

PyMethodDef results_methods[] = {{"forward", forward, METH_NOARGS, nullptr},
                                 {"recompute", recompute, METH_NOARGS, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};

PyMethodDef context_methods[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                                 {"__exit__", leave, METH_VARARGS, nullptr},
                                 {nullptr, nullptr, 0, nullptr}};

PyGetSetDef context_members[] = {{"difference", difference, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

void note_saved_tensor(PyObject* hooks, bool is_plain) {
  if (top_frame && top_frame->hooks == hooks) note_saved_tensor(*top_frame, is_plain);
}

bool add_results(PyObject* module) {
  PyType_Slot of_policy[] = {
      {Py_tp_dealloc, slot(destroy<Policy>)}, {Py_tp_methods, policy_methods}, {0, nullptr}};
  PyType_Slot of_results[] = {{Py_tp_new, slot(new_results)},
                              {Py_tp_dealloc, slot(destroy<Results>)},
                              {Py_tp_methods, results_methods},
                              {0, nullptr}};
  PyType_Slot of_context[] = {{Py_tp_dealloc, slot(destroy_context)},
                              {Py_tp_methods, context_methods},
                              {Py_tp_getset, context_members},
                              {0, nullptr}};
  policy_type = type_of("storage_ops._saved_tensors.Policy", sizeof(Object<Policy>),
                        Py_TPFLAGS_DISALLOW_INSTANTIATION, of_policy);
  context_type = type_of("storage_ops._saved_tensors.Context", sizeof(Object<Context>),
                         Py_TPFLAGS_DISALLOW_INSTANTIATION, of_context);
  return policy_type && context_type &&
         add_type<Results>(module, "storage_ops._saved_tensors.SavedResults", of_results) &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace storage_ops
