// What a walk over the surroundings of a call has read, to tell whether a later walk would find the
// same. storage_ops/checkpoint/state/known_walks.py says how it is used.
//
// A `Walk` owns no object of the model, or it would keep models alive. Its pointers are followed
// only after the place that holds the object was found to have it still. An object that was freed
// meanwhile, and another one of the same type at its address, are then the same to a walk: what is
// in them is compared as well.
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace storage_ops {
namespace {

enum Way : long {
  kItems,       // of a list, tuple or dictionary
  kVars,        // of the `__dict__` of an object
  kAttributes,  // some, of an object whose class runs no Python code for them
  kNames,       // some, of a dictionary
};

struct Value {
  Ref key;                     // null in a list or tuple
  PyObject* object = nullptr;  // null if there is none
  Ref type;
  bool is_plain = false;  // nothing is in it, so another such value makes no difference to a walk
};

struct Place {
  Way way;
  PyObject* holder;
  Ref type;           // of the holder
  PyObject* dict;     // of `kVars`
  bool is_restored;   // for the recompute, so each value in it counts
  size_t begin, end;  // its values
};

struct Walk {
  std::vector<Place> places;
  std::vector<Value> values;
  std::vector<Ref> owned;  // functions and dictionaries of classes, which caches own anyway
  std::vector<std::vector<PyObject*>> groups;
  size_t roots = 0;  // values without a place, which come first
};

// Objects that a walk has read, as they were before one call.
struct Seen {
  ~Seen() {
    for (PyObject* each : values) Py_XDECREF(each);
  }
  Ref walk;
  std::vector<PyObject*> values;  // owned
};

PyTypeObject* seen_type = nullptr;

PyObject* type_object(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

Ref dict_of(PyObject* object) {
  PyObject* found = PyObject_GenericGetDict(object, nullptr);
  if (!found) PyErr_Clear();
  return Ref(found);
}

Ref attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (!found) PyErr_Clear();  // a variable that nothing is bound to
  return Ref(found);
}

// Calls `each` with the key and the value of every item; stops where it returns false.
template <typename F>
bool each_item(PyObject* holder, F&& each) {
  if (PyDict_Check(holder)) {
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(holder, &position, &key, &value)) {
      if (!each(key, value)) return false;
    }
    return true;
  }
  const bool is_list = PyList_Check(holder);
  const Py_ssize_t size = is_list ? PyList_Size(holder) : PyTuple_Size(holder);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = is_list ? PyList_GetItem(holder, i) : PyTuple_GetItem(holder, i);
    if (!each(nullptr, value)) return false;
  }
  return true;
}

// Calls `each` with the index and the present object of every value; stops where it returns false,
// or where a place has other keys or another number of them.
template <typename F>
bool each_value(const Walk& walk, F&& each) {
  for (const Place& place : walk.places) {
    if (type_object(place.holder) != place.type.get()) return false;
    size_t at = place.begin;
    if (place.way == kItems || place.way == kVars) {
      PyObject* held = place.way == kVars ? place.dict : place.holder;
      if (place.way == kVars && dict_of(place.holder).get() != held) return false;
      const bool same = each_item(held, [&](PyObject* key, PyObject* value) {
        return at < place.end && walk.values[at].key.get() == key && each(at++, value);
      });
      if (!same || at != place.end) return false;
    }
    for (; at < place.end; ++at) {
      PyObject* key = walk.values[at].key.get();
      if (place.way == kAttributes) {
        const Ref value = attribute(place.holder, key);
        if (!each(at, value.get())) return false;
      } else if (!each(at, PyDict_GetItemWithError(place.holder, key))) {
        return false;
      }
    }
  }
  return true;
}

bool is_number_or_text(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object);
}

// Returns true if a walk that comes to this object goes on as it did.
bool is_alike(const Value& before, PyObject* now) {
  if (!now || !before.object) return now == before.object;
  if (!before.is_plain) return now == before.object && type_object(now) == before.type.get();
  return type_object(now) == before.type.get() || is_number_or_text(now);
}

// ---- recording --------------------------------------------------------------------------------

class Recorder {
 public:
  Recorder(Walk& walk, PyObject* kind_of) : walk_(walk), kind_of_(kind_of) {}

  void add_root(PyObject* object) {
    add(nullptr, object);
    ++walk_.roots;
  }

  // Adds a read `(way, holder, names, is_restored, is_owned)`; returns false if it is of an object
  // that no earlier read has found.
  bool add_read(PyObject* read) {
    long way;
    PyObject *holder, *keys;
    int is_restored, is_owned;
    if (!PyArg_ParseTuple(read, "lOOpp", &way, &holder, &keys, &is_restored, &is_owned)) {
      throw PythonError();
    }
    if (is_owned) {
      walk_.owned.push_back(Ref::to(holder));
    } else if (known_.count(holder) == 0) {
      return false;
    }
    known_.insert(holder);
    Place place{
        static_cast<Way>(way), holder, Ref::to(type_object(holder)), nullptr, is_restored != 0,
        walk_.values.size(),   0};
    if (way == kItems || way == kVars) {
      PyObject* items = holder;
      if (way == kVars) {
        place.dict = items = dict_of(holder).get();  // the holder owns it
        if (!items) return false;
        known_.insert(items);
      }
      each_item(items, [&](PyObject* key, PyObject* value) { return add(key, value); });
    } else {
      each_item(keys, [&](PyObject*, PyObject* key) {
        if (way == kNames) return add(key, PyDict_GetItemWithError(holder, key));
        const Ref value = attribute(holder, key);
        return add(key, value.get());
      });
    }
    place.end = walk_.values.size();
    walk_.places.push_back(std::move(place));
    return true;
  }

  // Adds a list of objects that `Seen` returns; returns false if a read has not found each.
  bool add_group(PyObject* objects) {
    std::vector<PyObject*> found;
    const bool known = each_item(objects, [&](PyObject*, PyObject* each) {
      found.push_back(each);
      return known_.count(each) != 0;
    });
    walk_.groups.push_back(std::move(found));
    return known;
  }

 private:
  bool add(PyObject* key, PyObject* object) {
    Value value;
    if (key) value.key = Ref::to(key);
    value.object = object;
    if (object) {
      known_.insert(object);
      value.type = Ref::to(type_object(object));
      value.is_plain = is_plain(value.type.get());
    }
    walk_.values.push_back(std::move(value));
    return true;
  }

  bool is_plain(PyObject* type) {
    const auto known = kinds_.find(type);
    if (known != kinds_.end()) return known->second;
    const Ref kind = owned(PyObject_CallFunctionObjArgs(kind_of_, type, nullptr));
    return kinds_[type] = PyLong_AsLong(kind.get()) == 0;
  }

  Walk& walk_;
  PyObject* kind_of_;
  std::unordered_set<PyObject*> known_;
  std::unordered_map<PyObject*, bool> kinds_;
};

// record(kind_of, roots, reads, groups): a Walk, or None if a read is of an unknown object.
PyObject* new_walk(PyTypeObject* type, PyObject* given, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *kind_of, *roots, *reads, *groups;
    if (!PyArg_ParseTuple(given, "OOOO", &kind_of, &roots, &reads, &groups)) return nullptr;
    Walk* walk = nullptr;
    Ref made = owned(make(type, walk));
    Recorder recorder(*walk, kind_of);
    each_item(roots, [&](PyObject*, PyObject* root) {
      recorder.add_root(root);
      return true;
    });
    const bool known =
        each_item(reads, [&](PyObject*, PyObject* read) { return recorder.add_read(read); }) &&
        each_item(groups, [&](PyObject*, PyObject* group) { return recorder.add_group(group); });
    return known ? made.release() : none();
  });
}

// ---- another call -----------------------------------------------------------------------------

// see(roots): what the walk would read now, or None if it would go another way.
PyObject* see(PyObject* self, PyObject* roots) {
  return guarded([&] {
    const auto& walk = held<Walk>(self);
    Seen* seen = nullptr;
    Ref made = owned(make(seen_type, seen));
    seen->walk = Ref::to(self);
    seen->values.resize(walk.values.size(), nullptr);
    const auto keep = [&](size_t at, PyObject* now) {
      if (!is_alike(walk.values[at], now)) return false;
      Py_XINCREF(now);
      seen->values[at] = now;
      return true;
    };
    size_t at = 0;
    const bool same = each_item(
        roots, [&](PyObject*, PyObject* root) { return at < walk.roots && keep(at++, root); });
    if (!same || at != walk.roots || !each_value(walk, keep)) return none();
    return made.release();
  });
}

// is_unchanged(): whether all that is restored for a recompute is what it was.
PyObject* is_unchanged(PyObject* self, PyObject*) {
  return guarded([&] {
    const auto& seen = held<Seen>(self);
    const auto& walk = held<Walk>(seen.walk.get());
    size_t place = 0;
    const bool same = each_value(walk, [&](size_t at, PyObject* now) {
      while (walk.places[place].end <= at) ++place;
      if (now == seen.values[at]) return true;
      return !walk.places[place].is_restored && is_alike(walk.values[at], now);
    });
    return PyBool_FromLong(same);
  });
}

// contents(container): what a container held before the call, a dictionary or a list. None if the
// walk has not read it.
PyObject* contents(PyObject* self, PyObject* container) {
  return guarded([&]() -> PyObject* {
    const auto& seen = held<Seen>(self);
    const auto& walk = held<Walk>(seen.walk.get());
    for (const Place& place : walk.places) {
      if (place.holder != container && place.dict != container) continue;
      const bool is_dict = PyDict_Check(container);
      Ref made = owned(is_dict ? PyDict_New() : PyList_New(0));
      for (size_t at = place.begin; at < place.end; ++at) {
        PyObject* key = walk.values[at].key.get();
        PyObject* value = seen.values[at];
        const int failed =
            is_dict ? PyDict_SetItem(made.get(), key, value) : PyList_Append(made.get(), value);
        if (failed) throw PythonError();
      }
      return made.release();
    }
    return none();
  });
}

// group(number): a list of the objects that the walk was given under this number.
PyObject* group(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& walk = held<Walk>(held<Seen>(self).walk.get());
    Ref made = owned(PyList_New(0));
    for (PyObject* each : walk.groups.at(PyLong_AsSize_t(number))) {
      if (PyList_Append(made.get(), each) < 0) throw PythonError();
    }
    return made.release();
  });
}

PyObject* noted(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& walk = held<Walk>(held<Seen>(self).walk.get());
    return note_parameters(walk.groups.at(PyLong_AsSize_t(number)));
  });
}

PyMethodDef walk_methods[] = {{"see", see, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyMethodDef seen_methods[] = {{"is_unchanged", is_unchanged, METH_NOARGS, nullptr},
                              {"contents", contents, METH_O, nullptr},
                              {"group", group, METH_O, nullptr},
                              {"noted", noted, METH_O, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_walk(PyObject* module) {
  PyType_Slot walk[] = {{Py_tp_new, slot(new_walk)},
                        {Py_tp_dealloc, slot(destroy<Walk>)},
                        {Py_tp_methods, walk_methods},
                        {0, nullptr}};
  PyType_Slot seen[] = {
      {Py_tp_dealloc, slot(destroy<Seen>)}, {Py_tp_methods, seen_methods}, {0, nullptr}};
  PyTypeObject* type = type_of("storage_ops._saved_tensors.Walk", sizeof(Object<Walk>), 0, walk);
  seen_type = type_of("storage_ops._saved_tensors.Seen", sizeof(Object<Seen>),
                      Py_TPFLAGS_DISALLOW_INSTANTIATION, seen);
  return type && seen_type &&
         PyModule_AddObject(module, "Walk", reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace storage_ops
