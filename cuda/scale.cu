// Multiplies a gradient by the upstream gradient of the loss, a number that only the device knows.
// In most training steps it is 1. Then nothing else is read.
#include <algorithm>
#include <type_traits>

#include "dtypes.h"
#include "launch.cuh"

namespace storage_ops::kernels {

constexpr unsigned kScaleThreads = 256;
constexpr int kScalePacks = 4;          // packs that a thread loads before it uses the first
constexpr int64_t kScaleBlocks = 1024;  // enough for every multiprocessor, and quick to launch
constexpr int64_t kScaleBytes =
    kScaleThreads * kScalePacks * sizeof(uint4);  // bytes that a block processes at a time

template <typename T, typename A>
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(T* numbers, int64_t count, const A* factor) {
  const A by = *factor;
  if (by == 1) return;
  constexpr int64_t kPiece = kScaleBytes / sizeof(T);
  for (int64_t begin = blockIdx.x * kPiece; begin < count; begin += gridDim.x * kPiece) {
    const int64_t rest = count - begin;
    for_pieces<A, kReadWrite, kScalePacks, kForwards>(
        numbers + begin, rest < kPiece ? rest : kPiece, [&](int64_t, auto& values) {
#pragma unroll
          for (A& value : values) value *= by;
        });
  }
}

void scale(Tensor self, Tensor factor) {
  STORAGE_OPS_CHECK(self.is_contiguous(), "_scale: `self` must be contiguous.");
  STORAGE_OPS_CHECK(factor.numel() == 1 && factor.get_device() == self.get_device(),
                    "_scale: `factor` must be one number on the device of self.");
  const int64_t count = self.numel();
  if (count == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(self.get_device_index());
  for_dtypes("_scale: self", self, [&](auto number, auto arithmetic) {
    using T = decltype(number);
    using A = decltype(arithmetic);
    STORAGE_OPS_CHECK(factor.scalar_type() == arithmetic_of(self),
                      "_scale: `factor` must be in the dtype of the arithmetic.");
    const int64_t blocks = (count * sizeof(T) + kScaleBytes - 1) / kScaleBytes;
    const auto grid = static_cast<unsigned>(std::min(blocks, kScaleBlocks));
    launch(scale_kernel<T, A>, {grid, kScaleThreads}, current_stream(self),
           static_cast<T*>(self.mutable_data_ptr()), count,
           static_cast<const A*>(factor.const_data_ptr()));
  });
}

}  // namespace storage_ops::kernels

STABLE_TORCH_LIBRARY_IMPL(storage_ops, CUDA, m) {
  m.impl("_scale", TORCH_BOX(&storage_ops::kernels::scale));
}
