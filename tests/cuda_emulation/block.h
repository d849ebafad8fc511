// CUDA threads as fibers of one host thread. A fiber runs until it waits for others. A seed decides
// the next one, so any order of threads that the barriers allow is possible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// A place in the source of a kernel, and the function called there.
struct Site {
  const char *what, *file;
  int line;
};

constexpr unsigned kLanes = 32;  // lanes of a warp

// Indices and sizes of the running thread, with CUDA's names.
extern Index threadIdx, blockIdx, blockDim, gridDim;

// Waits for all threads of the block.
void barrier(Site site);

// Waits for the lanes of `mask`, and returns the value of each. With `fence`, it also orders other
// memory, as __syncwarp does and a shuffle does not.
const uint64_t* exchange(unsigned mask, uint64_t offered, bool fence, Site site);

// Memory of the block, the same for all of its threads with the same key. At first it is all nan.
void* shared_memory(const void* key, size_t bytes);

// Runs all threads of all blocks, the blocks in any order. Throws if threads wait for others that
// never arrive, or if one accesses forbidden memory.
void launch(Index grid, Index block, const std::function<void()>& kernel);

}  // namespace emulation
