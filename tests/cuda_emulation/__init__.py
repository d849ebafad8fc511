"""CUDA kernels on a CPU: `cuda/*.cu` compiled for the host as they are, and run by the tests.

Every CUDA thread is a fiber of one host thread (`fiber.h`). It runs until it waits for others, at a
barrier or in an exchange of lanes, and `block.cpp` then draws who is next: any order of threads
that the barriers allow can come up, and blocks come in any order. It draws from the seed of the
run, like the inputs (`tests/conftest.py`). Found are:

* barriers and exchanges that some threads do not come to, or that are not the same call for all;
* missing barriers, by wrong results in some order of threads, and by ThreadSanitizer in any;
* what depends on values that nobody wrote: shared memory, variables, and in `test_loss.py` what
  `torch.empty` returns are nan at first;
* accesses that are not aligned, at each of them, and outside of tensors: `memory.py` runs kernels
  on copies between pages that nobody may touch;
* all that the sanitizers find: `make sanitize` compiles the kernels with each.

`faults.py` plants such faults into the row kernel, and `test_faults.py` holds that each is found.
Not found is what depends on the hardware: the time that anything takes, the last bits of its
instructions (here anywhere within the documented error), errors of the driver, and code of PTX.

A kernel is emulated when three things are said of it:

1. its source, in `KERNELS` of `build.py`. Its op is then one of `ops.emulated()`, with which a test
   calls it on tensors of the CPU as it calls those of `torch.ops.storage_ops`;
2. what it uses of CUDA that others have not: a few lines in `include/cuda_runtime.h`, and for what
   `cuda/device.cuh` has in PTX the same in C++ in `include/device.cuh`. A kernel takes its shared
   memory from there, and `launch` of `cuda/launch.cuh` starts it;
3. its tests. Those that a GPU runs as well are in `tests/cuda/`, and a file here borrows them with
   a fixture that puts the emulated ops in place of the GPU's: see `test_row_kernel.py`.

`gpu.py` lets the whole loss take tensors of the CPU for those of an H100. CI runs a share of what
is borrowed (`conftest.py`), `make test-all` everything.
"""
