// The tensors that autograd saves in one forward, and those of a recompute.
//
// The pack and unpack hooks run without the GIL (default_hooks.cpp), so a mutex guards the data. No
// code waits for the GIL, or frees a tensor, while it has the mutex.
#pragma once
#include "descriptions.h"
// Python.h, which it includes, comes first.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <mutex>
#include <utility>
#include <vector>

namespace storage_ops {

struct Recomputed;

// The numbers of elements of small tensors (saved_tensors.py).
struct Small {
  Py_ssize_t on_cpu = 0, elsewhere = 0;
};

inline Small small;

struct Saved {
  std::mutex mutex;
  std::vector<Description> tensors;
  std::vector<bool> released;
  size_t unreleased = 0;
  Recomputed* recomputed = nullptr;  // serves the current backward pass; null if it was freed
  bool checksums = false;            // whether descriptions have checksums
  bool are_small = false;            // whether all tensors of the whole forward are small

  size_t add(Description&& description) {
    const std::lock_guard<std::mutex> lock(mutex);
    tensors.push_back(std::move(description));
    return tensors.size() - 1;
  }

  // Removes a tensor of the recompute that serves the running backward pass. Returns an empty
  // `Kept` to let the region decide.
  Kept take_in_task(size_t index);

  // Notes that no later backward pass reads this tensor. The caller has the mutex.
  void release(size_t index) {
    if (index < released.size() && !released[index]) {
      released[index] = true;
      --unreleased;
    }
  }
};

struct Recomputed {
  Ref first;  // the `SavedTensors` of the forward
  size_t limit = 0, stopped = 0, unread = 0;
  bool stops = false;
  int task = -1;
  std::vector<Description> described;
  std::vector<Kept> tensors;

  ~Recomputed() {
    if (!first) return;
    const std::lock_guard<std::mutex> lock(saved().mutex);
    if (saved().recomputed == this) saved().recomputed = nullptr;
  }

  Saved& saved() const { return data_of<Saved>(first.get()); }

  // Returns true if the recompute ends before its next tensor, or with it. The caller has the
  // mutex.
  bool stops_before_next() const { return stops && tensors.size() >= limit; }
  bool stops_with_next() const {
    return stops && tensors.size() + 1 == limit && !saved().are_small;
  }
  bool stops_now() const {
    const std::lock_guard<std::mutex> lock(saved().mutex);
    return stops_before_next() || stops_with_next();
  }

  size_t add(Description&& description, Kept&& kept) {
    const std::lock_guard<std::mutex> lock(saved().mutex);
    described.push_back(std::move(description));
    tensors.push_back(std::move(kept));
    unread = tensors.size();
    return unread - 1;
  }

  // Removes a tensor. The caller has the mutex.
  Kept take(size_t index) {
    --unread;
    return std::exchange(tensors[index], Kept());
  }

  // Removes a tensor for the running backward pass. Returns an empty `Kept` to let the region
  // decide. The caller has the mutex.
  Kept take_in_task(size_t index) {
    if (task < 0 || task != torch::autograd::get_current_graph_task_id() || index + 2 == stopped ||
        index >= tensors.size() || !tensors[index].is_there()) {
      return {};
    }
    if (!torch::autograd::get_current_graph_task_keep_graph()) saved().release(index);
    return take(index);
  }
};

inline Kept Saved::take_in_task(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex);
  return recomputed ? recomputed->take_in_task(index) : Kept();
}

// The object that a pack hook of ours is bound to.
struct PackHook {
  PyObject* self = nullptr;  // null for a hook of others
  bool is_recompute = false;

  // Of a forward: the object's `SavedTensors`, and whether `note` gets every tensor.
  Saved& saved() const { return data_of<Saved>(PyTuple_GetItem(self, 0)); }
  PyObject* note() const { return PyTuple_GetItem(self, 1); }
  bool notes_all() const { return PyTuple_GetItem(self, 2) == Py_True; }
  // Of a recompute.
  Recomputed& recomputed() const { return data_of<Recomputed>(self); }
  // Of both.
  bool checksums() const { return (is_recompute ? recomputed().saved() : saved()).checksums; }
};

PackHook pack_hook_of(PyObject* pack);

// Returns true if a region can recompute the storage of a tensor. Needs the GIL.
bool has_producer(const at::Tensor& t);

// The methods of both classes in saved_tensors.py that a region needs. They throw or return null if
// a Python error is set.
PyObject* new_saved_tensors(bool checksums);
Ref pack_hook(PyObject* saved, PyObject* note, bool notes_all);
Ref unpack_hook(PyObject* saved, PyObject* read);
void finish_saved_tensors(PyObject* saved);
PyObject* recompute_of(PyObject* saved, bool stops);
PyObject* pack_hook_again(PyObject* recomputed);
PyObject* drop_graphs(PyObject* recomputed);
void begin_task(PyObject* recomputed, int task);

// Returns true if each tensor certainly matches the one of the forward. Else Python decides.
bool all_fit(const Recomputed& recomputed);

// The context manager of a region's hooks, and torch's own engine.
PyObject* hooks_context(PyObject* pack, PyObject* unpack);
torch::autograd::Engine& torch_engine();

// Returns the hooks of torch for the callables on top of its stack.
std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_torch();

// Returns torch's own hooks, which have packed this object and call `unpack` with it.
std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_python(const Ref& packed,
                                                                     PyObject* unpack);

// Throws the exception that stands for the Python error that is set.
[[noreturn]] void throw_python_error();

// Returns a saved tensor of a `PlainRegion`, which runs once more if that is necessary. Returns an
// undefined tensor to let Python decide. `read` is the function that an unpack hook calls.
at::Tensor read_natively(PyObject* read, size_t index);

// Adds the context manager of hooks to the module. Returns false if a Python error is set.
bool add_default_hooks(PyObject* module);

}  // namespace storage_ops
