// A callback of torch that logs the ops without a kernel of `policy_kernels.h`, while a region runs
// in this thread.
#pragma once
#include "policy_state.h"
// Python.h, which it includes, comes first.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace storage_ops {

struct Ops {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<Op>> by_name;
  std::unordered_set<std::string> ignored;
  size_t of_libraries = 0;  // number of known ops of libraries that can have kernels

  // Returns the facts about an op. Sets `is_new` to true if the op was not known before.
  Op* of(const c10::OperatorHandle& handle, bool* is_new = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto& id = handle.operator_name();
    std::string name = id.overload_name.empty() ? id.name : id.name + "." + id.overload_name;
    auto& op = by_name[name];
    if (op) return op.get();
    op = std::make_unique<Op>();
    op->is_of_library = name.rfind("aten::", 0) != 0;
    op->is_collective = name.rfind("c10d::", 0) == 0;
    op->is_composite = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    op->is_cast = name == "aten::_to_copy";
    op->draws = handle.hasTag(at::Tag::nondeterministic_seeded);
    op->adds_to_product =
        name == "aten::linear" || name == "aten::_scaled_dot_product_attention_math";
    for (const c10::DispatchKey key : c10::autocast_dispatch_keyset) {
      if (handle.hasKernelForDispatchKey(key)) op->autocast = op->autocast.add(key);
    }
    // A recompute may leave out a cast of a parameter, and the log does not have the arguments by
    // which casts differ. So casts do not count.
    op->counts = !op->is_cast && !ignored.count(name) && name.rfind("prim::", 0) != 0 &&
                 name.rfind("aten::_nested_tensor_s", 0) != 0;
    if (is_new) *is_new = true;
    of_libraries += op->is_of_library && !op->is_composite && !op->is_collective;
    op->name = std::move(name);
    return op.get();
  }
};

inline Ops& ops() {
  static Ops* all = new Ops;  // kernels may run while the process ends
  return *all;
}

// Logs an op that begins, in all running regions in which it is not inside another op.
inline void log_op(const Op* op) {
  for (Frame* f = top_frame; f && f->depth == 0; f = f->outer) {
    if (f->is_idle() || f->store->policy->ops.count(op)) continue;  // a kernel logs the policy's
    if (!f->cursor) {
      f->store->log.add(op);
    } else if (f->cursor->error.empty()) {
      try {
        f->cursor->find(op, nullptr);
      } catch (const std::runtime_error& error) {
        f->cursor->error = error.what();
      } catch (const PythonError&) {
        f->cursor->error = message_of_python();
      }
    }
  }
}

inline void abandon_all(bool needs_python) {
  for (Frame* f = top_frame; f; f = f->outer) {
    if (f->cursor) continue;
    if (needs_python) f->store->policy->leave_to_python(f->store->log.region);
    if (!f->is_idle()) f->store->abandon();
  }
}

// Replaces the saved result of the last op by a copy, because the next op writes to it.
inline void copy_last_result(Log& log) {
  for (size_t i = log.events.size(); i-- > 0;) {
    const auto& [op, call, result] = log.events[i];
    if (!op || op->name == "aten::_unsafe_view") continue;  // a saved tensor, or the same bytes
    if (!result || result->values.size() != 1 || !result->values[0].isTensor()) return;
    const at::Tensor& t = result->values[0].toTensor();
    if (result->is_modified()) return;
    const at::Tensor copy = copy_of(t);
    log.on_storage.erase(key_of(t));
    log.on_storage[key_of(copy)] = result.get();
    result->values[0] = copy;
    result->versions.clear();
    result->watch(copy);
    result->is_written_later = true;
    return;
  }
}

struct RunningOp {
  Frame* region = nullptr;  // the region whose depth the op has increased, or null
  const Op* op = nullptr;
  c10::DispatchKeySet autocast;  // the keys with which the op may cast its arguments
};

// An object for each op, as `RecordFunction` can keep, takes longer.
inline thread_local std::vector<RunningOp> running_ops;

// Copies the saved product to which an op of torch adds in place. Linear layers do so if their
// input is not contiguous. Under a Python mode, torch adds out of place.
inline void copy_product(const Op* op) {
  const Op* caller = running_ops.empty() ? nullptr : running_ops.back().op;
  if (!caller || !caller->adds_to_product || op->name != "aten::add_.Tensor") return;
  for (Frame* f = top_frame; f && f->depth == 0; f = f->outer) {
    if (!f->cursor && !f->is_idle()) copy_last_result(f->store->log);
  }
}

// Returns those of some autocast keys that are active.
inline c10::DispatchKeySet active(c10::DispatchKeySet keys) {
  return keys.empty() ? keys : keys - c10::impl::tls_local_dispatch_key_set().excluded_;
}

// Returns true if an op begins inside the autocast kernel of another, which has cast arguments and
// now calls the same op, or one like it. Only the second call counts.
inline bool is_after_autocast(const Frame* region) {
  if (running_ops.empty() || running_ops.back().region != region) return false;
  const c10::DispatchKeySet keys = running_ops.back().autocast;
  return active(keys) != keys;
}

// Returns the region in which an op begins, or no region if the op is not counted.
inline RunningOp counting(const at::RecordFunction& call) {
  thread_local std::unordered_map<const char*, const Op*> known;
  Frame* f = top_frame;
  if (!f) return {};
  const char* name = call.name();
  auto found = known.find(name);
  // If an op was removed, another op may have a name at the same address.
  if (found == known.end() || found->second->name.compare(0, std::strlen(name), name) != 0) {
    const auto id = call.operator_name();
    if (!id) {  // a Python autograd Function, or an autograd node
      // A Python mode sees FlexAttention as one op, but the kernels here see the ops inside it.
      if (std::strncmp(name, "FlexAttentionAutograd", 21) == 0) abandon_all(true);
      return {};
    }
    const auto handle = c10::Dispatcher::singleton().findSchema(*id);
    if (!handle) return {};
    bool is_new = false;
    const Op* op = ops().of(*handle, &is_new);
    found = known.insert_or_assign(name, op).first;
    // The outputs may share the storage of an argument. The next policy adds a kernel for the op.
    if (is_new && op->is_of_library && !op->is_composite) abandon_all(false);
  }
  const Op* op = found->second;
  if (op->is_composite) return {nullptr, op, {}};
  if (!op->counts) return {};
  bool is_logged = false;
  if (is_after_autocast(f)) {
    is_logged = running_ops.back().op == op;
    --std::exchange(running_ops.back().region, nullptr)->depth;
  }
  if (f->depth == 0 && !is_logged &&
      !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) {
    if (op->is_collective) abandon_all(true);  // its writes do not increment versions
    copy_product(op);
    log_op(op);
  }
  return {f, op, active(op->autocast)};
}

inline std::unique_ptr<at::ObserverContext> op_begins(const at::RecordFunction& call) {
  const RunningOp running = counting(call);
  if (running.region) ++running.region->depth;
  running_ops.push_back(running);
  return nullptr;
}

inline void op_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (running_ops.empty()) return;  // the callback was added again inside of the op
  if (Frame* f = running_ops.back().region) --f->depth;
  running_ops.pop_back();
}

}  // namespace storage_ops
