#include "copied_buffers.h"

#include "saved_tensors.h"
#include "unseen.h"

namespace storage_ops {
namespace {

// Returns an alias, whose writes do not increment the version of the tensor.
at::Tensor memory_of(const at::Tensor& t) { return t.variable_data(); }

void write(const at::Tensor& t, const at::Tensor& contents, int64_t version) {
  const at::Tensor memory = memory_of(t);
  if (memory.sizes() == contents.sizes() && memory.scalar_type() == contents.scalar_type()) {
    memory.copy_(contents);
  } else {  // resized, for example by a quantization observer in its first call
    t.set_data(contents.clone());
  }
  c10::VariableVersion counter = t.unsafeGetTensorImpl()->version_counter();  // shared
  counter.set_version(version);
}

}  // namespace

bool CopiedBuffers::copy(const std::vector<PyObject*>& buffers, PyObject* trusted) {
  copies_.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    c10::TensorImpl* impl = impl_of(buffers[i]);
    at::Tensor t = is_plain(impl) ? tensor_of(impl) : at::Tensor();
    const bool is_usual = t.defined() && (t.is_cpu() || t.is_cuda()) && !t.requires_grad() &&
                          !t.is_quantized() && t.is_non_overlapping_and_dense();
    if (!is_usual || has_producer(t)) return false;
    Copy copy;
    copy.version = copy.after = t._version();
    copy.is_trusted = PyTuple_GetItem(trusted, static_cast<Py_ssize_t>(i)) == Py_True;
    const Unseen guard;
    copy.before = memory_of(t).clone();
    copy.buffer = std::move(t);
    copies_.push_back(std::move(copy));
  }
  return true;
}

void CopiedBuffers::finish() {
  for (Copy& copy : copies_) copy.after = copy.buffer._version();
  is_running_ = false;
}

void CopiedBuffers::restore() {
  const Unseen guard;
  for (Copy& copy : copies_) {
    copy.now = copy.buffer._version();
    if (copy.is_trusted && copy.now == copy.version) continue;
    copy.present = memory_of(copy.buffer).clone();
    const int64_t version = is_running_ ? copy.version : copy.version + copy.now - copy.after;
    write(copy.buffer, copy.before, version);
  }
}

void CopiedBuffers::put_back() {
  const Unseen guard;
  for (Copy& copy : copies_) {
    if (!copy.present.defined()) continue;
    write(copy.buffer, copy.present, copy.now);
    copy.present.reset();
  }
}

Ref CopiedBuffers::to_python() const {
  Ref list = owned(PyList_New(0));
  for (const Copy& copy : copies_) {
    const Ref t = owned(THPVariable_Wrap(copy.buffer)),
              before = owned(THPVariable_Wrap(copy.before));
    const Ref parts = owned(
        Py_BuildValue("OOLLO", t.get(), before.get(), static_cast<long long>(copy.version),
                      static_cast<long long>(copy.after), copy.is_trusted ? Py_True : Py_False));
    append(list, parts);
  }
  return list;
}

}  // namespace storage_ops
