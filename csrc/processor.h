// The instruction sets that kernels choose from at run time.
#pragma once

// Other compilers select instruction sets differently.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define STORAGE_OPS_X86
// GCC warns that registers which intrinsics leave undefined are uninitialized (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

namespace storage_ops {

enum Level : int64_t { kNone, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// Linux lets a process use the AMX registers after a request.
inline bool gives_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Returns the best level of this processor, limited by torch's environment variable.
inline int64_t level() {
  static const int64_t best = [] {
    __builtin_cpu_init();
    const char* variable = std::getenv("ATEN_CPU_CAPABILITY");
    const std::string_view limit = variable == nullptr ? "" : variable;
    if (limit == "default" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
      return kNone;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!wide || limit == "avx2") return kAvx2;
    const bool dots = __builtin_cpu_supports("avx512bf16") && limit != "avx512";
    if (!dots) return kAvx512;
    const bool tiles = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
    return tiles && gives_tiles() ? kAmxBf16 : kAvx512Bf16;
  }();
  return best;
}

}  // namespace storage_ops

#endif
