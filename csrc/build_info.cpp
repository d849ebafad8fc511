// Facts about the build of these libraries, and about this processor. Includes no torch header, so
// that `python -m storage_ops info` can explain an installation in which torch does not load.
#include <pybind11/pybind11.h>

#include <string>

namespace {

std::string cpu_capability() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "AVX512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "AVX2";
  return "SSE2";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "generic";
#endif
}

}  // namespace

// This module has no mutable state, so a free-threaded CPython may keep the GIL disabled.
PYBIND11_MODULE(_build_info, m, pybind11::mod_gil_not_used()) {
  m.doc() = "Versions, compilers and targets of the native libraries of storage_ops.";
  m.attr("version") = STORAGE_OPS_VERSION;
  m.attr("compiler") = STORAGE_OPS_COMPILER;
  m.attr("cuda") = STORAGE_OPS_CUDA;
  m.attr("cuda_archs") = STORAGE_OPS_CUDA_ARCHS;
  m.attr("torch_target") = STORAGE_OPS_TORCH_TARGET;
  m.attr("torch_built_with") = STORAGE_OPS_TORCH_BUILT_WITH;
  m.attr("bindings") = STORAGE_OPS_BINDINGS;
  m.def("cpu_capability", &cpu_capability,
        "The widest vector instructions of this processor that the CPU kernels can use.");
}
