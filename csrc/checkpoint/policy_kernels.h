// Kernels that intercept the ops of a policy while a region runs in this thread.
//
// The kernels have the dispatch key ADInplaceOrView: below autograd, above Python modes and
// subclasses. torch has no kernels there for functional ops, so other ops have no overhead. If no
// region runs, a kernel calls the next one. Views and ops that write have kernels of torch for this
// key, which must not be replaced.
#pragma once
#include "policy_state.h"
#include "saved_tensors.h"
// Python.h, which it includes, comes first.
#include <ATen/Context.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace storage_ops {

// ---- saved results ------------------------------------------------------------------------------

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
  if ((*result)->is_modified()) {
    cursor.warn_of_modified(op->name);
    return run();
  }
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
