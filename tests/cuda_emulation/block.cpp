#include "block.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
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

constexpr unsigned kMostWarps = 32;

enum class Wait { kNothing, kWarp, kBlock, kCluster, kLetters, kDone };

struct Block;

struct Thread {
  Fiber fiber;
  Block* block;
  unsigned number;  // index in the block
  Wait waits;
  Site site;                    // of the call in which it waits
  unsigned mask;                // of the lanes for which it waits
  unsigned passed, all_passed;  // numbers of barriers of the block and of the cluster
  uint64_t offered, heard[kLanes];
  std::deque<std::vector<Copy>> groups;  // of copies, the last one still open
};

struct Allocation {
  std::unique_ptr<char[]> memory;
  size_t bytes;
};

struct Mail {
  unsigned rounds = 0;  // that have all letters
  unsigned expected = 0, arrived = 0;
  std::vector<Thread*> waiting;
  char even_token, odd_token;  // for the sanitizer
};

struct Block {
  unsigned rank;  // in the cluster
  Index index;
  std::vector<Thread*> threads;  // by number
  std::map<const void*, Allocation> shared;
  std::map<const void*, Mail> mail;
  unsigned at_barrier = 0, done = 0, in_exchange[kMostWarps] = {};  // counts and lane masks
  char even_barrier, odd_barrier;                                   // tokens for the sanitizer
};

std::mt19937_64 random_bits;
std::vector<std::unique_ptr<Thread>> pool;
std::vector<Block> cluster;
std::vector<Thread*> threads, ready;  // of the cluster, and those to continue
Shape launch_shape{};                 // of the last launch
const std::function<void()>* body = nullptr;
Thread* current = nullptr;
unsigned at_cluster_barrier = 0;
std::string misuse;  // the error of the running thread, set by a call
char launched, finished, even_cluster, odd_cluster;  // tokens for the sanitizer

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
  const std::string name = "thread " + text(t) + " of block " + text(thread->block->index);
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
  ++current->block->done;
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
  unsigned& arrived = thread->block->in_exchange[warp];
  arrived |= 1u << thread->number % kLanes;
  if ((arrived & mask) != mask) return;
  arrived &= ~mask;
  Thread* const* const members = &thread->block->threads[warp * kLanes];
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

// Creates the blocks of a cluster whose first block has this number in the grid.
void create(unsigned first) {
  const Index &grid = gridDim, &size = blockDim;
  cluster = std::vector<Block>(launch_shape.cluster);
  threads.clear();
  at_cluster_barrier = 0;
  // Blocks get different fibers. Otherwise, a sanitizer would confuse threads of two blocks.
  std::shuffle(pool.begin(), pool.end(), random_bits);
  for (Block& block : cluster) {
    block.rank = static_cast<unsigned>(&block - cluster.data());
    const unsigned b = first + block.rank;
    block.index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    for (unsigned k = 0; k < size.x * size.y * size.z; ++k) {
      Thread* const thread = pool[threads.size()].get();
      thread->block = &block;
      thread->number = k;
      thread->waits = Wait::kNothing;
      thread->passed = thread->all_passed = 0;
      thread->groups.assign(1, {});
      thread->fiber.start(run_thread);
      threads.push_back(thread);
      block.threads.push_back(thread);
    }
  }
}

void run_cluster(Handlers& handlers) {
  ready = threads;
  std::shuffle(ready.begin(), ready.end(), random_bits);
  // The next thread is any thread, or the last one to become ready, so that a few get far ahead.
  const bool in_any_order = random_bits() & 1;
  size_t done = 0;
  while (!ready.empty()) {
    if (in_any_order) std::swap(ready[random_bits() % ready.size()], ready.back());
    current = ready.back();
    ready.pop_back();
    Block& block = *current->block;
    threadIdx = index_of(current->number);
    blockIdx = block.index;
    current->fiber.enter();
    handlers.check();
    if (std::string what = std::exchange(misuse, {}); !what.empty())
      fail(described(current) + what);
    if (current->waits == Wait::kDone) {
      ++done;
      const auto empty = [](const std::vector<Copy>& group) { return group.empty(); };
      if (!std::all_of(current->groups.begin(), current->groups.end(), empty)) {
        fail(described(current) + " without waiting for its copies");
      }
    }
    if (current->waits == Wait::kWarp) meet_in_warp(current);
    if (current->waits == Wait::kBlock && ++block.at_barrier == block.threads.size()) {
      block.at_barrier = 0;
      let_go(block.threads);
    }
    if (current->waits == Wait::kCluster && ++at_cluster_barrier == threads.size()) {
      at_cluster_barrier = 0;
      let_go(threads);
    }
  }
  acquire(&finished);
  if (done == threads.size()) return;
  const auto by_state = [](const Thread* a, const Thread* b) { return a->waits < b->waits; };
  const auto [first, last] = std::minmax_element(threads.begin(), threads.end(), by_state);
  fail("a block does not end: " + described(*first) + ", " + described(*last));
}

void wait(Wait reason, Site site) {
  current->waits = reason;
  current->site = site;
  current->fiber.leave();
}

// Ends the launch with an error of the running thread.
[[noreturn]] void give_up(const char* what) {
  misuse = what;
  current->fiber.leave();
  std::abort();  // a thread that gave up does not continue
}

Mail& mail_of(Block& block, const void* mailbox) {
  const auto found = block.mail.find(mailbox);
  if (found == block.mail.end()) give_up(" uses a mailbox that is not open");
  return found->second;
}

// Continues the threads that wait for a round, if it has all of its letters.
void end_round(Mail& mail) {
  if (mail.expected == 0 || mail.arrived < mail.expected) return;
  if (mail.arrived > mail.expected) give_up(" sends a letter that is not expected");
  mail.expected = mail.arrived = 0;
  ++mail.rounds;
  for (Thread* thread : mail.waiting) thread->waits = Wait::kNothing;
  ready.insert(ready.end(), mail.waiting.begin(), mail.waiting.end());
  mail.waiting.clear();
}

Allocation& allocation(Block& block, const void* key, size_t bytes) {
  const Unwatched unwatched;
  Allocation& result = block.shared[key];
  if (result.memory == nullptr) {
    result = {std::make_unique<char[]>(bytes), bytes};
    std::memset(result.memory.get(), 0xff, bytes);
  }
  return result;
}

}  // namespace

void barrier(Site site) {
  // Threads at the next barrier must not synchronize with threads that still leave this one.
  Block& block = *current->block;
  char* const token = current->passed++ % 2 ? &block.odd_barrier : &block.even_barrier;
  release(token);
  wait(Wait::kBlock, site);
  acquire(token);
}

void cluster_barrier(Site site) {
  char* const token = current->all_passed++ % 2 ? &odd_cluster : &even_cluster;
  release(token);
  wait(Wait::kCluster, site);
  acquire(token);
}

const uint64_t* exchange(unsigned mask, uint64_t offered, bool fence, Site site) {
  Thread* const self = current;
  Thread* const warp = self->block->threads[self->number / kLanes * kLanes];
  uint64_t* const token = &warp->heard[self->passed % 2];
  self->mask = mask;
  self->offered = offered;
  if (fence) release(token);
  wait(Wait::kWarp, site);
  if (fence) acquire(token);
  return self->heard;
}

unsigned cluster_rank() { return current->block->rank; }

void* shared_memory(const void* key, size_t bytes) {
  return allocation(*current->block, key, bytes).memory.get();
}

void* dynamic_shared_memory() { return shared_memory(&cluster, launch_shape.dynamic_bytes); }

const void* in_block(unsigned rank, const void* own) {
  if (rank >= cluster.size()) give_up(" sends to a block outside of its cluster");
  if (current->all_passed == 0) give_up(" sends to a block that may not have begun");
  Block& other = cluster[rank];
  if (other.done > 0) give_up(" sends to a block that may have ended");
  for (auto& [key, mine] : current->block->shared) {
    const ptrdiff_t offset = static_cast<const char*>(own) - mine.memory.get();
    if (offset < 0 || static_cast<size_t>(offset) >= mine.bytes) continue;
    return allocation(other, key, mine.bytes).memory.get() + offset;
  }
  give_up(" sends to memory that is not shared");
}

void open_mailbox(const void* mailbox) { current->block->mail[mailbox] = {}; }

void expect_letters(const void* mailbox, unsigned count) {
  Mail& mail = mail_of(*current->block, mailbox);
  if (mail.expected > 0) give_up(" expects letters before the last round has ended");
  mail.expected = count;
  end_round(mail);
}

void deliver(const void* mailbox, unsigned rank) {
  Mail& mail = mail_of(cluster[rank], mailbox);
  release(mail.rounds % 2 ? &mail.odd_token : &mail.even_token);
  ++mail.arrived;
  end_round(mail);
}

void wait_for_letters(const void* mailbox, bool odd, Site site) {
  Mail& mail = mail_of(*current->block, mailbox);
  if (mail.rounds % 2 == odd) {
    mail.waiting.push_back(current);
    wait(Wait::kLetters, site);
  }
  acquire(odd ? &mail.odd_token : &mail.even_token);
}

void begin_copy(const Copy& copy) {
  const Unwatched unwatched;
  current->groups.back().push_back(copy);
}

void end_group_of_copies() {
  const Unwatched unwatched;
  current->groups.emplace_back();
}

std::vector<Copy> landed(size_t pending) {
  const Unwatched unwatched;
  std::vector<Copy> copies;
  auto& groups = current->groups;
  for (; groups.size() > pending + 1; groups.pop_front()) {
    copies.insert(copies.end(), groups.front().begin(), groups.front().end());
  }
  return copies;
}

bool coin() { return random_bits() & 1; }

void launch(const Shape& shape, const std::function<void()>& kernel) {
  gridDim = shape.grid;
  blockDim = shape.block;
  launch_shape = shape;
  body = &kernel;
  const size_t size = size_t{blockDim.x} * blockDim.y * blockDim.z * shape.cluster;
  while (pool.size() < size) pool.push_back(std::make_unique<Thread>());
  std::vector<unsigned> clusters(size_t{gridDim.x} * gridDim.y * gridDim.z / shape.cluster);
  std::iota(clusters.begin(), clusters.end(), 0);
  std::shuffle(clusters.begin(), clusters.end(), random_bits);
  Handlers handlers;
  release(&launched);
  for (unsigned c : clusters) {
    create(c * shape.cluster);
    run_cluster(handlers);
  }
}

}  // namespace emulation

// Returns the size of the clusters of the last launch.
extern "C" __attribute__((visibility("default"))) unsigned emulation_cluster() {
  return emulation::launch_shape.cluster;
}

// Returns the dynamic memory of a block in the last launch.
extern "C" __attribute__((visibility("default"))) size_t emulation_dynamic_bytes() {
  return emulation::launch_shape.dynamic_bytes;
}

extern "C" __attribute__((visibility("default"))) void emulation_seed(uint64_t seed) {
  emulation::random_bits.seed(seed);
}
