// Notes the reads of a walk over the surroundings of a call, to tell if a later walk would read the
// same. storage_ops/checkpoint/state/known_walks.py explains walks.
//
// A `Walk` owns no object of the model, because it would keep the model alive. A pointer is
// followed only after a check that its place still references the object. If an object was freed,
// another object of the same type may have its address. This does no harm, because the contents of
// the object are compared too.
//
// A temporary object, such as a nested function, may be another one in each call. Only its contents
// are compared, and pointers to it are not followed: a later walk finds it where this one did.
#include "saved_results.h"
// Python.h, which it includes, comes first.
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

namespace storage_ops {
namespace {

enum Kind : long {
  kItems,       // all items of a list, tuple, dictionary, set or deque
  kVars,        // all items of the `__dict__` of an object
  kAttributes,  // some attributes of an object whose class runs no Python code for them
  kNames,       // some items of a dictionary
};

constexpr size_t kNone = std::numeric_limits<size_t>::max();

struct Value {
  Ref key;                     // null if the container is no dictionary
  PyObject* object = nullptr;  // null if there is none
  Ref type;
  bool is_plain = false;  // a walk reads nothing in it, so another plain value does not matter
  size_t first = kNone;   // of a temporary object: the first value that is this object
};

struct Place {
  Kind kind;
  PyObject* holder;
  size_t found = kNone;  // of a temporary holder: the first value that is this object
  Ref type;              // of the holder
  PyObject* dict;        // the `__dict__`, if the kind is `kVars`
  bool is_restored;      // the recompute restores its values, so each change matters
  size_t begin, end;     // its values
};

struct Walk {
  std::vector<Place> places;
  std::vector<Value> values;
  std::vector<Ref> owned;  // functions, and dictionaries of classes, which caches own too
  std::vector<std::vector<PyObject*>> groups;
  std::unordered_map<PyObject*, size_t> temporary;  // objects, and the first value that is each one
  size_t roots = 0;  // the number of values without a place, which come first
};

// The objects that a known walk has read, before one call.
struct Seen {
  ~Seen() {
    for (PyObject* value : values) Py_XDECREF(value);
  }
  Ref walk;
  std::vector<PyObject*> values;  // owned
};

constexpr size_t kParameters = 1, kBuffers = 2;  // the numbers of their groups

PyTypeObject* seen_type = nullptr;

PyObject* type_object(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)); }

Ref dict_of(PyObject* object) {
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (!dict) PyErr_Clear();
  return Ref(dict);
}

Ref attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (!value) PyErr_Clear();  // an empty closure cell
  return Ref(value);
}

// Calls `each` with the key and the value of every item, until it returns false.
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
  if (!PyList_Check(holder) && !PyTuple_Check(holder)) {  // a set or a deque
    const Ref items = owned(PyObject_GetIter(holder));
    while (const Ref value{PyIter_Next(items.get())}) {
      if (!each(nullptr, value.get())) return false;
    }
    if (PyErr_Occurred()) throw PythonError();
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

PyObject* holder_of(const Place& place, const std::vector<PyObject*>& values) {
  return place.found == kNone ? place.holder : values[place.found];
}

// Calls `each` with the index and the present object of every value, until it returns false. Stops
// and returns false if the keys of a place differ. `values` has the objects of earlier values.
template <typename F>
bool each_value(const Walk& walk, const std::vector<PyObject*>& values, F&& each) {
  for (const Place& place : walk.places) {
    PyObject* holder = holder_of(place, values);
    if (type_object(holder) != place.type.get()) return false;
    size_t at = place.begin;
    if (place.kind == kItems || place.kind == kVars) {
      PyObject* items = place.kind == kVars ? place.dict : holder;
      if (place.kind == kVars && dict_of(holder).get() != items) return false;
      const bool same = each_item(items, [&](PyObject* key, PyObject* value) {
        return at < place.end && walk.values[at].key.get() == key && each(at++, value);
      });
      if (!same || at != place.end) return false;
    }
    for (; at < place.end; ++at) {
      PyObject* key = walk.values[at].key.get();
      if (place.kind == kAttributes) {
        const Ref value = attribute(holder, key);
        if (!each(at, value.get())) return false;
      } else if (!each(at, PyDict_GetItemWithError(holder, key))) {
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

// Returns true if a walk continues in the same way with the object `now`.
bool is_equivalent(const Value& before, PyObject* now) {
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

  // Adds a read `(kind, holder, names, is_restored, is_owned, is_temporary)`. Returns false if no
  // earlier read has found the holder.
  bool add_read(PyObject* read) {
    long kind;
    PyObject *holder, *keys;
    int is_restored, is_owned, is_temporary;
    if (!PyArg_ParseTuple(read, "lOOppp", &kind, &holder, &keys, &is_restored, &is_owned,
                          &is_temporary)) {
      throw PythonError();
    }
    if (is_owned) {
      walk_.owned.push_back(Ref::to(holder));
    } else if (known_.count(holder) == 0) {
      return false;
    }
    const size_t found = known_.emplace(holder, kNone).first->second;
    Place place{};
    place.kind = static_cast<Kind>(kind);
    place.holder = holder;
    place.type = Ref::to(type_object(holder));
    place.is_restored = is_restored != 0;
    place.begin = walk_.values.size();
    if (is_temporary && found != kNone) {
      place.found = found;
      walk_.temporary.emplace(holder, found);
    }
    if (kind == kItems || kind == kVars) {
      PyObject* items = holder;
      if (kind == kVars) {
        place.dict = items = dict_of(holder).get();  // the holder owns it
        if (!items) return false;
        known_.emplace(items, kNone);
      }
      each_item(items, [&](PyObject* key, PyObject* value) { return add(key, value); });
    } else {
      each_item(keys, [&](PyObject*, PyObject* key) {
        if (kind == kNames) return add(key, PyDict_GetItemWithError(holder, key));
        const Ref value = attribute(holder, key);
        return add(key, value.get());
      });
    }
    place.end = walk_.values.size();
    walk_.places.push_back(std::move(place));
    return true;
  }

  // Adds a list of objects that `Seen` returns. Returns false if no read has found one of them.
  bool add_group(PyObject* objects) {
    std::vector<PyObject*> group;
    const bool known = each_item(objects, [&](PyObject*, PyObject* object) {
      group.push_back(object);
      return known_.count(object) != 0;
    });
    walk_.groups.push_back(std::move(group));
    return known;
  }

 private:
  bool add(PyObject* key, PyObject* object) {
    Value value;
    if (key) value.key = Ref::to(key);
    value.object = object;
    if (object) {
      known_.emplace(object, walk_.values.size());
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
  std::unordered_map<PyObject*, size_t> known_;  // the first value that is the object, or kNone
  std::unordered_map<PyObject*, bool> kinds_;
};

// Walk(kind_of, roots, reads, groups): returns a Walk, or None if an object was not read before.
PyObject* new_walk(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *kind_of, *roots, *reads, *groups;
    if (!PyArg_ParseTuple(arguments, "OOOO", &kind_of, &roots, &reads, &groups)) return nullptr;
    Walk* walk = nullptr;
    Ref object = owned(make(type, walk));
    Recorder recorder(*walk, kind_of);
    each_item(roots, [&](PyObject*, PyObject* root) {
      recorder.add_root(root);
      return true;
    });
    const bool known =
        each_item(reads, [&](PyObject*, PyObject* read) { return recorder.add_read(read); }) &&
        each_item(groups, [&](PyObject*, PyObject* group) { return recorder.add_group(group); });
    for (Value& value : walk->values) {
      const auto found = walk->temporary.find(value.object);
      if (found != walk->temporary.end()) value.first = found->second;
    }
    return known ? object.release() : none();
  });
}

// ---- later calls ------------------------------------------------------------------------------

// see(roots): returns the objects that the walk would read now, or None if the walk would differ.
PyObject* see(PyObject* self, PyObject* roots) {
  return guarded([&] { return see_walk(self, roots); });
}

// is_unchanged(): returns True if the values that a recompute restores have not changed.
PyObject* is_unchanged(PyObject* self, PyObject*) {
  return guarded([&] { return PyBool_FromLong(is_walk_unchanged(self)); });
}

// contents(container): returns a copy of a container's contents before the call, as a dictionary or
// a list. Returns None if the walk has not read the container.
PyObject* contents(PyObject* self, PyObject* container) {
  return guarded([&]() -> PyObject* {
    const auto& seen = data_of<Seen>(self);
    const auto& walk = data_of<Walk>(seen.walk.get());
    for (const Place& place : walk.places) {
      if (holder_of(place, seen.values) != container && place.dict != container) continue;
      const bool is_dict = PyDict_Check(container);
      Ref copy = owned(is_dict ? PyDict_New() : PyList_New(0));
      for (size_t at = place.begin; at < place.end; ++at) {
        PyObject* key = walk.values[at].key.get();
        PyObject* value = seen.values[at];
        const int failed =
            is_dict ? PyDict_SetItem(copy.get(), key, value) : PyList_Append(copy.get(), value);
        if (failed) throw PythonError();
      }
      return copy.release();
    }
    return none();
  });
}

// group(number): returns the objects of the group with this number as a list.
PyObject* group(PyObject* self, PyObject* number) {
  return guarded([&] {
    const auto& seen = data_of<Seen>(self);
    const auto& walk = data_of<Walk>(seen.walk.get());
    Ref list = owned(PyList_New(0));
    for (PyObject* object : walk.groups.at(PyLong_AsSize_t(number))) {
      const auto found = walk.temporary.find(object);
      if (found != walk.temporary.end()) object = seen.values[found->second];
      if (PyList_Append(list.get(), object) < 0) throw PythonError();
    }
    return list.release();
  });
}

PyObject* noted(PyObject* self, PyObject*) {
  return guarded([&] { return note_parameters(self); });
}

PyMethodDef walk_methods[] = {{"see", see, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyMethodDef seen_methods[] = {{"is_unchanged", is_unchanged, METH_NOARGS, nullptr},
                              {"contents", contents, METH_O, nullptr},
                              {"group", group, METH_O, nullptr},
                              {"noted", noted, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* see_walk(PyObject* self, PyObject* roots) {
  const auto& walk = data_of<Walk>(self);
  Seen* seen = nullptr;
  Ref object = owned(make(seen_type, seen));
  seen->walk = Ref::to(self);
  seen->values.resize(walk.values.size(), nullptr);
  const auto keep = [&](size_t at, PyObject* now) {
    const Value& before = walk.values[at];
    if (before.first == kNone) {
      if (!is_equivalent(before, now)) return false;
    } else if (!now || type_object(now) != before.type.get() ||
               (before.first != at && now != seen->values[before.first])) {
      return false;
    }
    Py_XINCREF(now);
    seen->values[at] = now;
    return true;
  };
  size_t at = 0;
  const bool same = each_item(
      roots, [&](PyObject*, PyObject* root) { return at < walk.roots && keep(at++, root); });
  if (!same || at != walk.roots || !each_value(walk, seen->values, keep)) return none();
  return object.release();
}

bool is_walk_unchanged(PyObject* self) {
  const auto& seen = data_of<Seen>(self);
  const auto& walk = data_of<Walk>(seen.walk.get());
  size_t place = 0;
  const bool same = each_value(walk, seen.values, [&](size_t at, PyObject* now) {
    while (walk.places[place].end <= at) ++place;
    if (now == seen.values[at]) return true;
    return !walk.places[place].is_restored && is_equivalent(walk.values[at], now);
  });
  return same;
}

PyObject* note_parameters(PyObject* seen) {
  const auto& walk = data_of<Walk>(data_of<Seen>(seen).walk.get());
  return note_parameters(walk.groups.at(kParameters));
}

const std::vector<PyObject*>& buffers_of(PyObject* seen) {
  return data_of<Walk>(data_of<Seen>(seen).walk.get()).groups.at(kBuffers);
}

bool add_walk(PyObject* module) {
  PyType_Slot walk[] = {{Py_tp_new, slot(new_walk)},
                        {Py_tp_dealloc, slot(destroy<Walk>)},
                        {Py_tp_methods, walk_methods},
                        {0, nullptr}};
  PyType_Slot seen[] = {
      {Py_tp_dealloc, slot(destroy<Seen>)}, {Py_tp_methods, seen_methods}, {0, nullptr}};
  seen_type = type_of("storage_ops._saved_tensors.Seen", sizeof(Object<Seen>),
                      Py_TPFLAGS_DISALLOW_INSTANTIATION, seen);
  return seen_type && add_type<Walk>(module, "storage_ops._saved_tensors.Walk", walk);
}

}  // namespace storage_ops
