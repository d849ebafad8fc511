// The functions of torch's CUDA library that the kernels call, for one device with one stream. The
// kernels' ops are registered for CPU tensors, in EMULATION_NAMESPACE.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdio>

// The linker redirects calls of `x` to `__wrap_x`, and of `__real_x` to `x`.
extern "C" {

AOTITorchError __real_aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                                   TorchLibraryHandle*);

AOTITorchError __wrap_aoti_torch_library_init_impl(const char*, const char*, const char* file,
                                                   uint32_t line, TorchLibraryHandle* library) {
  return __real_aoti_torch_library_init_impl(EMULATION_NAMESPACE, "CPU", file, line, library);
}

AOTITorchError __wrap_aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError __wrap_aoti_torch_delete_device_guard(DeviceGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}

void __wrap_torch_c10_cuda_check_msg(int32_t error, const char* file, const char*, uint32_t line,
                                     bool, char** message) {
  static char text[512];
  if (error != 0) std::snprintf(text, sizeof text, "CUDA error %d at %s:%u", error, file, line);
  *message = error == 0 ? nullptr : text;
}

void __wrap_torch_c10_cuda_free_error_msg(char*) {}
}
