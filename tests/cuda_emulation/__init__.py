"""CUDA kernels on a CPU: tests of an unchanged `cuda/*.cu`, compiled for the host.

Every CUDA thread is a fiber of one host thread (`fiber.h`). It runs until it waits for others, at a
barrier or in an exchange of lanes. `block.cpp` then draws the next thread, so any order of threads
that the barriers allow is possible. Blocks also run in any order. The seed is that of the run, as
for the inputs (`tests/conftest.py`). The tests detect:

* barriers and exchanges that some threads skip, or that are different calls in different threads
* missing barriers, by wrong results in some order of threads, and by ThreadSanitizer in any order
* results that depend on unwritten values, since shared memory, variables, and in `test_loss.py` the
  results of `torch.empty`, are nan at first
* asynchronous copies that are read before their thread has waited, or that no thread waits for
* letters between blocks of a cluster that are lost, too many, or sent to a block that has ended
* unaligned accesses, and accesses outside of tensors, since `memory.py` runs kernels on copies
  between pages without access
* everything that the sanitizers detect, since `make sanitize` compiles the kernels with each

`faults.py` adds such faults to the row kernel, and `test_faults.py` asserts that each is detected.
The tests do not detect faults that depend on the hardware: times, the last bits of instructions
(here anywhere within the documented error), errors of the driver, and PTX code.

To emulate a kernel, add:

1. its source to `KERNELS` in `build.py`. Its op is then in `ops.emulated()`. A test calls it with
   CPU tensors, like the ops of `torch.ops.storage_ops`.
2. its new parts of CUDA to `include/cuda_runtime.h`, and C++ for its PTX in `cuda/device.cuh` to
   `include/device.cuh`. A kernel gets its shared memory there, and `launch` of `cuda/launch.cuh`
   starts it.
3. its tests. Those that also run on a GPU are in `tests/cuda/`. A file here borrows them with a
   fixture that replaces the GPU's ops by emulated ones, as in `test_row_kernel.py`.

In `gpu.py`, the whole loss treats CPU tensors as tensors of an H100. CI runs a part of the borrowed
tests (`conftest.py`), `make test-all` all of them.
"""
