// The streamed form of the row kernel, for calls that update the state and overwrite the logits.
//
// A row stays in shared memory between its two passes, so that memory is read once and written
// once. Each thread copies the packs that it will use, `kSlots` packs ahead and across the ends of
// rows. So copies need neither registers nor barriers, and continue while threads wait for each
// other. A row that is too long for a block is divided among the blocks of a cluster.
#pragma once

#include "rows.cuh"

namespace storage_ops::kernels {

// The most threads of a block. Two blocks share a multiprocessor, so that one of them computes
// while the other waits.
constexpr unsigned kStreamThreads = 512, kStreamBlocks = 2;

// A piece of a row is one pack of each thread. A block has memory for kSlots pieces. At most
// kRowPieces are of the row in work, so that the others are copied during its first pass.
constexpr unsigned kSlots = 13, kRowPieces = 9;

constexpr unsigned kMostClusterBlocks = 8;  // the most that every GPU with clusters supports

// How rows are divided.
struct Division {
  unsigned blocks;  // of a row; 0 if a row is too long
  unsigned packs;   // of a row in each block; the last block may have fewer
  unsigned pieces;  // of a row in each block
  unsigned threads;
};

// The result of a block for its part of a row.
struct PartResult {
  float shift, sum;
  int64_t rank;  // of the first maximum
};

struct StreamScratch {
  float max[1][kMaxWarps], sums[1][kMaxWarps];
  int64_t rank[1][kMaxWarps];
  // Results of all blocks. Blocks may write those of the next row before all threads have read
  // those of the last one, so rows alternate.
  PartResult parts[2][kMostClusterBlocks];
};

// The packs of a row that one thread processes, and their copies in shared memory.
template <typename T>
struct ThreadPacks {
  const RowArguments<T, float>& a;
  const Division& d;
  uint4* const memory;
  unsigned begin, end;  // the packs of the block
  unsigned slot = 0;    // of the first piece of the row in work
  unsigned turns;       // rows between two rows of a block, plus 1
  // The piece that is copied next, its row, and the target of the row after that.
  unsigned next_piece = 0;
  int64_t next_row, target_after;
  bool reads_next;

  __device__ __forceinline__ ThreadPacks(const RowArguments<T, float>& args,
                                         const Division& division)
      : a(args), d(division), memory(dynamic_shared_memory() + threadIdx.x) {
    const auto all = static_cast<unsigned>((a.columns + kPack<T> - 1) / kPack<T>);
    begin = min_of(cluster_rank() * d.packs, all);
    end = min_of(begin + d.packs, all);
    turns = gridDim.x / d.blocks;
    next_row = first_row();
    target_after = a.index[next_row];
    look_at_next_row();
    for (unsigned s = 0; s < kSlots; ++s) copy_next(s);
  }

  static __device__ __forceinline__ unsigned min_of(unsigned x, unsigned y) {
    return x < y ? x : y;
  }

  __device__ __forceinline__ int64_t first_row() const { return blockIdx.x / d.blocks; }

  __device__ __forceinline__ unsigned pack_of(unsigned piece) const {
    return begin + piece * blockDim.x + threadIdx.x;
  }

  // The number of columns in a pack, of which the last one may have fewer.
  __device__ __forceinline__ unsigned width(unsigned pack) const {
    return min_of(static_cast<unsigned>(a.columns) - pack * kPack<T>, kPack<T>);
  }

  __device__ __forceinline__ unsigned slot_of(unsigned piece) const {
    return slot + piece < kSlots ? slot + piece : slot + piece - kSlots;
  }

  __device__ __forceinline__ uint4& at(unsigned slot_of_piece) const {
    return memory[slot_of_piece * blockDim.x];
  }

  // Decides whether the next row is read at all. Its target was loaded one row before.
  __device__ __forceinline__ void look_at_next_row() {
    reads_next = next_row < a.rows && target_of(a, target_after) == Target::kClass;
    if (next_row + turns < a.rows) target_after = a.index[next_row + turns];
  }

  // Starts to copy the next piece to a slot whose piece is no longer needed.
  __device__ __forceinline__ void copy_next(unsigned free_slot) {
    const unsigned pack = pack_of(next_piece);
    if (reads_next && pack < end) {
      const T* row = a.logits + next_row * a.stride;
      copy_async(&at(free_slot), reinterpret_cast<const uint4*>(row) + pack,
                 width(pack) * static_cast<unsigned>(sizeof(T)));
    }
    end_group_of_copies();
    if (++next_piece < d.pieces) return;
    next_piece = 0;
    next_row += turns;
    look_at_next_row();
  }

  // Calls `body(piece, pack, logits)` for the logits of this thread in a row, once they have
  // landed.
  //
  // Every piece ends one group here and one group when it is overwritten. So kSlots - 1 groups have
  // followed that of a piece when it is needed.
  template <typename Body>
  __device__ __forceinline__ void first_pass(Body body) const {
    for (unsigned piece = 0; piece < d.pieces; ++piece) {
      wait_for_copies<kSlots - 1>();
      end_group_of_copies();
      const unsigned pack = pack_of(piece);
      if (pack >= end) continue;
      float z[kPack<T>];
      load_logits(piece, pack, z);
      body(piece, pack, z);
    }
  }

  // Columns beyond the row count as -inf.
  __device__ __forceinline__ void load_logits(unsigned piece, unsigned pack,
                                              float (&z)[kPack<T>]) const {
    unpack(at(slot_of(piece)), z, T());
#pragma unroll
    for (float& logit : z) logit *= a.transform.scale;
    const unsigned columns = width(pack);
    if (columns == kPack<T>) return;
#pragma unroll
    for (unsigned k = 1; k < kPack<T>; ++k) {
      if (k >= columns) z[k] = -std::numeric_limits<float>::infinity();
    }
  }

  // Overwrites a row in memory by the numbers that `body(piece, pack, numbers)` sets. The slots
  // become free for the rows to come.
  template <typename Body>
  __device__ __forceinline__ void overwrite(int64_t row, Body body) {
    T* const out = a.logits + row * a.stride;
    for (unsigned piece = 0; piece < d.pieces; ++piece) {
      const unsigned pack = pack_of(piece);
      if (pack < end) {
        float numbers[kPack<T>];
        body(piece, pack, numbers);
        const unsigned columns = width(pack);
        if (columns == kPack<T>) {
          uint4 bits;
          ::storage_ops::pack(numbers, bits, T());
          reinterpret_cast<uint4*>(out)[pack] = bits;
        } else {
#pragma unroll
          for (unsigned k = 0; k < kPack<T>; ++k) {
            if (k < columns) out[pack * kPack<T> + k] = static_cast<T>(numbers[k]);
          }
        }
      }
      copy_next(slot_of(piece));
    }
    slot = slot_of(d.pieces);
  }
};

// A thread's state of the logits that it has seen, and the piece with its first maximum.
struct StreamedPart {
  RowState<float> state;
  unsigned best = 0;
};

template <typename T>
struct StreamedRow {
  const RowArguments<T, float>& a;
  ThreadPacks<T>& packs;
  StreamScratch& scratch;

  __device__ __forceinline__ StreamedPart read() const {
    StreamedPart own;
    RowState<float>& state = own.state;
    packs.first_pass([&](unsigned piece, unsigned, const auto& z) {
      float max = z[0];
#pragma unroll
      for (const float& logit : z) max = maximum(max, logit);
      if (max > state.max()) own.best = piece;
      state = moved(state, shift_of(maximum(max, state.max())));
#pragma unroll
      for (const float& logit : z) state.sum += exponential(logit - state.shift);
    });
    return own;
  }

  // Returns the first rank of this thread's columns, where `max` is the maximum of the block.
  __device__ __forceinline__ int64_t rank_of_own(const StreamedPart& own, float max) const {
    int64_t rank = rank_of_none(a);
    const bool nan = max != max;
    const bool has_maximum =
        own.state.max() == max && max > -std::numeric_limits<float>::infinity();
    if (!nan && !has_maximum) return rank;
#pragma unroll 1
    for (unsigned piece = nan ? 0 : own.best; piece < packs.d.pieces; ++piece) {
      const unsigned pack = packs.pack_of(piece);
      if (pack >= packs.end) break;
      float z[kPack<T>];
      packs.load_logits(piece, pack, z);
#pragma unroll
      for (unsigned k = kPack<T>; k-- > 0;) {
        const int64_t column = static_cast<int64_t>(pack) * kPack<T> + k;
        if (nan && z[k] != z[k]) rank = column;
        if (!nan && z[k] == max) rank = a.columns + column;
      }
      if (rank != rank_of_none(a)) break;
    }
    return rank;
  }

  // Returns the result of the row, from the parts of all threads and blocks.
  __device__ __forceinline__ PartResult combine(const StreamedPart& own, unsigned turn) const {
    const auto larger = [](float x, float y) { return maximum(x, y); };
    const auto add = [](float x, float y) { return x + y; };
    const auto first = [](int64_t x, int64_t y) { return x < y ? x : y; };
    float max[] = {own.state.max()};
    block_reduce(max, -std::numeric_limits<float>::infinity(), scratch.max, larger);
    float sums[] = {moved(own.state, shift_of(max[0])).sum};
    block_reduce(sums, 0.0f, scratch.sums, add);
    int64_t rank[] = {rank_of_none(a)};
    if (a.argmax != nullptr) {
      rank[0] = rank_of_own(own, max[0]);
      block_reduce(rank, rank_of_none(a), scratch.rank, first);
    }
    const PartResult part{shift_of(max[0]), sums[0], rank[0]};
    const unsigned blocks = packs.d.blocks, lane = threadIdx.x % 32;
    if (blocks == 1) return part;
    if (threadIdx.x < blocks) {
      shared_memory_of<StreamScratch>(threadIdx.x).parts[turn][cluster_rank()] = part;
    }
    cluster_barrier();
    // Every warp combines the blocks in the same order.
    PartResult other{0, 0, rank_of_none(a)};
    if (lane < blocks) other = scratch.parts[turn][lane];
    const RowState<float> state{other.shift, other.sum};
    float all[] = {state.max()};
    warp_reduce(all, larger);
    sums[0] = moved(state, shift_of(all[0])).sum;
    warp_reduce(sums, add);
    rank[0] = state.max() == all[0] || other.rank < a.columns ? other.rank : rank_of_none(a);
    warp_reduce(rank, first);
    return {shift_of(all[0]), sums[0], rank[0]};
  }

  __device__ __forceinline__ void without_class(int64_t row, Target target) const {
    if (threadIdx.x == 0 && cluster_rank() == 0) store_without_class(a, row, target);
    const auto value = gradient_without_class<float>(target);
    packs.overwrite(row, [&](unsigned, unsigned, auto& numbers) {
#pragma unroll
      for (float& number : numbers) number = value;
    });
  }

  __device__ __forceinline__ void work(int64_t row, int64_t index, unsigned turn) const {
    // These numbers arrive during the first pass.
    const RowState<float> previous = a.load_state(row);
    const Upstream<float> upstream = a.grad ? a.load_upstream(row) : Upstream<float>();
    const StreamedPart own = read();
    // The thread that has the target's pack also writes the target's gradient.
    const int64_t column = index - a.first_column;
    bool has_target = column >= 0 && column < a.columns;
    const unsigned pack = has_target ? static_cast<unsigned>(column / kPack<T>) : 0;
    has_target = has_target && pack >= packs.begin && pack < packs.end &&
                 (pack - packs.begin) % blockDim.x == threadIdx.x;
    const unsigned piece = has_target ? (pack - packs.begin) / blockDim.x : 0;
    float logit = 0;
    if (has_target) {
      const T* const numbers = reinterpret_cast<const T*>(&packs.at(packs.slot_of(piece)));
      logit = static_cast<float>(numbers[column % kPack<T>]) * a.transform.scale;
    }
    const PartResult result = combine(own, turn);
    const RowState<float> tile{result.shift, result.sum};
    const RowState<float> state = merge(previous, tile);
    if (threadIdx.x == 0 && cluster_rank() == 0) {
      if (a.argmax != nullptr) store_argmax(a, row, previous, tile, result.rank);
      a.store_state(row, state);
    }
    if (has_target) a.target_logit(row) = logit;
    const RowGradient<float> gradient = gradient_of_row(a, state, upstream);
    const float factor = gradient.inverse_sum * gradient.probability * a.transform.scale;
    packs.overwrite(row, [&](unsigned current, unsigned pack_of_current, auto& z) {
      packs.load_logits(current, pack_of_current, z);
#pragma unroll
      for (float& logit_of_class : z) {
        logit_of_class = exponential(logit_of_class - gradient.shift) * factor;
      }
    });
    if (a.grad && has_target) {
      // Computed before p is rounded to 16 bits, because p - 1 would then lose most of its digits.
      const float value = gradient.at(logit, 0) - gradient.target;
      a.logits[row * a.stride + column] = static_cast<T>(value * a.transform.slope(logit));
    }
  }
};

// Two reductions of a row have a barrier each. So all threads have read the numbers of a reduction
// before the same reduction of the next row overwrites them.
template <typename T>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    streamed_rows_kernel(const __grid_constant__ RowArguments<T, float> a,
                         const __grid_constant__ Division d) {
  auto& scratch = shared_memory<StreamScratch>();
  ThreadPacks<T> packs(a, d);
  const StreamedRow<T> block{a, packs, scratch};
  if (d.blocks > 1) cluster_barrier();  // all blocks have begun
  unsigned turn = 0;
  for (int64_t row = packs.first_row(); row < a.rows; row += packs.turns) {
    const int64_t index = a.index[row];
    const Target target = target_of(a, index);
    if (target == Target::kClass) {
      block.work(row, index, turn);
      turn = 1 - turn;
    } else {
      block.without_class(row, target);
    }
  }
}

// Returns how the rows of a tile are divided on a GPU. There are no blocks if they cannot be
// streamed.
template <typename T>
Division division_of(const RowArguments<T, float>& a, int32_t device) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.logits) % sizeof(uint4) == 0 &&
                       a.stride * sizeof(T) % sizeof(uint4) == 0;
  const bool twice = a.update && (a.grad || a.exponentials) && a.columns > 0;
  if (!aligned || !twice) return {};
  const int64_t room =
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / kStreamBlocks -
      attribute(cudaDevAttrReservedSharedMemoryPerBlock, device) -
      static_cast<int64_t>(sizeof(StreamScratch));
  const int64_t packs = (a.columns + kPack<T> - 1) / kPack<T>;
  // Short rows get fewer threads, so that each still has several packs.
  const int64_t most = std::min<int64_t>(kStreamThreads, room / (kSlots * sizeof(uint4)) / 32 * 32);
  const int64_t threads = std::min(most, (packs + 127) / 128 * 32);
  const unsigned most_blocks = attribute(cudaDevAttrClusterLaunch, device) ? kMostClusterBlocks : 1;
  for (unsigned blocks = 1; threads > 0 && blocks <= most_blocks; blocks *= 2) {
    const int64_t part = (packs + blocks - 1) / blocks, pieces = (part + threads - 1) / threads;
    if (pieces > kRowPieces) continue;
    return {blocks, static_cast<unsigned>(part), static_cast<unsigned>(pieces),
            static_cast<unsigned>(threads)};
  }
  return {};
}

template <typename T>
void launch_streamed_rows(const RowArguments<T, float>& a, const Division& d,
                          const Tensor& logits) {
  const auto kernel = streamed_rows_kernel<T>;
  Grid grid{d.blocks, d.threads, d.blocks, kSlots * d.threads * sizeof(uint4)};
  const int32_t device = logits.get_device_index();
  allow_dynamic_memory(kernel, grid.dynamic_bytes);
  // More clusters than run at the same time would wait until the others have finished all rows.
  const int64_t clusters = d.blocks > 1
                               ? clusters_at_once(kernel, grid)
                               : kStreamBlocks * attribute(cudaDevAttrMultiProcessorCount, device);
  grid.blocks *= static_cast<unsigned>(std::clamp<int64_t>(a.rows, 1, clusters));
  launch(kernel, grid, current_stream(logits), a, d);
}

}  // namespace storage_ops::kernels
