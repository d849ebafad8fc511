// Calls a function inside of context managers, as nested `with` statements do, without a Python
// frame for each of them.
#include "call_in.h"

#include "saved_results.h"

namespace storage_ops {
namespace {

// Lets code of Python see an error as the one being handled, while a context manager ends.
class Handled {
 public:
  explicit Handled(const Error& error) {
    PyErr_GetExcInfo(&before_[0], &before_[1], &before_[2]);
    PyErr_SetExcInfo(Ref::to(error.kind()).release(), Ref::to(error.value()).release(),
                     Ref::to(error.trace()).release());
  }
  ~Handled() { PyErr_SetExcInfo(before_[0], before_[1], before_[2]); }

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
    Error error;
    int is_suppressed = -1;
    {
      const Handled handled(error);
      const Ref done(PyObject_CallFunctionObjArgs(exit, context, error.kind(), error.value(),
                                                  error.trace(), nullptr));
      if (done) is_suppressed = PyObject_IsTrue(done.get());
    }
    if (is_suppressed > 0) result = Ref(none());
    if (is_suppressed == 0) error.restore();
    // Otherwise the context manager has set an error of its own.
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
