// Ops of the library's own.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace storage_ops {

// Hides ops from autograd, policies, Python modes and profilers while it lives.
struct Unseen {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_modes{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const at::RecordFunctionGuard no_callbacks{false};
};

}  // namespace storage_ops
