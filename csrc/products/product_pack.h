// Copies operands of a matrix product into slots of 32 bits. A slot has one fp32 number, or a pair
// of bf16 that are neighbours in depth. This file is a part of product_loops.h, which is included
// once for each instruction set.

#if defined(STORAGE_OPS_TILES)
constexpr int kVectors = 2;
constexpr int64_t kSquare = 16;     // slots of depth in a register row
constexpr int64_t kOnePass = 8192;  // depth of one pass of a product of pairs with a 16-bit result
#else
constexpr int kVectors = 3;
constexpr int64_t kSquare = 1;
constexpr int64_t kOnePass = 4096;
#endif
constexpr int kLanes = STORAGE_OPS_LANES;
constexpr int kTileRows = STORAGE_OPS_ROWS, kTileColumns = kVectors * kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Eight __attribute__((vector_size(32)));
typedef uint16_t EightShort __attribute__((vector_size(16)));

// Memory may be unaligned.
template <typename V>
STORAGE_OPS_INLINE V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
constexpr bool kPairs = false;
#if defined(STORAGE_OPS_DOT) || defined(STORAGE_OPS_TILES)
template <>
inline constexpr bool kPairs<BFloat16> = true;
#endif

template <typename T>
constexpr int64_t kGroup = kPairs<T> ? 2 : 1;  // numbers in a slot
// Slots of depth in one group of a tile, so that a panel approximately fills the first-level cache.
template <typename T>
constexpr int64_t kDepth = kPairs<T> && kSquare == 1 ? 256 : 128;
constexpr int64_t kMostDepth = 256;

// The number of slots for this many numbers in depth, rounded up to whole registers.
template <typename T>
constexpr int64_t slots_of(int64_t depth) {
  return parts(depth, kGroup<T> * kSquare) * kSquare;
}

// Loads eight neighbours in depth into one slot each.
template <typename T>
STORAGE_OPS_INLINE Eight load_slots(const T* from) {
  if constexpr (sizeof(T) == 4 || kPairs<T>) {
    return load<Eight>(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __builtin_convertvector(load<EightShort>(from), Eight) << 16;
  } else {
    return (Eight)_mm256_cvtph_ps(load<__m128i>(from));
  }
}

// Loads eight neighbours across into one slot each. `second` has the numbers after them in depth.
template <typename T>
STORAGE_OPS_INLINE Eight make_slots(const T* first, const T* second) {
  if constexpr (kPairs<T>) {
    return __builtin_convertvector(load<EightShort>(first), Eight) |
           __builtin_convertvector(load<EightShort>(second), Eight) << 16;
  } else {
    return load_slots(first);
  }
}

// Makes one slot. If a slot holds two numbers, `second` is the next number in depth.
template <typename T>
STORAGE_OPS_INLINE uint32_t make_slot(const T& first, const T& second) {
  if constexpr (kPairs<T>) {
    return first.x | static_cast<uint32_t>(second.x) << 16;
  } else {
    const float value = static_cast<float>(first);
    uint32_t slot;
    std::memcpy(&slot, &value, sizeof slot);
    return slot;
  }
}

#if defined(STORAGE_OPS_TILES)
// Stores 32 neighbours across, one slot each, as `make_slots` does for eight.
STORAGE_OPS_INLINE void store_line(const BFloat16* first, const BFloat16* second, uint32_t* to) {
  typedef uint16_t Line __attribute__((vector_size(64)));
  const Line a = load<Line>(first), b = load<Line>(second);
  const Line low =
      __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                              9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
  const Line high =
      __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                              24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + 16, &high, sizeof high);
}
#endif

STORAGE_OPS_INLINE void transpose(Eight (&r)[8]) {
  Eight s[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = __builtin_shufflevector(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2 * j + 1] =
          __builtin_shufflevector(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    s[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    s[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  std::copy(s, s + 8, r);
}

// Copies `count` rows or columns of an operand, `depth` numbers each, into slots (depth, kWidth).
// `across` is the stride between the rows or columns, `along` the one in depth. The rest is 0.
template <int kWidth, typename T>
void pack(const T* from, int64_t across, int64_t along, int64_t count, int64_t depth,
          uint32_t* to) {
  constexpr int64_t kNumbers = kGroup<T>;
  const int64_t slots = slots_of<T>(depth), full = depth / kNumbers;
  const T zero(0.0f);
  int64_t p = 0;
  if (count == kWidth && across == 1) {
    for (; p < full; ++p) {
      const T *first = from + p * kNumbers * along, *second = first + (kNumbers - 1) * along;
      int u = 0;
#if defined(STORAGE_OPS_TILES)
      for (; u + 32 <= kWidth; u += 32) store_line(first + u, second + u, to + p * kWidth + u);
#endif
      for (; u + 8 <= kWidth; u += 8) {
        const Eight eight = make_slots(first + u, second + u);
        std::memcpy(to + p * kWidth + u, &eight, sizeof eight);
      }
      for (; u < kWidth; ++u) to[p * kWidth + u] = make_slot(first[u], second[u]);
    }
  } else if (count == kWidth && along == 1 && kWidth % 8 == 0) {
    // Reads 64 bytes of each row at once, because rows whose distance is a power of two evict each
    // other from the cache.
    for (; p + 16 <= full; p += 16) {
      for (int u = 0; u < kWidth; u += 8) {
        Eight block[2][8];
        for (int i = 0; i < 16; ++i) {
          const T* row = from + (u + i / 2) * across;
          block[i % 2][i / 2] = load_slots(row + (p + i % 2 * 8) * kNumbers);
        }
        for (int half = 0; half < 2; ++half) {
          transpose(block[half]);
          for (int i = 0; i < 8; ++i) {
            std::memcpy(to + (p + 8 * half + i) * kWidth + u, &block[half][i], sizeof(Eight));
          }
        }
      }
    }
  }
  for (; p < slots; ++p) {
    for (int u = 0; u < kWidth; ++u) {
      const T* first = from + u * across + p * kNumbers * along;
      const bool some = u < count && p * kNumbers < depth, pair = (p + 1) * kNumbers <= depth;
      to[p * kWidth + u] =
          some ? make_slot(*first, pair ? first[(kNumbers - 1) * along] : zero) : 0;
    }
  }
}

#if defined(STORAGE_OPS_TILES)
// Copies `count` rows of the left operand, at most kTileRows, into squares of (kTileRows, kSquare)
// slots, one for every kSquare slots of depth.
template <typename T>
void pack_rows(const T* from, int64_t across, int64_t along, int64_t count, int64_t depth,
               uint32_t* to) {
  constexpr int64_t kNumbers = kGroup<T> * kSquare;
  for (int64_t k = 0; k < depth; k += kNumbers, from += kNumbers * along) {
    const bool whole = count == kTileRows && depth - k >= kNumbers;
    for (int u = 0; whole && across == 1 && u < kTileRows; u += 8) {
      for (int half = 0; half < 2; ++half) {
        Eight block[8];
        for (int i = 0; i < 8; ++i) {
          const T* first = from + u + 2 * (8 * half + i) * along;
          block[i] = make_slots(first, first + along);
        }
        transpose(block);
        for (int i = 0; i < 8; ++i) {
          std::memcpy(to + (u + i) * kSquare + 8 * half, &block[i], sizeof(Eight));
        }
      }
    }
    for (int u = 0; !(whole && across == 1) && u < kTileRows; ++u) {
      alignas(64) T row[kNumbers] = {};
      const int64_t numbers = u < count ? std::min(kNumbers, depth - k) : 0;
      for (int64_t i = 0; i < numbers; ++i) row[i] = from[u * across + i * along];
      std::memcpy(to + u * kSquare, row, sizeof row);
    }
    to += kTileRows * kSquare;
  }
}
#else
template <typename T>
void pack_rows(const T* from, int64_t across, int64_t along, int64_t count, int64_t depth,
               uint32_t* to) {
  pack<kTileRows>(from, across, along, count, depth, to);
}
#endif
