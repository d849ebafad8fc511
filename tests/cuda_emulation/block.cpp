#include "block.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

namespace emulation {

Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr unsigned kMostThreads = 1024;

enum class Wait { kNothing, kWarp, kBlock, kDone };

struct Thread {
  Fiber fiber;
  unsigned number;  // index in the block
  Wait waits;
  Site site;        // of the call in which it waits
  unsigned mask;    // of the lanes for which it waits
  unsigned passed;  // number of barriers
  uint64_t offered, heard[kLanes];
};

std::mt19937_64 random_bits;
std::vector<std::unique_ptr<Thread>> pool;
std::vector<Thread*> block, ready;  // the block's threads by number, and those to continue
std::map<const void*, std::unique_ptr<char[]>> shared;
const std::function<void()>* body = nullptr;
Thread* current = nullptr;
unsigned at_barrier = 0, in_exchange[kMostThreads / kLanes];  // numbers of threads and lane masks
char launched, finished, even_barrier, odd_barrier;           // tokens for the sanitizer

Index index_of(unsigned number) {
  const Index& b = blockDim;
  return {number % b.x, number / b.x % b.y, number / b.x / b.y};
}

std::string described(const Thread* thread) {
  const Index t = index_of(thread->number);
  const auto text = [](const Index& i) {
    return "(" + std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z) +
           ")";
  };
  const std::string name = "thread " + text(t) + " of block " + text(blockIdx);
  if (thread->waits == Wait::kDone) return name + " has returned";
  if (thread->waits == Wait::kNothing) return name;
  const char* slash = std::strrchr(thread->site.file, '/');
  const char* file = slash == nullptr ? thread->site.file : slash + 1;
  return name + " is in " + thread->site.what + " at " + file + ":" +
         std::to_string(thread->site.line);
}

[[noreturn]] void fail(const std::string& what) {
  pool.clear();  // their stacks contain calls that will not return
  throw std::runtime_error("CUDA emulation: " + what);
}

#if !defined(EMULATION_THREAD) && !defined(EMULATION_ADDRESS)
const char* broken = nullptr;  // the error of the running thread, set by a signal

void on_signal(int number) {
  broken = number == SIGSEGV ? " touches memory outside of its tensors"
                             : " uses an address that is not aligned";
  current->fiber.leave();
}

// The signal handlers while kernels run. A thread that gets a signal never runs again.
class Handlers {
 public:
  Handlers() {
    struct sigaction own{};
    own.sa_handler = on_signal;
    own.sa_flags = SA_NODEFER;  // it does not return
    sigaction(SIGSEGV, &own, &segv_);
    sigaction(SIGILL, &own, &ill_);
  }
  ~Handlers() {
    sigaction(SIGSEGV, &segv_, nullptr);
    sigaction(SIGILL, &ill_, nullptr);
  }
  void check() {
    if (const char* what = std::exchange(broken, nullptr)) fail(described(current) + what);
  }

 private:
  struct sigaction segv_, ill_;
};
#else
struct Handlers {  // the sanitizers have their own
  void check() {}
};
#endif

void run_thread() {
  acquire(&launched);
  (*body)();
  release(&finished);
  current->waits = Wait::kDone;
  current->fiber.leave();
}

// Continues threads that are all in the same call.
void let_go(const std::vector<Thread*>& group) {
  for (Thread* thread : group) {
    const Site &site = thread->site, &first = group[0]->site;
    if (site.line != first.line || std::strcmp(site.file, first.file) != 0) {
      fail(described(thread) + ", " + described(group[0]));
    }
  }
  for (Thread* thread : group) thread->waits = Wait::kNothing;
  ready.insert(ready.end(), group.begin(), group.end());
}

// If all lanes for which the thread waits have arrived, continues them and the thread.
void meet_in_warp(const Thread* thread) {
  const unsigned warp = thread->number / kLanes, mask = thread->mask;
  in_exchange[warp] |= 1u << thread->number % kLanes;
  if ((in_exchange[warp] & mask) != mask) return;
  in_exchange[warp] &= ~mask;
  Thread* const* const members = &block[warp * kLanes];
  std::vector<Thread*> lanes;
  uint64_t offered[kLanes] = {};
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (members[lane]->mask != mask) fail(described(thread) + " with another mask than others");
    offered[lane] = members[lane]->offered;
    lanes.push_back(members[lane]);
  }
  for (Thread* lane : lanes) std::copy(offered, offered + kLanes, lane->heard);
  let_go(lanes);
}

void run_block(Handlers& handlers) {
  shared.clear();
  at_barrier = 0;
  std::fill(std::begin(in_exchange), std::end(in_exchange), 0);
  // Blocks get different fibers. Otherwise, a sanitizer would confuse threads of two blocks.
  std::shuffle(pool.begin(), pool.end(), random_bits);
  block.clear();
  for (unsigned k = 0; k < blockDim.x * blockDim.y * blockDim.z; ++k) {
    Thread* const thread = pool[k].get();
    thread->number = k;
    thread->waits = Wait::kNothing;
    thread->passed = 0;
    thread->fiber.start(run_thread);
    block.push_back(thread);
  }
  ready = block;
  std::shuffle(ready.begin(), ready.end(), random_bits);
  // The next thread is any thread, or the last one to become ready, so that a few get far ahead.
  const bool in_any_order = random_bits() & 1;
  size_t done = 0;
  while (!ready.empty()) {
    if (in_any_order) std::swap(ready[random_bits() % ready.size()], ready.back());
    current = ready.back();
    ready.pop_back();
    threadIdx = index_of(current->number);
    current->fiber.enter();
    handlers.check();
    if (current->waits == Wait::kDone) ++done;
    if (current->waits == Wait::kWarp) meet_in_warp(current);
    if (current->waits == Wait::kBlock && ++at_barrier == block.size()) {
      at_barrier = 0;
      let_go(block);
    }
  }
  acquire(&finished);
  if (done == block.size()) return;
  const auto by_state = [](const Thread* a, const Thread* b) { return a->waits < b->waits; };
  const auto [first, last] = std::minmax_element(block.begin(), block.end(), by_state);
  fail("a block does not end: " + described(*first) + ", " + described(*last));
}

void wait(Wait reason, Site site) {
  current->waits = reason;
  current->site = site;
  current->fiber.leave();
}

}  // namespace

void barrier(Site site) {
  // Threads at the next barrier must not synchronize with threads that still leave this one.
  char* const token = current->passed++ % 2 ? &odd_barrier : &even_barrier;
  release(token);
  wait(Wait::kBlock, site);
  acquire(token);
}

const uint64_t* exchange(unsigned mask, uint64_t offered, bool fence, Site site) {
  Thread* const self = current;
  Thread* const warp = block[self->number / kLanes * kLanes];
  uint64_t* const token = &warp->heard[self->passed % 2];
  self->mask = mask;
  self->offered = offered;
  if (fence) release(token);
  wait(Wait::kWarp, site);
  if (fence) acquire(token);
  return self->heard;
}

void* shared_memory(const void* key, size_t bytes) {
  const Unwatched unwatched;
  auto& memory = shared[key];
  if (memory == nullptr) {
    memory = std::make_unique<char[]>(bytes);
    std::memset(memory.get(), 0xff, bytes);
  }
  return memory.get();
}

void launch(Index grid, Index size, const std::function<void()>& kernel) {
  gridDim = grid;
  blockDim = size;
  body = &kernel;
  const size_t threads = size_t{size.x} * size.y * size.z;
  while (pool.size() < threads) pool.push_back(std::make_unique<Thread>());
  std::vector<unsigned> blocks(size_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random_bits);
  Handlers handlers;
  release(&launched);
  for (unsigned b : blocks) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    run_block(handlers);
  }
}

}  // namespace emulation

extern "C" __attribute__((visibility("default"))) void emulation_seed(uint64_t seed) {
  emulation::random_bits.seed(seed);
}
