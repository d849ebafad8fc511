// CUDA threads as fibers of one host thread. A fiber runs until it waits for others, and which one
// is next is drawn from a seed: any order of threads that the barriers allow can come up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulation {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// A place in the source of a kernel, and what is called there.
struct Site {
  const char *what, *file;
  int line;
};

constexpr unsigned kLanes = 32;  // of a warp

// Of the thread that runs, by the names that CUDA gives them.
extern Index threadIdx, blockIdx, blockDim, gridDim;

// Waits for all threads of the block.
void barrier(Site site);

// Waits for the lanes of `mask`, and returns what each of them offered. Orders other memory too if
// `fence`, as __syncwarp does and a shuffle does not.
const uint64_t* exchange(unsigned mask, uint64_t offered, bool fence, Site site);

// Memory of the block, the same for all of its threads that give one key. At first it is all nan.
void* shared_memory(const void* key, size_t bytes);

// Runs all threads of all blocks, the blocks in any order. Throws where threads wait for others
// that will not come, and where one touches memory that it must not.
void launch(Index grid, Index block, const std::function<void()>& kernel);

}  // namespace emulation
