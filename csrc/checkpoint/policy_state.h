// What a policy chooses, what it has saved of a region, and the regions that run in this thread.
#pragma once
#include "op_log.h"
// Python.h, which it includes, comes first.
#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace storage_ops {

enum class Decision { recompute, save, offload };

// The calls of an op whose results a policy saves: by the shape of the right factor, or by number.
// `Row` in storage_ops/checkpoint/selective/op_sets.py has the same facts.
struct Chosen {
  int64_t right = -1;
  bool others = true;
  std::vector<std::vector<int64_t>> named;
  bool offloads = false;
  std::optional<size_t> family;  // the index of its counter
  std::unordered_set<size_t> saved, offloaded;

  bool has(const torch::jit::Stack& stack, size_t arguments) const {
    if (right < 0) return true;
    const c10::IValue& factor = stack[stack.size() - arguments + static_cast<size_t>(right)];
    if (factor.toTensor().unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return others;
    const auto is_shape = [&](const auto& shape) { return factor.toTensor().sizes() == shape; };
    return std::any_of(named.begin(), named.end(), is_shape) != others;
  }
};

struct Policy {
  std::unordered_map<const Op*, Chosen> ops;
  size_t k = 1;  // the first result, and every k-th result after it, is saved

  // Notes that a region of this name ran an op that the kernels cannot handle.
  void leave_to_python(const std::string& region) {
    const std::lock_guard<std::mutex> lock(mutex_);
    left_to_python_.insert(region);
  }
  bool needs_python(const std::string& region) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return left_to_python_.count(region) > 0;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<std::string> left_to_python_;  // names of regions
};

// The saved results of one region.
struct Store {
  Ref policy_object;
  Policy* policy = nullptr;
  Ref away;  // the results in host memory
  bool preserves_random = true;
  Log log;
  size_t seen = 0;            // results that the policy chooses by shapes
  std::vector<size_t> calls;  // of each family
  bool is_abandoned = false;  // nothing is saved or compared
  bool is_repeating = false;  // a backward pass inside the forward recomputes a part of it
  bool is_shared = false;     // a backward pass with retain_graph=True has used the results

  void abandon() {
    is_abandoned = true;
    log = {log.region, {}, {}, {}, log.is_complete};
  }

  // Decides about a call of an op, and counts it.
  Decision decide(const Op* op, const torch::jit::Stack& stack, size_t arguments) {
    const Chosen& chosen = policy->ops.at(op);
    if (chosen.family) {
      if (calls.size() <= *chosen.family) calls.resize(*chosen.family + 1);
      const size_t number = calls[*chosen.family]++;
      if (chosen.offloaded.count(number)) return Decision::offload;
      return chosen.saved.count(number) ? Decision::save : Decision::recompute;
    }
    if (!chosen.has(stack, arguments) || seen++ % policy->k != 0) return Decision::recompute;
    return chosen.offloads ? Decision::offload : Decision::save;
  }
};

struct Frame {  // a region that runs in this thread
  Store* store = nullptr;
  std::unique_ptr<Cursor> cursor;  // of a recompute
  PyObject* hooks = nullptr;       // the object whose pack hook reports saved tensors
  size_t depth = 0;                // number of ops that run, one inside the other
  Frame* outer = nullptr;

  bool is_idle() const { return store->is_abandoned || store->is_repeating; }
};

inline thread_local Frame* top_frame = nullptr;

}  // namespace storage_ops
