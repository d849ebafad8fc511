// The scratch memory of a product: the smallest size, and the fastest. This file is a part of
// product_loops.h, which is included once for each instruction set.
//
// Each thread has a share of the scratch. It copies blocks of both operands there: some rows of the
// left operand, unless they are read in place, and panels of kTileColumns of the right operand. If
// the whole depth is one pass of several groups, the share also has the sums of a block. A 16-bit
// result of several passes needs fp32 sums of all its rows, which come before the shares. Such a
// product is computed in pieces of some rows.

// True if the whole depth is one pass. A 16-bit result is rounded once, so this saves fp32 sums. A
// panel of the right operand must stay in the second-level cache.
template <typename T>
bool in_one_pass(const Product& p) {
  return p.narrow && p.depth <= kOnePass;
}

// Slots of depth in one group of a tile. AMX loads tiles from the first-level cache, so it always
// uses groups, and keeps the sums of a block in fp32 between them.
template <typename T>
int64_t group_of(const Product& p) {
  const int64_t slots = slots_of<T>(p.depth);
  return in_one_pass<T>(p) && kSquare == 1 ? slots : std::min(kDepth<T>, slots);
}

// The smallest share of a thread, in slots.
template <typename T>
int64_t least_of_thread(const Product& p) {
  const int64_t group = group_of<T>(p);
  if (!in_one_pass<T>(p)) return (kTileRows + kTileColumns) * group;
  const int64_t slots = slots_of<T>(p.depth), sums = slots > group ? kTileRows : 0;
  return kTileRows * group + kTileColumns * (slots + sums);
}

// The number of threads that the scratch is enough for.
inline int64_t threads_with(int64_t each, int64_t scratch_slots) {
  return std::min<int64_t>(torch::stable::get_num_threads(), scratch_slots / each);
}

// The smallest scratch of a product, in slots.
template <typename T>
int64_t least_scratch(const Product& p) {
  return (p.narrow && !in_one_pass<T>(p) ? p.rows * p.columns : 0) + least_of_thread<T>(p);
}

// The largest share of a thread, in slots, which fits in its second-level cache. AMX gets more,
// because it computes fast enough that copying the left operand less often pays off.
constexpr int64_t kMostSlots = 160 << 10;
constexpr int64_t kMostSlotsCopied = (kSquare > 1 ? 320 : 160) << 10;
// Slots of all threads together that products of any size may use.
constexpr int64_t kFreeSlots = 1 << 16;
// The smallest number of rows in a piece, unless the product has fewer, and the largest, because
// larger pieces are not faster.
constexpr int64_t kLeastRows = 16, kMostRows = kSquare > 1 ? 2048 : 1024;

// The sizes of a product before its operands exist. The result is enough for every dtype.
struct Request {
  int64_t rows, columns, depth, threads;
  bool rounded;  // the result has 16 bits, not fp32
  bool direct;   // the left operand is read in place

  bool one_pass() const { return rounded && depth <= kOnePass; }
};

// The rows of a piece. Their sums take at most a quarter of the bytes of the left operand, which is
// the tile of logits in deep products.
inline int64_t rows_of(const Request& r) {
  if (!r.rounded || r.one_pass()) return r.rows;
  const int64_t quarter = r.rows * r.depth / (8 * std::max<int64_t>(r.columns, 1));
  return std::min(r.rows, std::clamp(quarter, kLeastRows, kMostRows));
}

// The slots of all shares for pieces of this many rows. All copies have room, up to a limit per
// thread. If the left operand is copied, there is also a limit of half of its bytes, because it is
// the tile of logits. With AMX, an operand that is read in place limits the slots to a quarter of
// its own. Every thread gets at least its smallest share.
inline int64_t shares_of(const Request& r, int64_t rows) {
  constexpr bool kSquares = kSquare > 1;
  const int64_t slots = r.rounded ? parts(r.depth, 2 * kSquare) * kSquare : r.depth;
  const int64_t high =
      r.direct ? kTileRows : std::min(parts(rows, kTileRows) * kTileRows, kBlockRows);
  const int64_t across = parts(r.columns, kTileColumns) * kTileColumns;
  int64_t group = std::min(slots, kMostDepth), whole = 0, least = 0;
  if (r.one_pass() && kSquares) {
    group = std::min(slots, kDepth<BFloat16>);
    whole = high * group + across * (slots + kBlockRows);
    least = kTileRows * group + kTileColumns * (slots + kTileRows);
  } else {
    if (r.one_pass()) group = slots;
    whole = high * group + across * slots;
    least = (kTileRows + kTileColumns) * group;
  }
  const int64_t copied = rows * r.depth / (r.rounded ? 4 : 2);
  const int64_t in_place = kSquares ? rows * std::min(r.columns, r.depth) / 4 : 0;
  const int64_t all = std::max(r.direct ? in_place : copied, kFreeSlots);
  // Rounded down, so that all threads together stay within the limit.
  const int64_t most = std::min(r.direct ? kMostSlots : kMostSlotsCopied, all / r.threads);
  return r.threads * std::max(std::min(whole, most), least);
}

// Returns the rows of a piece, and the slots of scratch for them.
inline std::tuple<int64_t, int64_t> scratch_of(const Request& r) {
  const int64_t rows = rows_of(r), sums = r.rounded && !r.one_pass() ? rows * r.columns : 0;
  return {rows, shares_of(r, rows) + sums};
}
