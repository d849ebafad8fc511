// The state around a call whose walk is known, and which usually is the same at the recompute. It
// is noted and compared without Python code. storage_ops/checkpoint/state/snapshot.py explains it.
#include "copied_buffers.h"
#include "descriptions.h"
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Generator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace storage_ops {
namespace {

struct RandomState {
  at::Generator generator;
  at::Tensor state;    // before the call
  at::Tensor present;  // before `__enter__`; undefined outside of a recompute

  void restore() {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    present = generator.get_state();
    generator.set_state(state);
  }

  void put_back() {
    if (!present.defined()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(present);
    present.reset();
  }
};

struct Snapshot {
  Ref seen, noted;
  uint64_t settings = 0;
  int gpu = -1;  // the current one
  std::vector<RandomState> random;
  CopiedBuffers buffers;
  bool is_entered = false, had_grad = false;
};

bool is_any_mode_active() {
  return at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
         at::impl::PythonTorchFunctionTLS::get_disabled_state() !=
             at::impl::TorchFunctionDisabledState::ENABLED ||
         c10::impl::TorchDispatchModeTLS::stack_len() != 0;
}

int current_gpu(bool has_gpus) {
  return has_gpus ? c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index() : -1;
}

void note_random(Snapshot& snapshot, const c10::Device& device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  at::Tensor state = generator.get_state();
  snapshot.random.push_back({std::move(generator), std::move(state), {}});
}

// Snapshot(walk, roots, preserves_random, gpus, trusted): notes the state before a call, and copies
// the buffers. Returns None if the walk would differ, if a mode is active, or if Python must copy a
// buffer.
PyObject* new_snapshot(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *walk, *roots, *trusted;
    int preserves_random, gpus;
    if (!PyArg_ParseTuple(arguments, "OOpiO", &walk, &roots, &preserves_random, &gpus, &trusted)) {
      return nullptr;
    }
    Ref seen = is_any_mode_active() ? Ref(none()) : owned(see_walk(walk, roots));
    if (seen.get() == Py_None) return none();
    Snapshot* snapshot = nullptr;
    Ref object = owned(make(type, snapshot));
    if (!snapshot->buffers.copy(buffers_of(seen.get()), trusted)) return none();
    snapshot->noted = owned(note_parameters(seen.get()));
    snapshot->seen = std::move(seen);
    snapshot->settings = settings();
    snapshot->gpu = current_gpu(gpus > 0);
    if (preserves_random) {
      note_random(*snapshot, c10::kCPU);
      for (int i = 0; i < gpus; ++i) {
        note_random(*snapshot, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(i)));
      }
    }
    return object.release();
  });
}

// is_unwritten(): returns true if no parameter was written since.
PyObject* is_unwritten(PyObject* self, PyObject*) {
  return PyBool_FromLong(are_unwritten(data_of<Snapshot>(self).noted.get()));
}

// is_unchanged(): returns true if the call has changed nothing that a recompute restores.
PyObject* get_unchanged(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(is_unchanged(self)); });
}

// is_current(): returns true if the present state is the noted one, but for the random state and
// grad mode, which `__enter__` restores.
PyObject* get_current(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(is_current(self)); });
}

void put_back(Snapshot& snapshot) {
  for (RandomState& each : snapshot.random) each.put_back();
  snapshot.buffers.put_back();
  if (std::exchange(snapshot.is_entered, false)) c10::GradMode::set_enabled(snapshot.had_grad);
}

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& snapshot = data_of<Snapshot>(self);
    try {
      for (RandomState& each : snapshot.random) each.restore();
      snapshot.buffers.restore();
    } catch (...) {
      put_back(snapshot);
      throw;
    }
    snapshot.had_grad = c10::GradMode::is_enabled();
    snapshot.is_entered = true;
    c10::GradMode::set_enabled(true);
    return Ref::to(self).release();
  });
}

// Puts back the state from before `__enter__`, unless that was done before.
PyObject* leave(PyObject* self, PyObject*) {
  return guarded([&] {
    put_back(data_of<Snapshot>(self));
    return none();
  });
}

PyObject* finish(PyObject* self, PyObject*) {
  finish_snapshot(self);
  return none();
}

// copies(): returns the arguments of `Contents.of_library` for each buffer.
PyObject* copies(PyObject* self, PyObject*) {
  return guarded([&] { return data_of<Snapshot>(self).buffers.to_python().release(); });
}

// random(): returns the noted states of random generators as pairs of a device and a tensor.
PyObject* random(PyObject* self, PyObject*) {
  return guarded([&] {
    Ref pairs = owned(PyList_New(0));
    for (const RandomState& each : data_of<Snapshot>(self).random) {
      const Ref state = owned(THPVariable_Wrap(each.state));
      const std::string device = each.generator.device().str();
      const Ref pair = owned(Py_BuildValue("sO", device.c_str(), state.get()));
      append(pairs, pair);
    }
    return pairs.release();
  });
}

PyObject* get_seen(PyObject* self, void*) {
  return Ref::to(data_of<Snapshot>(self).seen.get()).release();
}

PyObject* get_noted(PyObject* self, void*) {
  return Ref::to(data_of<Snapshot>(self).noted.get()).release();
}

PyObject* get_gpu(PyObject* self, void*) { return PyLong_FromLong(data_of<Snapshot>(self).gpu); }

PyObject* get_settings(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(data_of<Snapshot>(self).settings);
}

PyMethodDef methods[] = {{"is_unwritten", is_unwritten, METH_NOARGS, nullptr},
                         {"is_unchanged", get_unchanged, METH_NOARGS, nullptr},
                         {"is_current", get_current, METH_NOARGS, nullptr},
                         {"finish", finish, METH_NOARGS, nullptr},
                         {"copies", copies, METH_NOARGS, nullptr},
                         {"random", random, METH_NOARGS, nullptr},
                         {"put_back", leave, METH_NOARGS, nullptr},
                         {"__enter__", enter, METH_NOARGS, nullptr},
                         {"__exit__", leave, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyGetSetDef members[] = {{"seen", get_seen, nullptr, nullptr, nullptr},
                         {"noted", get_noted, nullptr, nullptr, nullptr},
                         {"gpu", get_gpu, nullptr, nullptr, nullptr},
                         {"settings", get_settings, nullptr, nullptr, nullptr},
                         {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

bool is_unchanged(PyObject* object) {
  const auto& snapshot = data_of<Snapshot>(object);
  return are_unwritten(snapshot.noted.get()) && is_walk_unchanged(snapshot.seen.get());
}

bool is_current(PyObject* object) {
  const auto& snapshot = data_of<Snapshot>(object);
  return !is_any_mode_active() && settings() == snapshot.settings &&
         current_gpu(snapshot.gpu >= 0) == snapshot.gpu && are_unwritten(snapshot.noted.get()) &&
         need_the_same_gradients(snapshot.noted.get()) && is_walk_unchanged(snapshot.seen.get());
}

void finish_snapshot(PyObject* object) { data_of<Snapshot>(object).buffers.finish(); }

void put_back(PyObject* object) { put_back(data_of<Snapshot>(object)); }

bool add_snapshot(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, slot(new_snapshot)},
                         {Py_tp_dealloc, slot(destroy<Snapshot>)},
                         {Py_tp_methods, methods},
                         {Py_tp_getset, members},
                         {0, nullptr}};
  return add_type<Snapshot>(module, "storage_ops._saved_tensors.Snapshot", slots) != nullptr;
}

}  // namespace storage_ops
