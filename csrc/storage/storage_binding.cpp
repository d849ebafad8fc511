// Frees the bytes of a StorageImpl and binds other bytes into it, for exactly one torch minor.
//
// Shared bytes belong to an owner: a StorageImpl that no user sees, with the allocator's DataPtr.
// Every storage that shares the bytes has a DataPtr whose context is a Lease, a reference to the
// owner. Whichever storage is discarded, resized or destroyed first, the bytes live until the last
// one is done. No storage refers to another, so no reference cycle can leak.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/COW.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace {

using c10::StorageImpl;

// Held while an op reads or changes the DataPtr of a storage, because threads call these ops
// without the GIL. No DataPtr is destroyed while it is held, because a deleter may take the GIL or
// call an op.
std::mutex storages;

// Context of the DataPtr of a storage that shares its bytes.
struct Lease {
  c10::Storage owner;
  uint64_t id = next_id++;  // a storage that receives the bytes later has a larger id

  static inline uint64_t next_id = 1;

  static void release(void* context) { delete static_cast<Lease*>(context); }
};

// Context of the null DataPtr of a discarded storage, with the size to restore.
struct Vacancy {
  size_t nbytes;

  static void release(void* context) { delete static_cast<Vacancy*>(context); }
};

// Reads past the guard, which makes every ordinary access to a discarded storage raise an error.
c10::DataPtr& data_of(StorageImpl* storage) { return storage->_mutable_data_ptr_no_checks(); }

Lease* lease_of(StorageImpl* storage) {
  return data_of(storage).cast_context<Lease>(&Lease::release);
}

Vacancy* vacancy_of(StorageImpl* storage) {
  return data_of(storage).cast_context<Vacancy>(&Vacancy::release);
}

// torch 2.10 and 2.11 can set the guard but not remove it, so they never set it.
template <typename T, typename = void>
struct can_lift_guard : std::false_type {};
template <typename T>
struct can_lift_guard<T,
                      std::void_t<decltype(std::declval<T&>().clear_data_ptr_access_error_msg_())>>
    : std::true_type {};

template <typename T>
void lift_guard(T* storage) {
  if constexpr (can_lift_guard<T>::value) storage->clear_data_ptr_access_error_msg_();
}

// Makes every access to the bytes of a discarded tensor raise `message`, if torch supports it.
template <typename T>
void set_guard(T* storage, std::string message) {
  if constexpr (can_lift_guard<T>::value) {
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  }
}

// Returns the bytes that a strided tensor reaches into its storage, or 0 without elements.
size_t bytes_reached(const at::Tensor& t) {
  if (t.numel() == 0) return 0;
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return static_cast<size_t>(last + 1) * t.element_size();
}

bool lacks_bytes(const at::Tensor& self) {
  if (!self.has_storage()) return false;
  StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  return vacancy_of(storage) != nullptr || storage->nbytes() < bytes_reached(self);
}

bool is_discarded(const at::Tensor& self) {
  if (self.numel() == 0) return false;  // needs no bytes
  const std::lock_guard lock(storages);
  return lacks_bytes(self);
}

StorageImpl* storage_of(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.defined(), op, ": `", name, "` is undefined. Expected a tensor.");
  TORCH_CHECK(t.layout() == c10::kStrided && t.has_storage(), op, ": `", name, "` has layout ",
              t.layout(), ". Expected a strided tensor.");
  TORCH_CHECK(!t.is_quantized(), op, ": `", name, "` is quantized. Expected a plain tensor.");
  StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  TORCH_CHECK(!c10::impl::cow::is_cow_data_ptr(data_of(storage)), op, ": `", name,
              "` is a lazy copy (copy-on-write). Expected a tensor that owns its storage.");
  TORCH_CHECK(data_of(storage).get() || storage->nbytes() == 0, op, ": `", name,
              "` has no bytes of its own, it is a zero tensor or wraps others. Expected a plain "
              "tensor.");
  return storage;
}

// Raises an error for a storage that must keep its bytes because other code may use them. A storage
// without an allocator has bytes that torch did not allocate. A storage that `Tensor.numpy()`
// shows, or a pinned one, is not resizable.
void check_may_lose_bytes(const char* op, const char* name, StorageImpl* storage, bool external) {
  const bool is_own = storage->resizable() && storage->allocator();
  TORCH_CHECK(is_own || storage->nbytes() == 0 || external, op, ": `", name,
              "` has bytes that torch cannot resize: they come from numpy, a file, shared memory, "
              "pin_memory() or another library, or numpy shows them. Expected a tensor whose bytes "
              "only torch uses. Pass allow_external=True if no other code uses them any more.");
}

// Returns the storage that discard_storage must empty. Null if it has no bytes to free, or is
// already discarded. A storage that was resized to 0 is made a discarded one, so that it can have a
// guard.
StorageImpl* check_discard(const at::Tensor& self, bool external) {
  StorageImpl* storage = storage_of("discard_storage", "t", self);
  if (storage->nbytes() == 0 && (vacancy_of(storage) || bytes_reached(self) == 0)) return nullptr;
  check_may_lose_bytes("discard_storage", "t", storage, external);
  return storage;
}

// Replaces the bytes of a storage, and returns the DataPtr of the old ones. A concurrent reader
// sees the old or the new address, because moving from a DataPtr keeps its address.
[[nodiscard]] c10::DataPtr exchange(StorageImpl* storage, c10::DataPtr bytes, size_t nbytes) {
  c10::DataPtr old = std::move(data_of(storage));
  storage->set_data_ptr_noswap(std::move(bytes));
  storage->set_nbytes(nbytes);
  return old;
}

void discard_storage(const at::Tensor& self, std::optional<std::string> guard, bool external) {
  c10::DataPtr old;  // destroyed without the lock
  const std::lock_guard lock(storages);
  if (StorageImpl* storage = check_discard(self, external)) {
    const c10::Device device = storage->device();
    auto* vacancy = new Vacancy{storage->nbytes()};
    old = exchange(storage, {nullptr, vacancy, &Vacancy::release, device}, 0);
  }
  StorageImpl* empty = self.storage().unsafeGetStorageImpl();
  if (guard && vacancy_of(empty)) set_guard(empty, *std::move(guard));
}

// Returns a DataPtr that shares the bytes of `owner`.
c10::DataPtr leased(const c10::Storage& owner) {
  const c10::DataPtr& bytes = data_of(owner.unsafeGetStorageImpl());
  return {bytes.get(), new Lease{owner}, &Lease::release, bytes.device()};
}

// Moves the bytes of `storage` to an owner, and makes `storage` share them.
void lend(StorageImpl* storage) {
  // Calls that may throw come first, because `storage` must still have its bytes then.
  c10::Storage owner(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(data_of(storage).get(), storage->device()), storage->allocator(),
      storage->resizable() && storage->allocator()));
  c10::DataPtr shared = leased(owner);
  lift_guard(storage);
  data_of(owner.unsafeGetStorageImpl()) = exchange(storage, std::move(shared), storage->nbytes());
}

// Returns true if `storage` received the bytes of `source` later than `source` did.
bool received_later(StorageImpl* storage, StorageImpl* source) {
  const Lease *later = lease_of(storage), *first = lease_of(source);
  return later && first && later->id > first->id &&
         later->owner.unsafeGetStorageImpl() == first->owner.unsafeGetStorageImpl();
}

// The elements of its storage that a non-empty tensor reads, from `begin` to `end` - 1.
struct Span {
  int64_t begin, end;
  bool has_gaps;

  explicit Span(const at::Tensor& t)
      : begin(t.storage_offset()), end(t.storage_offset() + 1), has_gaps(false) {
    c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // stride and size
    for (int64_t d = 0; d < t.dim(); ++d) {
      if (t.size(d) > 1) dims.emplace_back(t.stride(d), t.size(d));
    }
    std::sort(dims.begin(), dims.end());
    for (const auto& [stride, size] : dims) {
      has_gaps |= stride > end - begin;
      end += (size - 1) * stride;
    }
  }
};

// Raises an error unless `src` has every element that `dst` reads, at the same place. For equal
// shapes, the same place means the same index.
void check_elements(const at::Tensor& dst, const at::Tensor& src) {
  if (dst.numel() == 0) return;
  if (dst.sizes() == src.sizes()) {
    bool same = dst.storage_offset() == src.storage_offset();
    for (int64_t d = 0; d < dst.dim(); ++d) {
      same &= dst.size(d) == 1 || dst.stride(d) == src.stride(d);
    }
    TORCH_CHECK(same, "share_storage: `src` has strides ", src.strides(), " and storage offset ",
                src.storage_offset(), ". Expected ", dst.strides(), " and ", dst.storage_offset(),
                ", those of `dst`, which has the same shape.");
    return;
  }
  TORCH_CHECK(src.numel() > 0,
              "share_storage: `src` has no elements. Expected those that `dst` reads.");
  const Span read(dst), held(src);
  TORCH_CHECK(held.begin <= read.begin && read.end <= held.end && !held.has_gaps,
              "share_storage: `src` has elements ", held.begin, " to ", held.end - 1,
              " of its storage", held.has_gaps ? ", with gaps" : "", ". Expected all of elements ",
              read.begin, " to ", read.end - 1, ", which `dst` reads.");
}

// Returns the name of a dtype in Python.
std::string name_of(c10::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

// Returns the storages of dst and src, or null if they are the same.
std::pair<StorageImpl*, StorageImpl*> check_share(const at::Tensor& dst, const at::Tensor& src,
                                                  bool external) {
  StorageImpl* to = storage_of("share_storage", "dst", dst);
  StorageImpl* from = storage_of("share_storage", "src", src);
  if (to == from) return {nullptr, nullptr};
  TORCH_CHECK(dst.scalar_type() == src.scalar_type(), "share_storage: `src` is ",
              name_of(src.scalar_type()), ". Expected ", name_of(dst.scalar_type()),
              ", the dtype of `dst`. To bind the bytes as they are, pass src.view(",
              name_of(dst.scalar_type()), ").");
  check_may_lose_bytes("share_storage", "dst", to, external);
  TORCH_CHECK(to->device() == from->device(), "share_storage: `src` is on ", from->device(),
              ". Expected the device of `dst`, ", to->device(), ".");
  TORCH_CHECK(!lacks_bytes(src),
              "share_storage: `src` is discarded. Expected a tensor with bytes.");
  const Vacancy* vacancy = vacancy_of(to);
  const size_t needed = std::max(bytes_reached(dst), vacancy ? vacancy->nbytes : to->nbytes());
  TORCH_CHECK(from->nbytes() >= needed, "share_storage: `src` has ", from->nbytes(),
              " bytes of storage. Expected at least ", needed, ", the storage of `dst`.");
  check_elements(dst, src);
  TORCH_CHECK(
      !received_later(from, to),
      "share_storage: `src` shares the bytes of `dst` already, and sharing them back would close "
      "a reference cycle. Pass a clone of `src`.");
  return {to, from};
}

// Raises the errors of share_storage(self, src) or, without src, of discard_storage(self).
void check_storage(const at::Tensor& self, const std::optional<at::Tensor>& src, bool external) {
  const std::lock_guard lock(storages);
  if (src) {
    check_share(self, *src, external);
  } else {
    check_discard(self, external);
  }
}

void share_storage(const at::Tensor& dst, const at::Tensor& src, bool external) {
  c10::DataPtr old;  // destroyed without the lock
  const std::lock_guard lock(storages);
  const auto [to, from] = check_share(dst, src, external);
  if (!to) return;
  if (!lease_of(from)) lend(from);
  const c10::Storage& owner = lease_of(from)->owner;
  c10::DataPtr bytes = leased(owner);
  lift_guard(to);
  old = exchange(to, std::move(bytes), owner.nbytes());
}

// Tells the allocator that a stream uses these bytes, if both are on the same kind of device. The
// caching allocator recognises a storage by the deleter of its DataPtr, so shared bytes are
// recorded on their owner.
void record_stream(const at::Tensor& self, int64_t id, int64_t device_index, int64_t device_type) {
  const auto kind = static_cast<c10::DeviceType>(device_type);
  if (self.device().type() != kind) return;
  std::optional<c10::Storage> owner;
  {
    const std::lock_guard lock(storages);
    StorageImpl* storage = storage_of("discard_storage", "t", self);
    if (vacancy_of(storage)) return;
    if (const Lease* held = lease_of(storage)) owner = held->owner;
  }
  auto bytes = at::empty({0}, self.options().dtype(at::kByte).requires_grad(false));
  if (owner) bytes.set_(*owner, 0, {static_cast<int64_t>(owner->nbytes())}, {1});
  (owner ? bytes : self)
      .record_stream(c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(device_index), kind));
}

}  // namespace

#define STORAGE_OPS_BINDING(key)                          \
  TORCH_LIBRARY_IMPL(storage_ops, key, m) {               \
    m.impl("discard_storage", TORCH_FN(discard_storage)); \
    m.impl("share_storage", TORCH_FN(share_storage));     \
    m.impl("_is_discarded", TORCH_FN(is_discarded));      \
    m.impl("_check_storage", TORCH_FN(check_storage));    \
    m.impl("_record_stream", TORCH_FN(record_stream));    \
  }

STORAGE_OPS_BINDING(CPU)
STORAGE_OPS_BINDING(CUDA)
