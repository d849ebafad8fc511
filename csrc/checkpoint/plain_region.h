// A region in the usual case: its arguments are plain tensors, no mode is active, and a recompute
// finds the state that the forward found. Its forward and its recompute need no Python code besides
// the function's own (plain_region.cpp), nor do the discard of its output and the tensors that a
// consumer of the output saves (discarding.cpp).
//
// storage_ops/checkpoint/region/region.py has the region in Python, for every case. As soon as
// something is unusual, the function `make` of plain_region.py creates that one from the parts of
// this one, and it decides everything from then on.
#pragma once
#include "descriptions.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <mutex>
#include <optional>

namespace storage_ops {

// The Python functions and objects that `setup_regions` got as arguments.
struct RegionFunctions {
  PyObject *make, *explain_transform, *explain, *check, *forget_hooks, *group, *is_as_before;
  PyObject *number_issued, *groups, *discard, *bind, *finish, *pack, *unpack, *packed, *consumers;
  PyObject* set_dynamo;
};

inline RegionFunctions functions;

// The output of a region, which is discarded after a consumer has run, until it is bound back.
struct Output {
  at::Tensor handle;  // an alias, which keeps the storage but not the graph
  Ref tensor;         // what the function returned, until the discard
  int64_t version = 0;
  Description description;
  size_t uses = 0;  // the number of saved tensors of consumers that share its storage
  bool is_discarded = false;

  c10::StorageImpl* key() const { return handle.storage().unsafeGetStorageImpl(); }
};

struct PlainRegion {
  // Freed after the backward that cannot be followed by another.
  Ref fn, inputs, snapshot, contexts, facts, attention;
  Ref options, name, serial, saved;
  Ref region;      // the region in Python, if there is one
  Ref recomputed;  // of the backward pass `task`
  int task = -1;
  bool stops = false, checks = false, is_running = false;
  std::optional<Output> output;
  std::recursive_mutex mutex;

  ~PlainRegion();
  void free_call() {
    for (Ref* part : {&fn, &inputs, &snapshot, &contexts, &facts, &attention}) *part = Ref();
  }
};

using SharedRegion = std::shared_ptr<PlainRegion>;
using WeakRegion = std::weak_ptr<PlainRegion>;

// Locks a mutex. Other threads get the GIL while this one waits.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    const WithoutGil no_gil;
    mutex_.lock();
  }
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

// Switches Dynamo off in this thread. After a graph break of compiled code, Dynamo would otherwise
// compile the Python functions that a backward pass calls (storage_ops/foundation/eager.py).
class WithoutDynamo {
 public:
  WithoutDynamo()
      : before_(owned(PyObject_CallFunctionObjArgs(functions.set_dynamo, Py_None, nullptr))) {}
  ~WithoutDynamo() {
    if (before_.get() == Py_None) return;  // it was off
    const KeptError kept;
    Ref(PyObject_CallFunctionObjArgs(functions.set_dynamo, before_.get(), nullptr));
  }
  WithoutDynamo(const WithoutDynamo&) = delete;
  WithoutDynamo& operator=(const WithoutDynamo&) = delete;

 private:
  const Ref before_;
};

// The functions below need the GIL, and throw if a Python error is set.

// Returns the region in Python, which is created if there is none.
PyObject* region_of(PlainRegion& plain);
Ref call_method(PyObject* object, const char* name, PyObject* argument = nullptr);

// Runs the function, and returns what it returns.
Ref run_forward(PyObject* self, PyObject* args, PyObject* kwargs);

// Repeats the function for the running backward pass, unless that was done. Returns the object with
// the tensors that it saves, or null to let Python decide.
Ref recompute_in_task(const SharedRegion& shared);

// Calls `fn(hidden)` as a consumer of the output of a region. Returns null if the output is not a
// usual one, before the consumer is called. Else `hidden` is moved from.
Ref call_consumer(const SharedRegion& shared, Ref& hidden, PyObject* fn, uint64_t first_node);

// Returns the parts of the output for `make`: a tuple or None.
Ref parts_of_output(const PlainRegion& plain);

// Binds the output of a recompute to the discarded output. Returns false if they differ.
bool bind(PlainRegion& plain, PyObject* result);

// Removes the output from the table of producers.
void forget_output(PlainRegion& plain);

// Returns the region whose output the code around which this pack hook is consumes, if it is ours.
WeakRegion consumed_region(PyObject* pack);
std::unique_ptr<torch::autograd::SavedVariableHooks> consumer_hooks(SharedRegion region);

}  // namespace storage_ops
