// The loops of a matrix product with fp32 sums, for one instruction set. products.cpp includes this
// file once for each instruction set, in a separate namespace and between pragmas that select the
// set. Before that it defines these macros:
//   STORAGE_OPS_LANES  floats in a vector register,
//   STORAGE_OPS_ROWS   rows of the tile of results that the registers hold,
//   STORAGE_OPS_DOT    defined if an instruction multiplies pairs of bf16 and adds to fp32,
//   STORAGE_OPS_TILES  defined if registers hold tiles of 16 rows (AMX), for bf16 only.
//
// The order of the loops is that of Goto and van de Geijn (2008, doi:10.1145/1356052.1356053). A
// block of the right operand is copied, so that it is read in order. Then blocks of the left
// operand are copied into the second-level cache. The registers have a tile of the result. Operands
// are copied into slots of 32 bits. A slot has one fp32 number, or a pair of bf16 that are
// neighbours in depth.

#include "product_pack.h"
#include "product_scratch.h"
#include "product_tile.h"

// The sizes of the blocks of both operands that are copied at a time.
struct Block {
  int64_t begin, depth, column, columns;
};
struct Rows {
  int64_t begin, depth, row, count;
};

// The work of one thread: a rectangle of the result, with its own scratch memory.
template <typename T, typename Out>
struct Part {
  const Product& product;
  int64_t first_row, last_row, first_column, last_column;
  uint32_t* left;   // room for `height` x `group` slots
  uint32_t* right;  // room for panels of kTileColumns columns, for every `group` slots
  int64_t room;     // slots of depth that fit into `right` for one panel
  int64_t group;    // slots of depth in one pass over a tile
  int64_t height;   // rows of the left operand that are processed at a time
  bool direct;      // the left operand is read in place
  // Room for sums of `height` x a block's columns, if the block has the whole depth.
  float* partial;

  static constexpr int64_t kSlotBytes = kGroup<T> * sizeof(T);
  static constexpr int64_t kStepNumbers = kStep * kGroup<T>;

  int64_t numbers() const { return group * kGroup<T>; }

  int64_t fetching_steps(int64_t depth) const {
    return kFetchesWithin<T> ? parts(slots_of<T>(depth), Fetches::kStep) : parts(depth, numbers());
  }

  void run() const {
    const int64_t all_panels = parts(last_column - first_column, kTileColumns);
    const int64_t all_slots = slots_of<T>(product.depth);
    // The whole depth, or as much as leaves room for all panels.
    int64_t slots = all_slots;
    if (all_slots * all_panels > room && partial == nullptr)
      slots = std::max(room / all_panels / group, int64_t(1)) * group;
    slots = std::min(slots, all_slots);
    const int64_t depth = slots * kGroup<T>;
    const int64_t columns = std::min(all_panels, room / slots) * kTileColumns;
    const int64_t across = parts(last_column - first_column, columns);
    const int64_t along = parts(product.depth, depth);
    // The outer loop is over the larger of the result and the left operand, which is read once.
    const bool depth_last = product.depth > last_column - first_column;
    const auto block_at = [&](int64_t t) {
      const int64_t column = first_column + (depth_last ? t % across : t / along) * columns;
      const int64_t begin = (depth_last ? t / across : t % along) * depth;
      return Block{begin, std::min(depth, product.depth - begin), column,
                   std::min(columns, last_column - column)};
    };
    for (int64_t t = 0; t < across * along; ++t) {
      const Block now = block_at(t);
      pack_right(now);
      multiply_block(now, t + 1 < across * along ? block_at(t + 1) : Block{});
    }
  }

  const T* start(const Block& b) const {
    const Product& p = product;
    return static_cast<const T*>(p.right) + b.begin * p.right_row + b.column * p.right_column;
  }

  const T* start(const Rows& r) const {
    const Product& p = product;
    return static_cast<const T*>(p.left) + r.row * p.left_row + r.begin * p.left_column;
  }

  void pack_right(const Block& b) const {
    const Product& p = product;
    const T* from = start(b);
    const int64_t panels = parts(b.columns, kTileColumns);
    for (int64_t k = 0; k < b.depth; k += kStepNumbers) {
      const int64_t begin = k / numbers() * numbers();
      const int64_t slots = slots_of<T>(std::min(numbers(), b.depth - begin));
      for (int64_t j = 0; j < panels; ++j) {
        uint32_t* to = right + begin / kGroup<T> * panels * kTileColumns;
        to += j * kTileColumns * slots + (k - begin) / kGroup<T> * kTileColumns;
        pack<kTileColumns>(from + k * p.right_row + j * kTileColumns * p.right_column,
                           p.right_column, p.right_row,
                           std::min<int64_t>(kTileColumns, b.columns - j * kTileColumns),
                           std::min(kStepNumbers, b.depth - k), to);
      }
    }
  }

  Rows rows_at(const Block& b, int64_t row, int64_t begin) const {
    return Rows{b.begin + begin, std::min(numbers(), b.depth - begin), row,
                std::min(height, last_row - row)};
  }

  void multiply_block(const Block& now, const Block& next) const {
    const Product& p = product;
    const int64_t steps = parts(last_row - first_row, kTileRows) *
                          parts(now.columns, kTileColumns) * fetching_steps(now.depth);
    Ahead ahead(start(next), next.depth, p.right_row, next.columns, p.right_column, steps);
    for (int64_t row = first_row; row < last_row; row += height) {
      for (int64_t begin = 0; begin < now.depth; begin += numbers()) {
        const Rows after = begin + numbers() < now.depth ? rows_at(now, row, begin + numbers())
                           : row + height < last_row     ? rows_at(now, row + height, 0)
                                                         : rows_at(next, first_row, 0);
        multiply_rows(now, rows_at(now, row, begin), after, ahead);
      }
    }
  }

  void multiply_rows(const Block& block, const Rows& now, const Rows& next, Ahead& ahead) const {
    const Product& p = product;
    const int64_t panels = parts(block.columns, kTileColumns), slots = slots_of<T>(now.depth);
    // Operands that are read in place need whole tiles of rows, so the last rows may be copied.
    const int64_t whole = direct ? now.count / kTileRows * kTileRows : 0;
    for (int64_t k = 0; k < now.depth; k += kStepNumbers) {
      for (int64_t i = whole; i < now.count; i += kTileRows) {
        pack_rows(start(now) + i * p.left_row + k * p.left_column, p.left_row, p.left_column,
                  std::min<int64_t>(kTileRows, now.count - i),
                  std::min(kStepNumbers, now.depth - k),
                  left + (i - whole) * slots + k / kGroup<T> * kTileRows);
      }
    }
    const int64_t steps = parts(now.count, kTileRows) * panels * fetching_steps(now.depth);
    Fetches fetches{ahead, {start(next), next.count, p.left_row, next.depth, p.left_column, steps}};
    const uint32_t* packed = right + (now.begin - block.begin) / kGroup<T> * panels * kTileColumns;
    for (int64_t j = 0; j < panels; ++j) {
      for (int64_t i = 0; i < now.count; i += kTileRows) {
        FetchesOf<T> fetching(fetches);
        const int64_t column = block.column + j * kTileColumns;
        const Left a = i < whole ? Left{reinterpret_cast<const char*>(start(now) + i * p.left_row),
                                        p.left_row * int64_t(sizeof(T)), p.left_column * kSlotBytes}
                                 : Left{reinterpret_cast<const char*>(left + (i - whole) * slots),
                                        4 * kSquare, 4 * kTileRows};
        const float* b = reinterpret_cast<const float*>(packed + j * kTileColumns * slots);
        const int64_t high = std::min<int64_t>(kTileRows, now.count - i);
        const int64_t wide = std::min<int64_t>(kTileColumns, last_column - column);
        Out* out = static_cast<Out*>(p.out) + (now.row + i) * p.out_row + column;
        float* sums = p.sums == nullptr ? nullptr : p.sums + (now.row + i) * p.columns + column;
        int64_t across = p.columns;
        if (partial != nullptr) {
          across = panels * kTileColumns;
          sums = partial + i * across + j * kTileColumns;
        }
        if (now.begin + now.depth < p.depth && sums != nullptr) {
          one_tile(high, wide, slots, a, b, fetching, Place<float>{sums, across}, now.begin > 0);
        } else if (now.begin > 0 && sums != nullptr) {
          one_tile(high, wide, slots, a, b, fetching, Place<Out>{out, p.out_row, sums, across},
                   p.add);
        } else {
          one_tile(high, wide, slots, a, b, fetching, Place<Out>{out, p.out_row},
                   p.add || now.begin > 0);
        }
      }
    }
  }

  template <typename To>
  void one_tile(int64_t high, int64_t wide, int64_t slots, const Left& a, const float* b,
                FetchesOf<T>& fetching, const Place<To>& place, bool adds) const {
    constexpr bool kDot = kPairs<T>;
    if (high == kTileRows && wide == kTileColumns) {
      return adds ? tile<kDot, true>(slots, a, b, fetching, place)
                  : tile<kDot, false>(slots, a, b, fetching, place);
    }
    alignas(64) float whole[kTileRows * kTileColumns];
    tile<kDot, false>(slots, a, b, fetching, Place<float>{whole, kTileColumns});
    for (int64_t i = 0; i < high; ++i) {
      To* to = place.out + i * place.stride;
      for (int64_t j = 0; j < wide; ++j) {
        float value = whole[i * kTileColumns + j];
        if (adds) value += static_cast<float>(to[j]);
        if (place.sums != nullptr) value += place.sums[i * place.sums_stride + j];
        to[j] = To(value);
      }
    }
  }
};

// The number of parts along the rows and along the columns of the result.
struct Grid {
  int64_t rows, columns;
};

// Every thread computes one part alone, and waits for the others only at the end. If the system
// suspends a thread, shared blocks would delay all threads, block after block.
inline Grid grid_of(const Product& p, int64_t threads, bool direct) {
  // The cost of copying a number of an operand, in multiplications.
  constexpr int64_t kCopying = kSquare > 1 ? 256 : 32;
  // Adjacent parts share pages of the result. Threads wait for each other on pages that are new.
  constexpr int64_t kSharing = 128;
  const int64_t row_tiles = parts(p.rows, kTileRows), panels = parts(p.columns, kTileColumns);
  Grid best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t r = 1; r <= std::min(threads, row_tiles); ++r) {
    const int64_t c = std::min(threads / r, panels);
    const int64_t rows = parts(row_tiles, r) * kTileRows, columns = parts(panels, c) * kTileColumns;
    const int64_t cost =
        rows * columns + kCopying * columns + (direct ? kSharing : kCopying) * rows;
    if (cost < least) best = Grid{r, c}, least = cost;
  }
  return best;
}

// Interleaves adjacent rows of a transposed left operand in place. Then the numbers of a slot are
// adjacent, and are read in place. Returns false if this is not possible, or if there is too little
// scratch.
template <typename T>
bool pair_rows(Product& p) {
  const int64_t pairs = p.depth / 2, width = p.rows, threads = threads_with(width, p.scratch_slots);
  if (p.depth % 2 != 0 || width % 8 != 0 || p.left_row != 1 || p.left_column < width ||
      threads == 0)
    return false;
  T* rows = static_cast<T*>(p.spent);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t one, int64_t last) {
    for (int64_t t = one; t < last; ++t) {
      uint32_t* slots = p.scratch + t * width;
      for (int64_t k = pairs * t / threads; k < pairs * (t + 1) / threads; ++k) {
        T *first = rows + 2 * k * p.left_column, *second = first + p.left_column;
        for (int64_t u = 0; u < width; u += 8) {
          const Eight eight = make_slots(first + u, second + u);
          std::memcpy(slots + u, &eight, sizeof eight);
        }
        std::memcpy(first, slots, 4 * width);
      }
    }
  });
  p.left_row = 2, p.paired = true;
  return true;
}

template <typename T, typename Out>
void multiply_into(Product p) {
  if (p.rows == 0 || p.columns == 0) return;
  if (p.depth == 0) {
    for (int64_t i = 0; i < p.rows && !p.add; ++i) {
      std::fill_n(static_cast<Out*>(p.out) + i * p.out_row, p.columns, Out(0.0f));
    }
    return;
  }
  const int64_t threads = threads_with(least_of_thread<T>(p), p.scratch_slots);
  STORAGE_OPS_CHECK(threads > 0, "_product: `scratch` has ", p.scratch_slots,
                    " elements beside the sums. Expected at least ", least_of_thread<T>(p), ".");
  const bool in_slots = (sizeof(T) == 4 || kPairs<T>) && p.left_column == 1;
  const bool direct = p.paired || (in_slots && p.depth % (kGroup<T> * kSquare) == 0);
  const Grid grid = grid_of(p, threads, direct);
  const int64_t row_tiles = parts(p.rows, kTileRows), panels = parts(p.columns, kTileColumns);
  const int64_t group = group_of<T>(p), all_slots = slots_of<T>(p.depth);
  const int64_t count = grid.rows * grid.columns, each = p.scratch_slots / count;
  // If the left operand is copied, it gets an eighth of the scratch, and the rest of the right
  // operand's whole panels.
  const int64_t high = std::min(row_tiles * kTileRows, direct ? kTileRows : kBlockRows);
  const auto rows_in = [&](int64_t slots) {
    return std::clamp<int64_t>(slots / group / kTileRows * kTileRows, kTileRows, high);
  };
  const int64_t panel = kTileColumns * group;
  const int64_t panels_slots = (each - rows_in(each / 8) * group) / panel * panel;
  int64_t left_slots = rows_in(each - panels_slots) * group;
  // Rows that are read in place are reused for the other panels of a block.
  const bool one_panel = group == all_slots && panels_slots < 2 * panel;
  int64_t height = !direct ? left_slots / group : one_panel ? kTileRows : kBlockRows;
  if constexpr (kPairs<T> && kSquare == 1) {
    // If an operand that may be overwritten would be copied more often, interleaving it is faster.
    constexpr int64_t kCopies = 4;
    const int64_t at_once = std::max<int64_t>(panels_slots / panel * group / all_slots, 1);
    if (p.spent != nullptr && !direct && parts(parts(panels, grid.columns), at_once) > kCopies &&
        pair_rows<T>(p))
      return multiply_into<T, Out>(p);
  }
  int64_t room = (each - left_slots) / kTileColumns;
  const bool keeps = in_one_pass<T>(p) && group < all_slots;
  if (keeps) {  // whole panels, and sums for as many rows as then fit
    height = std::min(row_tiles * kTileRows, kBlockRows);
    const auto panels_beside = [&](int64_t rows) {
      left_slots = (direct ? kTileRows : rows) * group;
      return (each - left_slots) / (kTileColumns * (all_slots + rows));
    };
    while (height > kTileRows && panels_beside(height) == 0) height -= kTileRows;
    room = panels_beside(height) * all_slots;
  }
  torch::stable::parallel_for(0, count, 1, [&](int64_t one, int64_t last) {
    [[maybe_unused]] const Registers registers{};
    for (int64_t t = one; t < last; ++t) {
      const int64_t i = t / grid.columns, j = t % grid.columns;
      uint32_t* left = p.scratch + t * each;
      float* sums = reinterpret_cast<float*>(left + left_slots + room * kTileColumns);
      const Part<T, Out> part{p,
                              row_tiles * i / grid.rows * kTileRows,
                              std::min(row_tiles * (i + 1) / grid.rows * kTileRows, p.rows),
                              panels * j / grid.columns * kTileColumns,
                              std::min(panels * (j + 1) / grid.columns * kTileColumns, p.columns),
                              left,
                              left + left_slots,
                              room,
                              group,
                              height,
                              direct,
                              keeps ? sums : nullptr};
      part.run();
    }
  });
}

template <typename T>
void multiply(Product p) {
  if (!p.narrow) return multiply_into<T, float>(p);
  STORAGE_OPS_CHECK(kPairs<T>, "_product: `out` of 16 bits needs bfloat16 and AVX-512 BF16.");
  if (p.depth > kOnePass) {
    const int64_t sums = std::min(p.rows * p.columns, p.scratch_slots);
    p.sums = reinterpret_cast<float*>(p.scratch);
    p.scratch += sums, p.scratch_slots -= sums;
  }
  if constexpr (kPairs<T>) multiply_into<T, T>(p);
}
