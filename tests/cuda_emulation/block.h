// CUDA threads as fibers of one host thread. A fiber runs until it waits for others. A seed decides
// the next one, so any order of threads that the barriers allow is possible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

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

// Memory of the block of the size that its launch asks for.
void* dynamic_shared_memory();

// The number of the running thread's block in its cluster.
unsigned cluster_rank();

// Waits for all threads of the cluster.
void cluster_barrier(Site site);

// Returns the place of `own`, an object in shared memory, in another block of the cluster. Throws
// if that block may not have begun, or has ended.
const void* in_block(unsigned rank, const void* own);

// A mailbox is an object in shared memory to which blocks of a cluster send letters, in rounds.
void open_mailbox(const void* mailbox);

// Says how many letters the round of a mailbox has.
void expect_letters(const void* mailbox, unsigned count);

// Notes that a letter has arrived in a mailbox of a block.
void deliver(const void* mailbox, unsigned rank);

// Waits until a round has its letters. `odd` says whether the round has an odd number.
void wait_for_letters(const void* mailbox, bool odd, Site site);

// A copy from global to shared memory that a thread has started and not waited for.
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  bool early;  // the source is read when the copy begins, and not when it ends
  char data[16] = {};

  void read() { std::memcpy(data, from, bytes); }
};

void begin_copy(const Copy& copy);

// Makes a group of the copies that the thread has begun since the last group.
void end_group_of_copies();

// Returns and forgets the copies of all groups of the thread but the last `pending`.
std::vector<Copy> landed(size_t pending);

// Returns true or false by chance.
bool coin();

// The blocks of a launch, and what each of them has.
struct Shape {
  Index grid, block;
  unsigned cluster;  // neighbouring blocks that run at the same time
  size_t dynamic_bytes;
};

// Runs all threads of all blocks, the clusters in any order. Throws if threads wait for others that
// never arrive, or if one accesses forbidden memory.
void launch(const Shape& shape, const std::function<void()>& kernel);

}  // namespace emulation
