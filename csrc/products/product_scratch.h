// How much scratch a product takes: what it cannot do without, and what it is best given. Part of
// product_loops.h, and included with it for each instruction set.
//
// A thread copies blocks of both operands to its share: some rows of the left one, unless they are
// read in place, and panels of kTileColumns of the right one. Where all of the depth is computed in
// one pass, but in several groups, the sums of a block lie beside them. A result in 16 bits that
// takes more than one pass keeps sums of all its rows in fp32 before those shares: such a product
// is formed in pieces of some rows.

// Whether a product that can only be rounded once is computed in all of its depth at a time, as
// long as a panel of the right operand stays in the second-level cache.
template <typename T>
bool in_one_pass(const Product& p) {
  return p.narrow && p.depth <= kOnePass;
}

// Slots of depth that a tile is computed in at a time. Tiles of AMX are loaded from the first-level
// cache or wait for it: with these, the sums of a block are kept in fp32 meanwhile.
template <typename T>
int64_t group_of(const Product& p) {
  const int64_t slots = slots_of<T>(p.depth);
  return in_one_pass<T>(p) && kSquare == 1 ? slots : std::min(kDepth<T>, slots);
}

// The scratch that a thread cannot do without, in slots.
template <typename T>
int64_t least_of_thread(const Product& p) {
  const int64_t group = group_of<T>(p);
  if (!in_one_pass<T>(p)) return (kTileRows + kTileColumns) * group;
  const int64_t slots = slots_of<T>(p.depth), sums = slots > group ? kTileRows : 0;
  return kTileRows * group + kTileColumns * (slots + sums);
}

// As many threads as there is scratch for.
inline int64_t threads_with(int64_t each, int64_t scratch_slots) {
  return std::min<int64_t>(torch::stable::get_num_threads(), scratch_slots / each);
}

// The scratch that a product cannot do without, in slots.
template <typename T>
int64_t least_scratch(const Product& p) {
  return (p.narrow && !in_one_pass<T>(p) ? p.rows * p.columns : 0) + least_of_thread<T>(p);
}

// Slots that a thread is given, at most: they lie in its second-level cache. AMX computes so fast
// that fewer copies of the left operand are worth more of that.
constexpr int64_t kMostSlots = 160 << 10;
constexpr int64_t kMostSlotsCopied = (kSquare > 1 ? 320 : 160) << 10;
// Slots that all threads together are given in any case.
constexpr int64_t kFreeSlots = 1 << 16;
// Rows that a piece has at least, whatever their sums take, unless the product itself has fewer,
// and the number of rows above which a piece is not faster.
constexpr int64_t kLeastRows = 16, kMostRows = kSquare > 1 ? 2048 : 1024;

// What is asked for before the operands are there, so that of all dtypes the largest number holds.
struct Request {
  int64_t rows, columns, depth, threads;
  bool rounded;  // to 16 bits; or the result is in fp32
  bool direct;   // the left operand is read in place

  bool one_pass() const { return rounded && depth <= kOnePass; }
};

// The rows that are formed at a time. Their sums have no more than a quarter of the bytes of the
// left operand, which is the tile of logits where that is deep.
inline int64_t rows_of(const Request& r) {
  if (!r.rounded || r.one_pass()) return r.rows;
  const int64_t quarter = r.rows * r.depth / (8 * std::max<int64_t>(r.columns, 1));
  return std::min(r.rows, std::clamp(quarter, kLeastRows, kMostRows));
}

// The slots for so many rows, sums apart: for all that is copied, up to a limit for each thread and
// to half of the bytes of the left operand, if that is the tile of logits (with AMX: to a quarter
// of the slots of any), but for what threads cannot do without.
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
  // Rounded down, so that all threads together keep to the limit.
  const int64_t most = std::min(r.direct ? kMostSlots : kMostSlotsCopied, all / r.threads);
  return r.threads * std::max(std::min(whole, most), least);
}

// Rows of the result that are formed at a time, and the slots that they take.
inline std::tuple<int64_t, int64_t> scratch_of(const Request& r) {
  const int64_t rows = rows_of(r), sums = r.rounded && !r.one_pass() ? rows * r.columns : 0;
  return {rows, shares_of(r, rows) + sums};
}
