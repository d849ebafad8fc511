// The streamed form of the row kernel, for calls that update the state and overwrite the logits.
//
// A row stays in shared memory between its two passes, so that memory is read once and written
// once. Each thread copies the numbers that it will use, up to kSlots pieces ahead and across the
// ends of rows. So copies need neither registers nor barriers, and continue while threads wait for
// each other. A row that is too long for a block is divided among the blocks of a cluster.
#pragma once

#include "rows.cuh"

namespace storage_ops::kernels {

// The most threads of a block. Two blocks share a multiprocessor, so that one of them computes
// while the other waits.
constexpr unsigned kStreamThreads = 512, kStreamBlocks = 2;

// A piece of a row is kPiecePacks packs of each thread. A block has memory for kSlots pieces. At
// most kRowPieces are of the row in work, and the others are copied during its first pass.
constexpr unsigned kPiecePacks = 2, kSlots = 7, kRowPieces = 5;

constexpr unsigned kMostClusterBlocks = 8;  // the most that every GPU with clusters supports

// How rows are divided.
struct Division {
  unsigned blocks;   // of a row; 0 if rows cannot be streamed
  unsigned packs;    // of a row in each block; the last block may have fewer
  unsigned pieces;   // of a row in each block
  unsigned threads;  // of a block
};

// The result of a block for its part of a row.
struct alignas(uint4) PartResult {
  float shift, sum;
  unsigned rank;  // of the first maximum
};

struct StreamScratch {
  float max[1][kMaxWarps], sums[1][kMaxWarps];
  unsigned rank[1][kMaxWarps];
  // Results of all blocks. Other blocks may send those of the next row before all threads of this
  // block have read those of the last one, so rows alternate.
  Mailbox<kMostClusterBlocks> results[2];
};

// The numbers that one thread processes: of the row in work, and of rows to come.
template <typename T>
class ThreadNumbers {
 public:
  static constexpr unsigned kNumbers = kPiecePacks * kPack<T>;  // of a piece

  __device__ __forceinline__ ThreadNumbers(const RowArguments<T, float>& a, const Division& d)
      : a_(a),
        d_(d),
        slots_(dynamic_shared_memory() + threadIdx.x),
        begin_(cluster_rank() * d.packs),
        bytes_(bytes_of_block()),
        full_pieces_(bytes_ / static_cast<int>(kPiecePacks * blockDim.x * sizeof(uint4))),
        rows_between_(static_cast<int>(gridDim.x / d.blocks)),
        next_row_(first_row()),
        target_after_(a.index[next_row_]) {
    look_at_next_row();
#pragma unroll 1
    for (unsigned s = 0; s < kSlots; ++s) copy_next(s);
  }

  __device__ __forceinline__ int first_row() const {
    return static_cast<int>(blockIdx.x / d_.blocks);
  }
  // Returns the next row of the block, or one beyond the last row.
  __device__ __forceinline__ int row_after(int row) const {
    const int last = static_cast<int>(a_.rows) - rows_between_;
    return row < last ? row + rows_between_ : static_cast<int>(a_.rows);
  }

  // Calls `body(piece, products)` for the pieces of the row in work, once they have landed.
  // Products beyond the end of the row are -inf.
  //
  // Each piece ends one group of copies here, and one when it is overwritten. So kSlots - 1 groups
  // have followed that of a piece when it is needed.
  template <typename Body>
  __device__ __forceinline__ void read(Body body) const {
#pragma unroll 1
    for (unsigned piece = 0; piece < d_.pieces; ++piece) {
      wait_for_copies<kSlots - 1>();
      end_group_of_copies();
      float products[kNumbers];
      if (is_full(piece)) {
        load<true>(piece, products);
        body(piece, products);
      } else if (has(piece)) {
        load<false>(piece, products);
        body(piece, products);
      }
    }
  }

  // Loads a piece of the row in work that was read before, and that may be full.
  template <bool kIsFull>
  __device__ __forceinline__ void load(unsigned piece, float (&products)[kNumbers]) const {
#pragma unroll
    for (unsigned u = 0; u < kPiecePacks; ++u) {
      float numbers[kPack<T>];
      unpack(slot(slot_of(piece), u), numbers, T());
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) products[u * kPack<T> + k] = numbers[k];
    }
    if constexpr (!kIsFull) {
#pragma unroll
      for (unsigned u = 0; u < kPiecePacks; ++u) {
        const int count = numbers_from(pack_of(piece, u));
#pragma unroll
        for (int k = 0; k < kPack<T>; ++k) {
          if (k >= count) products[u * kPack<T> + k] = -std::numeric_limits<float>::infinity();
        }
      }
    }
  }

  // Overwrites a row by `body(product)` for each product, and continues with the next row. The
  // slots become free for rows to come. If not `kReads`, the products are undefined.
  template <bool kReads, typename Body>
  __device__ __forceinline__ void overwrite(int row, Body body) {
    T* const out = a_.logits + row * a_.stride + static_cast<int64_t>(begin_) * kPack<T>;
#pragma unroll 1
    for (unsigned piece = 0; piece < d_.pieces; ++piece) {
      if (is_full(piece)) {
        overwrite_piece<kReads, true>(out, piece, body);
      } else if (has(piece)) {
        overwrite_piece<kReads, false>(out, piece, body);
      }
      copy_next(slot_of(piece));
    }
    first_slot_ = slot_of(d_.pieces);
  }

  // Returns true if this thread has numbers of a piece.
  __device__ __forceinline__ bool has(unsigned piece) const {
    return is_full(piece) || numbers_from(pack_of(piece, 0)) > 0;
  }

  // Returns the column of a number of a piece.
  __device__ __forceinline__ unsigned column_of(unsigned piece, unsigned k) const {
    return (begin_ + pack_of(piece, k / kPack<T>)) * kPack<T> + k % kPack<T>;
  }

  // Returns the product of a column in the row in work if it is one of this thread, or nullptr.
  __device__ __forceinline__ const T* find(int64_t column) const {
    const int64_t local = column - static_cast<int64_t>(begin_) * kPack<T>;
    if (local < 0 || local * static_cast<int64_t>(sizeof(T)) >= bytes_) return nullptr;
    const unsigned pack = static_cast<unsigned>(local) / kPack<T>, turn = pack / blockDim.x;
    if (pack % blockDim.x != threadIdx.x) return nullptr;
    const uint4& found = slot(slot_of(turn / kPiecePacks), turn % kPiecePacks);
    return reinterpret_cast<const T*>(&found) + local % kPack<T>;
  }

 private:
  // Returns the bytes of a row in this block, which are not positive if the row is too short.
  __device__ __forceinline__ int bytes_of_block() const {
    const int left = static_cast<int>(a_.columns * sizeof(T) - begin_ * sizeof(uint4));
    const auto most = static_cast<int>(d_.packs * sizeof(uint4));
    return left < most ? left : most;
  }

  // Returns true if all threads have all numbers of a piece. The last block of a row may have fewer
  // full pieces than the others.
  __device__ __forceinline__ bool is_full(int piece) const { return piece < full_pieces_; }

  // Returns the number of a thread's pack in the block's part of a row.
  __device__ __forceinline__ unsigned pack_of(unsigned piece, unsigned u) const {
    return (piece * kPiecePacks + u) * blockDim.x + threadIdx.x;
  }

  // Returns how many numbers a row has from a pack on.
  __device__ __forceinline__ int numbers_from(unsigned pack) const {
    return (bytes_ - static_cast<int>(pack * sizeof(uint4))) / static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ unsigned slot_of(unsigned piece) const {
    const unsigned s = first_slot_ + piece;
    return s < kSlots ? s : s - kSlots;
  }

  __device__ __forceinline__ uint4& slot(unsigned s, unsigned u) const {
    return slots_[(s * kPiecePacks + u) * blockDim.x];
  }

  template <bool kReads, bool kIsFull, typename Body>
  __device__ __forceinline__ void overwrite_piece(T* out, unsigned piece, Body body) const {
    float numbers[kNumbers];
    if constexpr (kReads) load<kIsFull>(piece, numbers);
#pragma unroll
    for (unsigned u = 0; u < kPiecePacks; ++u) {
      const unsigned own = pack_of(piece, u);
      float results[kPack<T>];
#pragma unroll
      for (int k = 0; k < kPack<T>; ++k) results[k] = body(numbers[u * kPack<T> + k]);
      uint4 bits;
      pack(results, bits, T());
      const int count = kIsFull ? kPack<T> : numbers_from(own);
      if (count >= kPack<T>) {
        reinterpret_cast<uint4*>(out)[own] = bits;
      } else if (count > 0) {  // the last numbers of a row, one by one from the slot
        uint4& kept = slot(slot_of(piece), u);
        kept = bits;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
          out[own * kPack<T> + k] = reinterpret_cast<const T*>(&kept)[k];
        }
      }
    }
  }

  // Decides whether the next row is read at all. Its target was loaded one row before.
  __device__ __forceinline__ void look_at_next_row() {
    const bool exists = next_row_ < a_.rows;
    const bool reads = exists && target_of(a_, target_after_) == Target::kClass;
    next_left_ = reads ? bytes_ - static_cast<int>(threadIdx.x * sizeof(uint4)) : 0;
    next_from_ =
        reinterpret_cast<const uint4*>(a_.logits + next_row_ * a_.stride) + begin_ + threadIdx.x;
    const int after = row_after(next_row_);
    if (after < a_.rows) target_after_ = a_.index[after];
  }

  // Starts to copy the next piece to a slot whose piece is no longer needed.
  __device__ __forceinline__ void copy_next(unsigned free_slot) {
    const auto step = static_cast<int>(blockDim.x * sizeof(uint4));
    constexpr int kPackBytes = sizeof(uint4);
    if (next_left_ >= static_cast<int>(kPiecePacks - 1) * step + kPackBytes) {
#pragma unroll
      for (unsigned u = 0; u < kPiecePacks; ++u) {
        copy_async(&slot(free_slot, u), next_from_ + u * blockDim.x);
      }
    } else {
#pragma unroll 1
      for (unsigned u = 0; u < kPiecePacks; ++u) {
        const int left = next_left_ - static_cast<int>(u) * step;
        const int bytes = left < kPackBytes ? left : kPackBytes;
        if (left > 0) copy_async(&slot(free_slot, u), next_from_ + u * blockDim.x, bytes);
      }
    }
    end_group_of_copies();
    next_left_ -= static_cast<int>(kPiecePacks) * step;
    next_from_ += kPiecePacks * blockDim.x;
    if (++next_piece_ < d_.pieces) return;
    next_piece_ = 0;
    next_row_ = row_after(next_row_);
    look_at_next_row();
  }

  const RowArguments<T, float>& a_;
  const Division& d_;
  uint4* const slots_;
  const unsigned begin_;  // the first pack of the block
  const int bytes_, full_pieces_;
  const int rows_between_;
  unsigned first_slot_ = 0;  // of the row in work
  // The piece that is copied next, where this thread reads it, the bytes of the row from there on,
  // its row, and the target of the row after.
  unsigned next_piece_ = 0;
  const uint4* next_from_;
  int next_left_, next_row_;
  int64_t target_after_;
};

// A thread's state of the products that it has read, and the piece with its first maximum.
struct StreamedPart {
  RowState<float> state;
  unsigned best = 0;
};

// The block that works on rows. The scale of the logits is positive.
template <typename T>
struct StreamingBlock {
  const RowArguments<T, float>& a;
  const Division& d;
  ThreadNumbers<T>& numbers;
  StreamScratch& scratch;
  static constexpr unsigned kNumbers = ThreadNumbers<T>::kNumbers;

  __device__ __forceinline__ StreamedPart read() const {
    StreamedPart own;
    RowState<float>& state = own.state;
    const float scale = a.transform.scale;
    numbers.read([&](unsigned piece, const auto& products) {
      float most = products[0];
#pragma unroll
      for (const float& product : products) most = maximum(most, product);
      const float max = most * scale;
      if (max > state.max()) own.best = piece;
      state = moved(state, shift_of(maximum(max, state.max())));
#pragma unroll
      for (const float& product : products) {
        state.sum += exponential(product * scale - state.shift);
      }
    });
    return own;
  }

  __device__ __forceinline__ unsigned columns() const { return static_cast<unsigned>(a.columns); }
  __device__ __forceinline__ unsigned no_rank() const {
    return static_cast<unsigned>(rank_of_none(a));
  }

  // Returns the first rank of this thread's columns, where `max` is the maximum of the block.
  __device__ __forceinline__ unsigned rank_of_own(const StreamedPart& own, float max) const {
    const bool is_nan = max != max;
    const bool has_maximum =
        own.state.max() == max && max > -std::numeric_limits<float>::infinity();
    unsigned rank = no_rank();
    if (!is_nan && !has_maximum) return rank;
#pragma unroll 1
    for (unsigned piece = is_nan ? 0 : own.best; piece < d.pieces && rank == no_rank(); ++piece) {
      if (!numbers.has(piece)) break;
      float products[kNumbers];
      numbers.template load<false>(piece, products);
#pragma unroll
      for (unsigned k = kNumbers; k-- > 0;) {  // backwards, so that the first one remains
        const float logit = products[k] * a.transform.scale;
        if (is_nan && logit != logit) rank = numbers.column_of(piece, k);
        if (logit == max) rank = columns() + numbers.column_of(piece, k);
      }
    }
    return rank;
  }

  // Returns the state of the row after this tile, and the first rank if the tile has a new maximum.
  // `previous` is the state before, in the first block only. `number` counts the rows of this block
  // with a result.
  __device__ __forceinline__ PartResult combine(const StreamedPart& own,
                                                const RowState<float>& previous,
                                                unsigned number) const {
    const auto larger = [](float x, float y) { return maximum(x, y); };
    const auto add = [](float x, float y) { return x + y; };
    const auto first = [](unsigned x, unsigned y) { return x < y ? x : y; };
    float max[] = {own.state.max()};
    block_reduce(max, -std::numeric_limits<float>::infinity(), scratch.max, larger);
    float sums[] = {moved(own.state, shift_of(max[0])).sum};
    unsigned rank[] = {a.argmax != nullptr ? rank_of_own(own, max[0]) : no_rank()};
    reduce_before_barrier(sums, scratch.sums, add);
    reduce_before_barrier(rank, scratch.rank, first);
    __syncthreads();
    reduce_after_barrier(sums, 0.0f, scratch.sums, add);
    reduce_after_barrier(rank, no_rank(), scratch.rank, first);
    const RowState<float> merged = merge(previous, {shift_of(max[0]), sums[0]});
    const bool is_new = max[0] > previous.max() || rank[0] < columns();
    PartResult part{merged.shift, merged.sum, is_new ? rank[0] : no_rank()};
    if (d.blocks == 1) return part;
    auto& results = scratch.results[number % 2];
    if (threadIdx.x == 0) results.expect(d.blocks);
    if (threadIdx.x < d.blocks) {
      uint4 letter;
      std::memcpy(&letter, &part, sizeof letter);
      results.send(threadIdx.x, letter);
    }
    results.wait(number / 2 % 2);
    // Every warp combines the blocks in the same order.
    part = {0, 0, no_rank()};
    const unsigned lane = threadIdx.x % 32;
    if (lane < d.blocks) std::memcpy(&part, &results.letters[lane], sizeof part);
    const RowState<float> state{part.shift, part.sum};
    max[0] = state.max();
    warp_reduce(max, larger);
    sums[0] = moved(state, shift_of(max[0])).sum;
    warp_reduce(sums, add);
    rank[0] = state.max() == max[0] || part.rank < columns() ? part.rank : no_rank();
    warp_reduce(rank, first);
    return {shift_of(max[0]), sums[0], rank[0]};
  }

  __device__ __forceinline__ void work(int row, int64_t index, unsigned number) const {
    const StreamedPart own = read();
    // These numbers arrive during the reductions. A tile without shares has no other ones. Other
    // blocks would not know when they may still read the state.
    RowState<float> previous;
    if (cluster_rank() == 0) {
      previous.shift = a.state[row];
      previous.sum = a.state[a.state_stride + row];
    }
    Upstream<float> upstream;
    if (a.grad) {
      const Upstream<float> all = a.load_upstream(row);
      upstream.target = all.target;
      upstream.lse = all.lse;
    }
    // The thread that has the target's product also writes its gradient.
    const int64_t column = index - a.first_column;
    const T* const target = numbers.find(column);
    const bool has_target = target != nullptr;
    const float logit = has_target ? static_cast<float>(*target) * a.transform.scale : 0.0f;
    const PartResult result = combine(own, previous, number);
    const RowState<float> state{result.shift, result.sum};
    if (threadIdx.x == 0 && cluster_rank() == 0) {
      if (a.argmax != nullptr) store_argmax(a, row, previous, state, result.rank);
      a.state[row] = state.shift;
      a.state[a.state_stride + row] = state.sum;
    }
    if (has_target) a.target_logit(row) = logit;
    const RowGradient<float> gradient = gradient_of_row(a, state, upstream);
    const float scale = a.transform.scale;
    const float factor = gradient.inverse_sum * gradient.probability * scale;
    numbers.template overwrite<true>(
        row, [&](float product) { return exponential(product * scale - gradient.shift) * factor; });
    if (a.grad && has_target) {
      // Computed before p is rounded to 16 bits, because p - 1 would then lose most of its digits.
      const float value = gradient.at(logit, 0) - gradient.target;
      a.logits[row * a.stride + column] = static_cast<T>(value * a.transform.slope(logit));
    }
  }

  __device__ __forceinline__ void skip(int row, Target target) const {
    if (threadIdx.x == 0 && cluster_rank() == 0) store_without_class(a, row, target);
    const auto value = gradient_without_class<float>(target);
    numbers.template overwrite<false>(row, [&](float) { return value; });
  }
};

// A row has two barriers. So all threads have read the numbers of a reduction before the same
// reduction of the next row overwrites them.
template <typename T>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    streamed_rows_kernel(const __grid_constant__ RowArguments<T, float> a,
                         const __grid_constant__ Division d) {
  auto& scratch = shared_memory<StreamScratch>();
  if (d.blocks > 1) {
    if (threadIdx.x < 2) scratch.results[threadIdx.x].open();
    cluster_barrier();
  }
  ThreadNumbers<T> numbers(a, d);
  const StreamingBlock<T> block{a, d, numbers, scratch};
  unsigned number = 0;
  int row = numbers.first_row();
  int64_t index = a.index[row];
  while (row < a.rows) {
    const int after = numbers.row_after(row);
    const int64_t index_after = after < a.rows ? a.index[after] : 0;  // arrives during this row
    const Target target = target_of(a, index);
    if (target == Target::kClass) {
      block.work(row, index, number++);
    } else {
      block.skip(row, target);
    }
    row = after;
    index = index_after;
  }
}

// Returns how the rows of a tile are divided on a GPU.
template <typename T>
Division division_of(const RowArguments<T, float>& a, int32_t device) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.logits) % sizeof(uint4) == 0 &&
                       a.stride * sizeof(T) % sizeof(uint4) == 0;
  const bool twice = a.update && (a.grad || a.exponentials);
  if (!aligned || !twice || a.columns == 0 || !(a.transform.scale > 0)) return {};
  const int64_t room =
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / kStreamBlocks -
      attribute(cudaDevAttrReservedSharedMemoryPerBlock, device) -
      static_cast<int64_t>(sizeof(StreamScratch));
  const int64_t warp_bytes = kSlots * kPiecePacks * sizeof(uint4) * 32;
  const int64_t packs = (a.columns + kPack<T> - 1) / kPack<T>;
  // Short rows get fewer threads, so that each still has several packs.
  constexpr int64_t kWarpPacks = 4 * 32;
  const int64_t warps = std::min(
      {int64_t{kStreamThreads / 32}, room / warp_bytes, (packs + kWarpPacks - 1) / kWarpPacks});
  const int64_t piece = warps * 32 * kPiecePacks;
  const unsigned most = has_clusters(streamed_rows_kernel<T>, device) ? kMostClusterBlocks : 1;
  for (unsigned blocks = 1; piece > 0 && blocks <= most; blocks *= 2) {
    const int64_t part = (packs + blocks - 1) / blocks, pieces = (part + piece - 1) / piece;
    if (pieces > kRowPieces) continue;
    return {blocks, static_cast<unsigned>(part), static_cast<unsigned>(pieces),
            static_cast<unsigned>(warps * 32)};
  }
  return {};
}

template <typename T>
void launch_streamed_rows(const RowArguments<T, float>& a, const Division& d,
                          const Tensor& logits) {
  const auto kernel = streamed_rows_kernel<T>;
  Grid grid{d.blocks, d.threads, d.blocks, kSlots * kPiecePacks * d.threads * sizeof(uint4)};
  allow_dynamic_memory(kernel, grid.dynamic_bytes);
  // More clusters than run at the same time would wait until the others have finished all rows.
  const int64_t clusters = d.blocks > 1
                               ? clusters_at_once(kernel, grid)
                               : int64_t{kStreamBlocks} * attribute(cudaDevAttrMultiProcessorCount,
                                                                    logits.get_device_index());
  grid.blocks *= static_cast<unsigned>(std::max<int64_t>(1, std::min(a.rows, clusters)));
  launch(kernel, grid, current_stream(logits), a, d);
}

}  // namespace storage_ops::kernels
