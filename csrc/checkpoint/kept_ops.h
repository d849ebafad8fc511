// Kernels that intercept the ops of a policy while a region runs in this thread, and a callback
// that logs all other ops.
//
// The kernels have the dispatch key ADInplaceOrView: below autograd, above Python modes and
// subclasses. torch has no kernels there for functional ops, so other ops have no overhead. If no
// region runs, a kernel calls the next one. Views and ops that write have kernels of torch for this
// key, which must not be replaced.
#pragma once
#include "op_log.h"
#include "saved_tensors.h"
#include "unseen.h"
// Python.h, which it includes, comes first.
#include <ATen/Context.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
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

// ---- all ops ------------------------------------------------------------------------------------

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

inline at::Tensor copy_of(const at::Tensor& t) {
  const Unseen unseen;
  return t.clone();
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

// ---- ops of policies ----------------------------------------------------------------------------

using Run = std::function<void()>;

inline void note_shared(Log& log, const torch::jit::Stack& stack, size_t returns) {
  if (log.on_storage.empty()) return;
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    for_tensors(stack[i], [&](const at::Tensor& t) {
      if (!is_plain(t)) return;
      auto found = log.on_storage.find(key_of(t));
      if (found != log.on_storage.end()) found->second->watch(alias_of(t));
    });
  }
}

// Notes the states of the generators that an op with results on these devices may have used. An op
// of a GPU may return numbers on the CPU too: the seed of attention with dropout.
inline void note_random(Result& result, const std::vector<c10::IValue>& generators,
                        const std::unordered_set<c10::Device>& devices) {
  auto note = [&](at::Generator generator) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    result.random.emplace_back(generator, generator.get_state());
  };
  if (!generators.empty()) return note(generators.front().toGenerator());
  for (const c10::Device& device : devices) {
    if (!device.is_meta()) note(at::globalContext().defaultGenerator(device));
  }
}

inline void record(Store& store, const Op* op, torch::jit::Stack* stack, size_t arguments,
                   size_t returns, const Run& run) {
  Log& log = store.log;
  const size_t position = log.add(op);
  const Decision decision = store.decide(op, *stack, arguments);
  const bool wanted = decision != Decision::recompute;
  if (wanted) log.names.insert(op);
  if (wanted || log.names.count(op)) log.events[position].call = describe_call(*stack, arguments);
  if (!wanted) {
    run();
    if (!store.is_abandoned) note_shared(log, *stack, returns);
    return;
  }
  c10::SmallVector<c10::StorageImpl*, 6> inputs;  // their storages
  std::vector<c10::IValue> generators;
  bool fits = true;
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    if ((*stack)[i].isGenerator()) generators.push_back((*stack)[i]);
    for_tensors((*stack)[i], [&](const at::Tensor& t) {
      fits = fits && is_plain(t);
      if (fits) inputs.push_back(key_of(t));
    });
  }
  run();
  if (store.is_abandoned) return;
  auto result = std::make_unique<Result>();
  result->offloads = decision == Decision::offload;
  std::unordered_set<c10::Device> devices;
  bool is_new = true, is_inference = false;
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    for_tensors((*stack)[i], [&](const at::Tensor& t) {
      is_inference |= t.is_inference();
      fits = fits && (is_plain(t) || t.is_inference());
      if (!fits || is_inference) return;
      devices.insert(t.device());
      is_new = is_new && std::find(inputs.begin(), inputs.end(), key_of(t)) == inputs.end();
    });
  }
  if (!fits) {  // only Python can handle tensors of subclasses
    store.abandon();
    store.policy->leave_to_python(log.region);
    return;
  }
  if (is_inference || devices.empty() || !is_new) return;
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) {
    result->values.push_back(alias_of((*stack)[i]));
    for_tensors(result->values.back(), [&](const at::Tensor& t) {
      result->watch(t);
      log.on_storage[key_of(t)] = result.get();
    });
  }
  if (op->draws && store.preserves_random) note_random(*result, generators, devices);
  log.events[position].result = std::move(result);
}

// Returns true if another backward pass may need the result that the present pass needs.
inline bool is_needed_again(Store& store) {
  if (torch::autograd::get_current_graph_task_id() == -1) return true;
  store.is_shared = store.is_shared || torch::autograd::get_current_graph_task_keep_graph();
  return store.is_shared;
}

inline void replay(Store& store, Cursor& cursor, const Op* op, torch::jit::Stack* stack,
                   size_t arguments, const Run& run) {
  cursor.raise_error();
  std::unique_ptr<Call> call;
  if (cursor.asks(op)) call = describe_call(*stack, arguments);
  const int64_t position = cursor.find(op, call.get());
  auto* result = position < 0 ? nullptr : &store.log.events[static_cast<size_t>(position)].result;
  if (!result || !*result) return run();
  if ((*result)->is_modified()) cursor.fail_modified(op->name);
  for (auto& [generator, state] : (*result)->random) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
  if ((*result)->trips) {
    const WithGil gil;
    Ref& trips = (*result)->trips;
    if (!Ref(PyObject_CallFunctionObjArgs(texts.arrive, trips.get(), nullptr))) {
      throw_python_error();  // a KeyboardInterrupt stays one
    }
    trips = Ref();
  }
  cursor.use(position);
  torch::jit::drop(*stack, arguments);
  const bool again = is_needed_again(store), copies = (*result)->is_written_later;
  for (c10::IValue& value : (*result)->values) {
    if (!again) {
      stack->push_back(std::move(value));
    } else {
      stack->push_back(copies ? c10::IValue(copy_of(value.toTensor())) : alias_of(value));
    }
  }
  if (!again) result->reset();
}

// ---- kernels ------------------------------------------------------------------------------------

struct Kernel {
  const Op* op;
  c10::OperatorHandle handle;
  size_t arguments, returns;

  Kernel(const Op* o, const c10::OperatorHandle& h)
      : op(o),
        handle(h),
        arguments(h.schema().arguments().size()),
        returns(h.schema().returns().size()) {}

  // Returns the innermost region, from `f` outwards, that must handle this call; null if none.
  Frame* watching(Frame* f, const at::Tensor* cast) const {
    if (!f || f->depth > 1) return nullptr;
    if (cast && cast->requires_grad() && cast->is_leaf()) return nullptr;
    while (f && f->is_idle()) f = next(f);
    return f;
  }
  static Frame* next(Frame* f) { return f->outer && f->outer->depth == 0 ? f->outer : nullptr; }

  void call(Frame* f, c10::DispatchKeySet below, torch::jit::Stack* stack) const {
    while (f && f->is_idle()) f = next(f);
    if (!f) return handle.redispatchBoxed(below, stack);
    const Run run = [&] { call(next(f), below, stack); };
    try {
      if (!f->store->policy->ops.count(op)) {  // its outputs may share a saved result's storage
        run();
        if (!f->cursor && !f->is_idle()) note_shared(f->store->log, *stack, returns);
      } else if (f->cursor) {
        replay(*f->store, *f->cursor, op, stack, arguments, run);
      } else {
        record(*f->store, op, stack, arguments, returns, run);
      }
    } catch (const PythonError&) {
      throw_python_error();  // a KeyboardInterrupt stays one
    }
  }
};

inline c10::DispatchKeySet keys_below(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}

struct Boxed final : c10::OperatorKernel {  // a kernel for any op
  Kernel kernel;
  explicit Boxed(Kernel k) : kernel(std::move(k)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    Frame* f = nullptr;
    if (top_frame) {
      const c10::IValue& first = (*stack)[stack->size() - kernel.arguments];
      f = kernel.watching(top_frame, kernel.op->is_cast ? &first.toTensor() : nullptr);
    }
    f ? kernel.call(f, keys_below(keys), stack) : op.redispatchBoxed(keys_below(keys), stack);
  }
};

// A kernel for an op whose signature is known here. Arguments are boxed only if a region runs.
template <class Known, class Signature = typename Known::schema>
struct Typed;

template <class Known, class R, class... A>
struct Typed<Known, R(A...)> {
  static inline std::optional<Kernel> kernel;

  static R call(c10::DispatchKeySet keys, A... arguments) {
    Frame* f = C10_LIKELY(!top_frame) ? nullptr : kernel->watching(top_frame, nullptr);
    if (!f) return Known::redispatch(keys_below(keys), arguments...);
    torch::jit::Stack stack = c10::impl::boxArgs<A...>(arguments...);
    kernel->call(f, keys_below(keys), &stack);
    return c10::impl::PopResult<R>::call(stack);
  }

  static torch::CppFunction make(Kernel new_kernel) {
    kernel = std::move(new_kernel);
    return torch::CppFunction(TORCH_FN(call));
  }
};

}  // namespace storage_ops
