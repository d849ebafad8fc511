// A tile of a matrix product, whose sums stay in registers. This file is a part of product_loops.h,
// which is included once for each instruction set.

template <bool kDot>
STORAGE_OPS_INLINE void accumulate(Lanes& sum, Lanes left, Lanes right) {
#if defined(STORAGE_OPS_DOT)
  if constexpr (kDot) {
    sum = (Lanes)STORAGE_OPS_DOT((__m512)sum, (__m512bh)left, (__m512bh)right);
    return;
  }
#endif
  sum += left * right;
}

STORAGE_OPS_INLINE Lanes load_result(const float* from) { return load<Lanes>(from); }

STORAGE_OPS_INLINE void store_result(const Lanes& value, float* to) {
  std::memcpy(to, &value, sizeof value);
}

#if defined(STORAGE_OPS_DOT) || defined(STORAGE_OPS_TILES)
STORAGE_OPS_INLINE Lanes load_result(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
  return (Lanes)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

STORAGE_OPS_INLINE void store_result(const Lanes& value, BFloat16* to) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// The destination of a tile of results, and sums to add to it.
template <typename Out>
struct Place {
  Out* out;
  int64_t stride;
  const float* sums = nullptr;  // the sums over smaller depths, if `out` does not have them
  int64_t sums_stride = 0;
};

// Rows of the left operand, with the bytes between rows and between slots.
struct Left {
  const char* from;
  int64_t row, slot;
};

// Prefetches the part of an operand that the next tile reads, some lines in every step, because
// memory is idle while a tile is computed. A run is contiguous memory: a row or a column.
struct Ahead {
  const char* run;
  int64_t stride, run_bytes, runs, per_step;
  int64_t offset = 0;

  template <typename T>
  Ahead(const T* from, int64_t rows, int64_t row, int64_t columns, int64_t column, int64_t steps)
      : run(reinterpret_cast<const char*>(from)),
        stride((column == 1 ? row : column) * sizeof(T)),
        run_bytes((column == 1 ? columns : rows) * sizeof(T)),
        runs(column == 1 ? rows : columns),
        per_step(parts(runs * parts(run_bytes, 64), steps)) {}

  STORAGE_OPS_INLINE void fetch() {
    for (int64_t line = 0; line < per_step && runs > 0; ++line) {
      __builtin_prefetch(run + offset, 0, 2);
      offset += 64;
      if (offset >= run_bytes) offset = 0, run += stride, --runs;
    }
  }
};

// Prefetches both operands while a tile is computed, once every `kStep` slots of its depth.
struct Fetches {
  static constexpr int64_t kStep = 32;
  Ahead& right;
  Ahead left;

  STORAGE_OPS_INLINE void step() {
    right.fetch();
    left.fetch();
  }
};

// Prefetches both operands before the tile is computed.
struct Fetched {
  static constexpr int64_t kStep = std::numeric_limits<int64_t>::max();
  explicit Fetched(Fetches& fetches) { fetches.step(); }
  void step() const {}
};

// Tiles of pairs can be so deep that prefetching everything at once would delay their own loads.
// Other tiles are too short for prefetching during the tile to pay off.
template <typename T>
constexpr bool kFetchesWithin = kPairs<T> && kSquare == 1;
template <typename T>
using FetchesOf = std::conditional_t<kFetchesWithin<T>, Fetches&, Fetched>;

#if defined(STORAGE_OPS_TILES)
// Configures the AMX registers of a thread for its lifetime: 16 rows of 64 bytes each.
struct Registers {
  Registers() {
    struct Shapes {
      uint8_t palette, first_row, unused[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    };
    alignas(64) static const Shapes shapes = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shapes);
  }
  ~Registers() { _tile_release(); }
};

// Computes left @ right in four registers, from two registers of rows and two of columns, and
// stores the result or adds it to `to`. The empty asm tells the compiler that the instructions use
// memory.
template <bool kAdd>
STORAGE_OPS_INLINE void multiply_tile(int64_t depth, const Left& left, const float* right,
                                      float* to, int64_t to_stride) {
  asm volatile("" ::: "memory");
  float* bottom = to + 16 * to_stride;
  const int64_t stride = to_stride * sizeof(float), row = left.row;
  if constexpr (kAdd) {
    _tile_loadd(0, to, stride);
    _tile_loadd(1, to + 16, stride);
    _tile_loadd(2, bottom, stride);
    _tile_loadd(3, bottom + 16, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char* rows = left.from;
  const float* last = right + depth * kTileColumns;
  for (; right < last; right += kSquare * kTileColumns, rows += kSquare * left.slot) {
    _tile_loadd(4, rows, row);
    _tile_loadd(6, right, 4 * kTileColumns);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + 16, 4 * kTileColumns);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, rows + 16 * row, row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, to, stride);
  _tile_stored(1, to + 16, stride);
  _tile_stored(2, bottom, stride);
  _tile_stored(3, bottom + 16, stride);
  asm volatile("" ::: "memory");
}

// Computes out = left @ right (+ sums), or out += left @ right (+ sums), for a whole tile.
template <bool kDot, bool kAdd, typename Out>
__attribute__((noinline)) void tile(int64_t depth, const Left& left, const float* right,
                                    const Fetched&, const Place<Out>& place) {
  for (int i = 0; i < kTileRows; ++i) {
    const char* line = reinterpret_cast<const char*>(place.out + (kTileRows + i) * place.stride);
    for (int byte = 0; byte < kTileColumns * int(sizeof(Out)); byte += 64)
      __builtin_prefetch(line + byte, 1);
  }
  if constexpr (sizeof(Out) == 4) {
    multiply_tile<kAdd>(depth, left, right, place.out, place.stride);
    return;
  }
  alignas(64) float sums[kTileRows * kTileColumns];
  multiply_tile<false>(depth, left, right, sums, kTileColumns);
  for (int i = 0; i < kTileRows; ++i) {
    for (int j = 0; j < kTileColumns; j += kLanes) {
      Out* to = place.out + i * place.stride + j;
      Lanes value = load<Lanes>(sums + i * kTileColumns + j);
      if constexpr (kAdd) value += load_result(to);
      if (place.sums != nullptr) value += load_result(place.sums + i * place.sums_stride + j);
      store_result(value, to);
    }
  }
}
#else
struct Registers {};

// Computes out = left @ right (+ sums), or out += left @ right (+ sums), for a whole tile.
// Meanwhile it prefetches the operands of the next tile.
template <bool kDot, bool kAdd, typename Fetching, typename Out>
__attribute__((noinline)) void tile(int64_t depth, const Left& left, const float* right,
                                    Fetching& fetches, const Place<Out>& place) {
  const auto [out, stride, before, before_stride] = place;
  constexpr int kBytes = sizeof(Out) * kTileColumns;
  Lanes sums[kTileRows][kVectors] = {};
  for (int i = 0; i < kTileRows; ++i) {
    const char* line = reinterpret_cast<const char*>(out + (kTileRows + i) * stride);
    for (int byte = 0; byte < kBytes; byte += 64) __builtin_prefetch(line + byte, 1);
  }
  const char* slot = left.from;
  const int64_t row_bytes = left.row, slot_bytes = left.slot;
  constexpr int64_t kStep = Fetching::kStep;
  for (int64_t begin = 0; begin < depth; begin += kStep) {
    fetches.step();
    const int64_t end = std::min(begin + kStep, depth);
    for (int64_t p = begin; p < end; ++p, slot += slot_bytes) {
      Lanes columns[kVectors];
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) {
        columns[j] = load<Lanes>(right + p * kTileColumns + j * kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i) {
        const Lanes row = load<float>(slot + i * row_bytes) - Lanes{};
#pragma GCC unroll 3
        for (int j = 0; j < kVectors; ++j) accumulate<kDot>(sums[i][j], row, columns[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) {
      Out* to = out + i * stride + j * kLanes;
      if constexpr (kAdd) sums[i][j] += load_result(to);
      if (before != nullptr) sums[i][j] += load_result(before + i * before_stride + j * kLanes);
      store_result(sums[i][j], to);
    }
  }
}
#endif
