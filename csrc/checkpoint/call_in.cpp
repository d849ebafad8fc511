// Calls a function inside of context managers, as nested `with` statements do, without a Python
// frame for each of them.
#include "call_in.h"

#include "saved_results.h"

namespace storage_ops {
namespace {

// The error that code of Python sees as the one being handled, while context managers end.
class Handled {
 public:
  Handled() { PyErr_GetExcInfo(&before_[0], &before_[1], &before_[2]); }
  ~Handled() { PyErr_SetExcInfo(before_[0], before_[1], before_[2]); }

  static void set(PyObject* const error[3]) {
    PyObject* own[3];
    for (int i = 0; i < 3; ++i) own[i] = Ref::to(error[i] ? error[i] : Py_None).release();
    PyErr_SetExcInfo(own[0], own[1], own[2]);
  }

 private:
  PyObject* before_[3];
};

PyObject* method_of(PyObject* object, PyObject* name) {
  return PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(object)), name);
}

// Ends context managers, innermost first. Returns the result, or null with the error that is left.
PyObject* leave(const std::vector<Ref>& contexts, const std::vector<Ref>& exits, Ref result) {
  for (size_t i = exits.size(); i-- > 0;) {
    PyObject *context = contexts[i].get(), *exit = exits[i].get();
    if (result) {
      const Ref done(
          PyObject_CallFunctionObjArgs(exit, context, Py_None, Py_None, Py_None, nullptr));
      if (!done) result = Ref();
      continue;
    }
    PyObject* error[3];
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    PyErr_NormalizeException(&error[0], &error[1], &error[2]);
    if (error[2]) PyException_SetTraceback(error[1], error[2]);
    const Ref kind(error[0]), value(error[1]), trace(error[2]);
    int is_suppressed = -1;
    {
      const Handled handled;
      Handled::set(error);
      PyObject* traceback = trace ? trace.get() : Py_None;
      const Ref done(
          PyObject_CallFunctionObjArgs(exit, context, kind.get(), value.get(), traceback, nullptr));
      if (done) is_suppressed = PyObject_IsTrue(done.get());
    }
    if (is_suppressed < 0) continue;  // with an error of its own
    if (is_suppressed) {
      result = Ref(none());
    } else {
      PyErr_Restore(Ref::to(kind.get()).release(), Ref::to(value.get()).release(),
                    trace ? Ref::to(trace.get()).release() : nullptr);
    }
  }
  return result.release();
}

// call_in(contexts, fn, args, kwargs): the same, for the context managers of a tuple.
PyObject* call_in_tuple(PyObject*, PyObject* arguments) {
  PyObject *contexts, *fn, *args, *kwargs;
  if (!PyArg_ParseTuple(arguments, "O!OO!O!", &PyTuple_Type, &contexts, &fn, &PyTuple_Type, &args,
                        &PyDict_Type, &kwargs)) {
    return nullptr;
  }
  std::vector<Ref> all;
  for (Py_ssize_t i = 0; i < PyTuple_Size(contexts); ++i) {
    all.push_back(Ref::to(PyTuple_GetItem(contexts, i)));
  }
  return call_in(all, fn, args, kwargs);
}

PyMethodDef functions[] = {{"call_in", call_in_tuple, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* call_in(const std::vector<Ref>& contexts, PyObject* fn, PyObject* args,
                  PyObject* kwargs) {
  static PyObject* const enter_name = PyUnicode_InternFromString("__enter__");
  static PyObject* const exit_name = PyUnicode_InternFromString("__exit__");
  std::vector<Ref> exits;  // of those that were entered
  for (const Ref& context : contexts) {
    const Ref enter(method_of(context.get(), enter_name));
    Ref exit(enter ? method_of(context.get(), exit_name) : nullptr);
    const Ref value(exit ? PyObject_CallFunctionObjArgs(enter.get(), context.get(), nullptr)
                         : nullptr);
    if (!value) return leave(contexts, exits, Ref());
    exits.push_back(std::move(exit));
  }
  return leave(contexts, exits, Ref(PyObject_Call(fn, args, kwargs)));
}

bool add_call_in(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace storage_ops
