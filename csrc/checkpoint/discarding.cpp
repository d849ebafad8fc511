// The output of a region is discarded after its consumer has run, and bound back in backward.
// storage_ops/checkpoint/discard has the same in Python, for every output and every consumer.
#include "call_in.h"
#include "kept_inputs.h"
#include "plain_region.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/SavedTensorHooks.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <vector>

namespace storage_ops {
namespace {

using torch::autograd::SavedVariableHooks;

Ref key_object(c10::StorageImpl* key) { return owned(PyLong_FromVoidPtr(key)); }

// ---- the output -------------------------------------------------------------------------------

// Returns true if torch allocated the bytes, and no other code uses them. False means that Python
// must decide.
bool is_own(const c10::StorageImpl& storage) {
  if (!storage.resizable() || storage.nbytes() == 0) return false;
  if (storage.device_type() == c10::kCUDA) return true;
  return storage.device_type() == c10::kCPU &&
         storage.data_ptr().get_deleter() == c10::GetAllocator(c10::kCPU)->raw_deleter();
}

// Returns true if nothing else references a tensor and its Python object.
bool has_one_owner(PyObject* object) {
  // In some versions of torch, a second reference in C++ references the object too.
  return Py_REFCNT(object) == 1 && tensor_of(impl_of(object)).use_count() == 2;
}

// Returns true if an op of the region made the tensor, and nothing else references its storage.
bool is_usual(const at::Tensor& t, uint64_t first_node, PyObject* inputs) {
  if (!t.defined() || t.is_view() || !t.requires_grad()) {
    return false;
  }
  const auto& node = t.grad_fn();
  const c10::StorageImpl& storage = *t.storage().unsafeGetStorageImpl();
  return node && node->sequence_nr() >= first_node && is_own(storage) && !t._is_zerotensor() &&
         t.storage().use_count() == 1 && !has_input_with(inputs, &storage);
}

// Returns false if Python must describe the tensor.
bool describe_output(const PlainRegion& plain, const at::Tensor& t, Description& description) {
  if (!describe_plain(t, description)) return false;
  if (data_of<Saved>(plain.saved.get()).checksums) {
    const WithoutGil no_gil;
    description.checksum = checksum_of(t);
  }
  return true;
}

WeakRegion* weak_in(PyObject* capsule) {
  return static_cast<WeakRegion*>(PyCapsule_GetPointer(capsule, nullptr));
}

Ref weak_capsule(const SharedRegion& shared) {
  auto weak = std::make_unique<WeakRegion>(shared);
  Ref capsule =
      owned(PyCapsule_New(weak.get(), nullptr, [](PyObject* object) { delete weak_in(object); }));
  weak.release();
  return capsule;
}

// The table of producers has a function that returns the region in Python, or None.
PyObject* producer(PyObject* capsule, PyObject*) {
  return guarded([&] {
    const SharedRegion alive = weak_in(capsule)->lock();
    return alive ? Ref::to(region_of(*alive)).release() : none();
  });
}

PyMethodDef producer_def{"producer", producer, METH_NOARGS, nullptr};

void note_producer(const SharedRegion& shared) {
  const Ref capsule = weak_capsule(shared);
  const Ref function = owned(PyCFunction_NewEx(&producer_def, capsule.get(), nullptr));
  const Ref key = key_object(shared->output->key());
  if (PyDict_SetItem(names.producers, key.get(), function.get()) < 0) throw PythonError();
}

// ---- saved tensors of a consumer ----------------------------------------------------------------

// Recomputes the bytes of the output, if they are missing. Needs the GIL.
void restore(const SharedRegion& shared) {
  PlainRegion& plain = *shared;
  {
    const Lock lock(plain.mutex);
    if (!plain.region && (!plain.output || !plain.output->is_discarded)) return;
    if (recompute_in_task(shared)) return;
  }
  call_method(region_of(plain), "restore");
}

class ConsumerHooks final : public SavedVariableHooks {
 public:
  explicit ConsumerHooks(SharedRegion shared) : shared_(std::move(shared)) {}
  ConsumerHooks(const ConsumerHooks&) = delete;
  ConsumerHooks& operator=(const ConsumerHooks&) = delete;

  ~ConsumerHooks() override {
    if (!is_output_ || !Py_IsInitialized()) return;
    const WithGil gil;
    const KeptError kept;
    if (shared_->output) --shared_->output->uses;
    if (!shared_->region) return;
    const Ref key(PyLong_FromVoidPtr(key_));
    const Ref outputs(PyObject_GetAttrString(shared_->region.get(), "outputs"));
    PyObject* target = outputs.get();
    const Ref done(target ? PyObject_CallMethod(target, "remove_use", "O", key.get()) : nullptr);
    if (!done) PyErr_WriteUnraisable(shared_->region.get());
  }

  void call_pack_hook(const at::Tensor& t) override {
    bool by_python = !is_plain(t.unsafeGetTensorImpl());
    if (!by_python) {
      const WithGil gil;
      key_ = t.storage().unsafeGetStorageImpl();
      is_output_ = shared_->output && key_ == shared_->output->key();
      by_python = shared_->region || (!is_output_ && has_producer(t));
      if (!by_python && is_output_) ++shared_->output->uses;
    }
    if (by_python) {
      is_output_ = false;
      python_ = hooks_of_torch();
      return python_->call_pack_hook(t);
    }
    const bool has_graph = t.grad_fn() || (t.is_view() && t._base().grad_fn());
    tensor_ = is_output_ || has_graph ? alias_of(t) : t;
    version_ = t._version();
  }

  at::Tensor call_unpack_hook() override {
    if (python_) return python_->call_unpack_hook();
    if (!is_output_ && !is_modified()) return tensor_;
    const WithGil gil;
    try {
      const WithoutDynamo eager;
      if (is_output_) restore(shared_);
      if (is_modified()) {
        const Ref packed = packed_by_python();
        owned(PyObject_CallFunctionObjArgs(functions.unpack, packed.get(), nullptr));  // raises
      }
    } catch (const PythonError&) {
      throw_python_error();
    }
    return tensor_;
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    if (python_) return python_->retrieve_unpack_hook_data();
    const WithGil gil;
    return hooks_of_python(packed_by_python(), functions.unpack)->retrieve_unpack_hook_data();
  }

 private:
  bool is_modified() const { return tensor_._version() != version_; }

  // Returns the object of Python that stands for the saved tensor. Needs the GIL.
  Ref packed_by_python() const {
    const Ref t = owned(THPVariable_Wrap(tensor_)), version(PyLong_FromLongLong(version_));
    PyObject* region = is_output_ ? region_of(*shared_) : Py_None;
    return owned(
        PyObject_CallFunctionObjArgs(functions.packed, t.get(), version.get(), region, nullptr));
  }

  SharedRegion shared_;
  std::unique_ptr<SavedVariableHooks> python_;  // torch's, if it does the work
  at::Tensor tensor_;
  int64_t version_ = 0;
  c10::StorageImpl* key_ = nullptr;  // of the output's storage, which may be freed
  bool is_output_ = false;
};

// The hooks in Python, which other users of torch's stack of hooks see.
PyObject* pack(PyObject* capsule, PyObject* t) {
  return guarded([&] {
    owned(producer(capsule, nullptr));  // from now on, the region in Python counts the uses
    return PyObject_CallFunctionObjArgs(functions.pack, t, nullptr);
  });
}

PyMethodDef pack_def{"pack", pack, METH_O, nullptr};

// Calls a consumer with the output as its argument.
Ref call_with_hooks(const SharedRegion& shared, PyObject* fn, PyObject* output) {
  const Ref capsule = weak_capsule(shared);
  const Ref pack = owned(PyCFunction_NewEx(&pack_def, capsule.get(), functions.consumers));
  std::vector<Ref> contexts;
  contexts.push_back(owned(hooks_context(pack.get(), functions.unpack)));
  const Ref args = owned(PyTuple_Pack(1, output));
  return owned(call_in(contexts, fn, args.get(), nullptr));
}

// Returns true if the output has the version of the forward, and the checksum, if there is one.
bool is_unmodified(const Output& output) {
  const at::Tensor& before = output.description.checksum;
  if (output.handle._version() != output.version) return false;
  if (!before.defined()) return true;
  const WithoutGil no_gil;
  return are_equal({before}, {checksum_of(output.handle)});
}

// Returns true if only consumers' saved tensors reference the output besides `hidden`, and it was
// neither modified nor shown to numpy.
bool may_discard(const PlainRegion& plain, PyObject* hidden) {
  if (plain.region || !plain.output) return false;
  const Output& output = *plain.output;
  return has_one_owner(hidden) && output.handle.storage().use_count() == 2 + output.uses &&
         is_own(*output.handle.storage().unsafeGetStorageImpl()) && is_unmodified(output);
}

}  // namespace

WeakRegion consumed_region(PyObject* pack_function) {
  if (!PyCFunction_Check(pack_function) || PyCFunction_GetFunction(pack_function) != pack) {
    return {};
  }
  return *weak_in(PyCFunction_GetSelf(pack_function));
}

std::unique_ptr<SavedVariableHooks> consumer_hooks(SharedRegion region) {
  return std::make_unique<ConsumerHooks>(std::move(region));
}

Ref call_consumer(const SharedRegion& shared, Ref& hidden, PyObject* fn, uint64_t first_node) {
  PlainRegion& plain = *shared;
  if (!has_class(hidden.get(), names.tensor) || !has_one_owner(hidden.get())) return {};
  {
    const at::Tensor t = plain_tensor(hidden.get());
    if (!is_usual(t, first_node, plain.inputs.get())) return {};
    Output& output = plain.output.emplace();
    output.handle = alias_of(t);
    output.version = t._version();
    describe_output(plain, t, output.description);
  }
  const Ref output = std::move(hidden);
  plain.output->tensor = Ref::to(output.get());
  note_producer(shared);
  Ref outputs;
  try {
    outputs = call_with_hooks(shared, fn, output.get());
  } catch (...) {
    if (plain.output) plain.output->tensor = Ref();  // it references this region
    throw;
  }
  if (plain.output) plain.output->tensor = Ref();
  if (may_discard(plain, output.get())) {
    const Ref handle = owned(THPVariable_Wrap(plain.output->handle));
    owned(PyObject_CallFunctionObjArgs(functions.discard, handle.get(), plain.name.get(), nullptr));
    plain.output->is_discarded = true;
  } else {
    if (!plain.region) plain.output->tensor = Ref::to(output.get());
    PyObject* region = region_of(plain);
    owned(PyObject_CallFunctionObjArgs(functions.finish, region, nullptr));
  }
  return outputs;
}

Ref parts_of_output(const PlainRegion& plain) {
  if (!plain.output) return Ref(none());
  const Output& output = *plain.output;
  const Ref key = key_object(output.key()), handle = owned(THPVariable_Wrap(output.handle));
  const Ref tensor =
      output.tensor ? owned(PyWeakref_NewRef(output.tensor.get(), nullptr)) : Ref(none());
  const Ref version(PyLong_FromLongLong(output.version)), uses(PyLong_FromSize_t(output.uses));
  const Ref description = python_of(output.description);
  return owned(PyTuple_Pack(7, key.get(), handle.get(), tensor.get(), version.get(),
                            description.get(), uses.get(),
                            output.is_discarded ? Py_True : Py_False));
}

bool bind(PlainRegion& plain, PyObject* result) {
  Output& output = *plain.output;
  const at::Tensor t = plain_tensor(result);
  Description description;
  if (!t.defined() || !describe_output(plain, t, description) ||
      !output.description.is_like(description)) {
    return false;
  }
  const at::Tensor &checksum_before = output.description.checksum, &checksum = description.checksum;
  if (checksum.defined() && !are_equal({checksum_before}, {checksum})) return false;
  const Ref handle = owned(THPVariable_Wrap(output.handle));
  const Ref again = owned(THPVariable_Wrap(alias_of(t)));
  owned(PyObject_CallFunctionObjArgs(functions.bind, handle.get(), again.get(), nullptr));
  forget_output(plain);
  plain.output.reset();  // from now on, only the saved tensors keep the bytes
  return true;
}

void forget_output(PlainRegion& plain) {
  if (!plain.output || plain.region) return;  // the region in Python forgets its own outputs
  const KeptError kept;
  const Ref key(PyLong_FromVoidPtr(plain.output->key()));
  PyDict_DelItem(names.producers, key.get());
  PyErr_Clear();  // it was not there
}

}  // namespace storage_ops
