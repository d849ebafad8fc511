// Copies of buffers from before a call. The recompute starts from them, and afterwards the buffers
// get their present contents back. storage_ops/checkpoint/state/contents.py does the same in
// Python, also for larger and other tensors.
#pragma once
#include "descriptions.h"
// Python.h, which it includes, comes first.
#include <ATen/core/Tensor.h>

#include <vector>

namespace storage_ops {

class CopiedBuffers {
 public:
  // Copies buffers before the call. `trusted` is a tuple that says for each buffer whether every
  // write increments its version. Returns false if Python must copy one of them. Needs the GIL.
  bool copy(const std::vector<PyObject*>& buffers, PyObject* trusted);

  // Notes that the call has ended.
  void finish();

  // Writes the copies into the buffers. The version becomes that of the call, plus the number of
  // writes since it ended.
  void restore();

  // Writes the contents from before `restore`, unless that was done.
  void put_back();

  // Returns the arguments of `Contents.of_library`, for each buffer a tuple. Needs the GIL.
  Ref to_python() const;

 private:
  struct Copy {
    at::Tensor buffer, before;
    at::Tensor present;  // from before `restore`; undefined outside of a recompute
    int64_t version = 0, after = 0, now = 0;
    bool is_trusted = false;
  };

  std::vector<Copy> copies_;
  bool is_running_ = true;
};

}  // namespace storage_ops
