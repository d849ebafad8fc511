// Small kernels, each for one correct or wrong interaction of threads.
#include <cuda_runtime.h>

#include <cstdio>
#include <device.cuh>
#include <exception>

namespace {

constexpr unsigned kAll = ~0u;

__global__ void exchange(unsigned* out, unsigned) {
  const unsigned lane = threadIdx.x % 32, thread = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned votes = __ballot_sync(kAll, lane % 3 == 0);
  unsigned sum = thread;
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  for (unsigned offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(half, sum, offset);
  out[thread] = votes ^ sum;
}

// Each thread passes a number to the next of its warp, and then to the next of its block.
__global__ void rotate(unsigned* out, unsigned) {
  auto& shared = storage_ops::shared_memory<unsigned[1024]>();
  const unsigned thread = threadIdx.x, warp = thread / 32 * 32, lane = thread % 32;
  shared[thread] = 100 * blockIdx.x + thread;
  __syncwarp();
  const unsigned from_lane = shared[warp + (lane + 1) % 32];
  __syncthreads();
  const unsigned from_block = shared[(thread + 1) % blockDim.x];
  out[blockIdx.x * blockDim.x + thread] = 1000 * from_lane + from_block;
}

__global__ void unwritten(unsigned* out, unsigned) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = storage_ops::shared_memory<unsigned[32]>()[0];
}

__global__ void two_barriers(unsigned*, unsigned) {
  if (threadIdx.x < 5) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void two_masks(unsigned*, unsigned) {
  __ballot_sync(threadIdx.x % 32 < 5 ? kAll : 0xffffff00u, true);
}

__global__ void beyond(unsigned* out, unsigned) { out[(1ull << 40) + threadIdx.x] = 0; }

__global__ void unaligned(unsigned* out, unsigned) {
  *reinterpret_cast<uint4*>(out + 1 + threadIdx.x) = {};
}

// A block of shared memory that is copied from the first numbers of `out`, which are written
// before.
uint4* copied(unsigned* out, unsigned bytes) {
  const unsigned thread = threadIdx.x;
  uint4* const shared = storage_ops::dynamic_shared_memory();
  out[thread] = 100 + thread;
  __syncthreads();
  if (thread < blockDim.x / 4) {
    storage_ops::copy_async(shared + thread, reinterpret_cast<const uint4*>(out) + thread, bytes);
  }
  storage_ops::end_group_of_copies();
  return shared;
}

__global__ void copies(unsigned* out, unsigned) {
  const auto* shared = reinterpret_cast<const unsigned*>(copied(out, 12));
  storage_ops::wait_for_copies<0>();
  __syncthreads();
  out[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// Waits for the first of two groups, so that the second one has not landed.
__global__ void early_reads(unsigned* out, unsigned) {
  uint4* const shared = copied(out, 16);
  if (threadIdx.x >= blockDim.x / 4) return;
  const uint4* const from = reinterpret_cast<const uint4*>(out) + threadIdx.x;
  storage_ops::copy_async(shared + blockDim.x / 4 + threadIdx.x, from, 16);
  storage_ops::end_group_of_copies();
  storage_ops::wait_for_copies<1>();
  const unsigned landed = shared[threadIdx.x].x, other = shared[blockDim.x / 4 + threadIdx.x].x;
  storage_ops::wait_for_copies<0>();
  out[4 * threadIdx.x] = landed;
  out[4 * threadIdx.x + 1] = other;
}

__global__ void copies_without_waiting(unsigned* out, unsigned) { copied(out, 16); }

__global__ void unaligned_copies(unsigned* out, unsigned) { copied(out + 1, 16); }

using Mailbox = storage_ops::Mailbox<8>;

// Each block sends letters to all blocks of its cluster in four rounds, in two mailboxes. Each
// thread writes the sum of the letters that it gets.
__global__ void letters(unsigned* out, unsigned blocks) {
  auto& mailboxes = storage_ops::shared_memory<Mailbox[2]>();
  const unsigned thread = threadIdx.x;
  if (thread < 2) mailboxes[thread].open();
  storage_ops::cluster_barrier();
  unsigned sum = 0;
  for (unsigned round = 0; round < 4; ++round) {
    Mailbox& mailbox = mailboxes[round % 2];
    if (thread == 0) mailbox.expect(blocks);
    if (thread < blocks) mailbox.send(thread, {(blockIdx.x + 1) * (round + 1), 0, 0, 0});
    mailbox.wait(round / 2 % 2);
    for (unsigned k = 0; k < blocks; ++k) sum += mailbox.letters[k].x;
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + thread] = sum;
}

__global__ void letters_before_all_blocks_begin(unsigned*, unsigned) {
  auto& mailbox = storage_ops::shared_memory<Mailbox>();
  mailbox.open();
  mailbox.send(1, {});
}

__global__ void letters_to_another_cluster(unsigned*, unsigned blocks) {
  auto& mailbox = storage_ops::shared_memory<Mailbox>();
  if (threadIdx.x == 0) mailbox.open();
  storage_ops::cluster_barrier();
  mailbox.send(blocks, {});
}

__global__ void letters_that_do_not_come(unsigned*, unsigned blocks) {
  auto& mailbox = storage_ops::shared_memory<Mailbox>();
  if (threadIdx.x == 0) mailbox.open();
  storage_ops::cluster_barrier();
  if (threadIdx.x == 0) mailbox.expect(blocks);
  if (threadIdx.x == 0 && storage_ops::cluster_rank() > 0) mailbox.send(0, {});
  mailbox.wait(0);
}

__global__ void letters_in_a_closed_mailbox(unsigned*, unsigned) {
  storage_ops::cluster_barrier();
  storage_ops::shared_memory<Mailbox>().send(1, {});
}

__global__ void a_block_that_leaves(unsigned*, unsigned) {
  storage_ops::cluster_barrier();
  if (storage_ops::cluster_rank() == 0) return;
  storage_ops::cluster_barrier();
}

constexpr void (*kKernels[])(unsigned*, unsigned) = {exchange,
                                                     rotate,
                                                     unwritten,
                                                     two_barriers,
                                                     two_masks,
                                                     beyond,
                                                     unaligned,
                                                     copies,
                                                     early_reads,
                                                     copies_without_waiting,
                                                     unaligned_copies,
                                                     letters,
                                                     letters_before_all_blocks_begin,
                                                     letters_to_another_cluster,
                                                     letters_that_do_not_come,
                                                     letters_in_a_closed_mailbox,
                                                     a_block_that_leaves};

}  // namespace

// Runs a kernel by its number. The emulation writes its error to `message`.
extern "C" __attribute__((visibility("default"))) void run_primitive(
    int kernel, unsigned blocks, unsigned threads, unsigned cluster, size_t dynamic_bytes,
    unsigned* out, char* message, size_t room) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3{blocks, 1, 1};
  config.blockDim = dim3{threads, 1, 1};
  config.dynamicSmemBytes = dynamic_bytes;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = dim3{cluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  try {
    const cudaError_t error = cudaLaunchKernelEx(&config, kKernels[kernel], out, cluster);
    std::snprintf(message, room, error == cudaSuccess ? "" : "launch error %d", error);
  } catch (const std::exception& error) {
    std::snprintf(message, room, "%s", error.what());
  }
}
