// Objects of Python in C++, with the stable ABI of CPython.
#pragma once
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
// Python.h comes first.
#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <string>
#include <utility>

namespace storage_ops {

// A reference to a Python object.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref to(PyObject* borrowed) {
    Py_INCREF(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Thrown when a Python error is set. The functions that CPython calls then return null.
struct PythonError : std::exception {};

inline Ref owned(PyObject* result) {
  if (!result) throw PythonError();
  return Ref(result);
}

// Runs the body of a function that CPython calls. Turns C++ exceptions into Python errors.
template <typename F>
PyObject* guarded(F&& run) {
  try {
    return run();
  } catch (const PythonError&) {
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline void append(const Ref& list, const Ref& item) {
  if (PyList_Append(list.get(), item.get()) < 0) throw PythonError();
}

inline PyObject* none() { return Ref::to(Py_None).release(); }

struct WithGil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

// Lets other threads have the GIL while this object lives.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

// The Python error that is set. It is dropped if it is not restored.
class Error {
 public:
  Error() {
    PyObject* parts[3];
    PyErr_Fetch(&parts[0], &parts[1], &parts[2]);
    PyErr_NormalizeException(&parts[0], &parts[1], &parts[2]);
    if (parts[2]) PyException_SetTraceback(parts[1], parts[2]);
    for (int i = 0; i < 3; ++i) parts_[i] = Ref(parts[i]);
  }
  PyObject* kind() const { return parts_[0].get(); }
  PyObject* value() const { return parts_[1].get(); }
  PyObject* trace() const { return parts_[2] ? parts_[2].get() : Py_None; }
  bool is_a(PyObject* kind) const {
    return PyErr_GivenExceptionMatches(parts_[0].get(), kind) != 0;
  }
  void restore() { PyErr_Restore(parts_[0].release(), parts_[1].release(), parts_[2].release()); }
  [[noreturn]] void raise() {
    restore();
    throw PythonError();
  }

 private:
  Ref parts_[3];
};

// Keeps the Python error that is set, if any, while a destructor calls Python.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&kind_, &value_, &trace_); }
  ~KeptError() { PyErr_Restore(kind_, value_, trace_); }
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;

 private:
  PyObject *kind_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// Returns the message of the Python error that is set, and clears the error.
inline std::string message_of_python() {
  const WithGil gil;
  PyObject *kind = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&kind, &error, &trace);
  const Ref kinds(kind), errors(error), traces(trace);
  const Ref text(error ? PyObject_Str(error) : nullptr);
  Py_ssize_t size = 0;
  const char* message = text ? PyUnicode_AsUTF8AndSize(text.get(), &size) : nullptr;
  PyErr_Clear();
  return message ? std::string(message, static_cast<size_t>(size)) : "an error of Python";
}

// ---- types ------------------------------------------------------------------------------------

template <typename T>
struct Object {
  PyObject_HEAD T* data;
};

template <typename T>
T& data_of(PyObject* self) {
  return *reinterpret_cast<Object<T>*>(self)->data;
}

template <typename T>
PyObject* make(PyTypeObject* type, T*& data) {
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);
  if (self) data = reinterpret_cast<Object<T>*>(self)->data = new T;
  return self;
}

template <typename T>
void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object<T>*>(self)->data;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

template <typename F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

inline PyTypeObject* type_of(const char* name, int size, unsigned flags, PyType_Slot* slots) {
  PyType_Spec spec{name, size, 0, Py_TPFLAGS_DEFAULT | flags, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// Adds a type that Python code can create to the module, under the last part of `name`. Returns the
// type, or null if a Python error is set. `name` must be a literal.
template <typename T>
PyTypeObject* add_type(PyObject* module, const char* name, PyType_Slot* slots) {
  PyTypeObject* type = type_of(name, sizeof(Object<T>), 0, slots);
  const char* last = std::strrchr(name, '.') + 1;
  const bool added =
      type && PyModule_AddObject(module, last, reinterpret_cast<PyObject*>(type)) == 0;
  return added ? type : nullptr;
}

}  // namespace storage_ops
