# Every target sets up what it needs in .venv first. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
READY := $(VENV)/installed $(VENV)/built
NATIVE := setup.py pyproject.toml $(wildcard build_tools/*.py csrc/*.* csrc/*/* cuda/*)

.PHONY: demo test test-all test-python measured-programs model-types test-transformers-4 test-oldest test-newest sanitize build lint types format bench results docs wheel test-wheel lock clean FORCE
.DELETE_ON_ERROR:

demo: $(READY)  ## train a small GPT with and without storage_ops
	$(BIN)/python -m storage_ops demo

# Two processes share the processors, so waiting threads sleep. Each process runs half of the files,
# so that shared fixtures are created once.
PYTEST = OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(READY)  ## run the tests; with CI set, a part of those with hundreds of cases
	$(PYTEST)

test-all: $(READY)  ## run all tests, as `make test` does without CI
	CI= $(PYTEST)

# A torch for which there is no library of regions runs them in Python. Most tests that run regions in
# eager mode are in these folders; TESTS=tests runs all others as well.
TESTS ?= tests/checkpoint tests/distributed tests/integrations
test-python: $(READY)  ## run tests of regions without their library
	STORAGE_OPS_DISABLE_NATIVE=saved $(PYTEST) $(TESTS)

# Only these pages need timm, torchvision, diffusers and torch-geometric.
measured-programs: $(READY)  ## write docs/measured-programs.md, in .venv
	$(PIP) diffusers timm torchvision torch-geometric
	$(BIN)/python -m benchmarks.measured_programs

model-types: $(READY)  ## write docs/model-types.md, the answers of will-it-fit, in .venv
	$(PIP) diffusers timm torchvision
	$(BIN)/python -m benchmarks.model_types --json build/model_types.json; code=$$?; \
	  $(BIN)/python -m benchmarks.report build/model_types.json && exit $$code

# transformers 4 needs an older huggingface_hub, so pip installs matching datasets and tokenizers.
test-transformers-4: $(READY)  ## run the tests of models with the last transformers 4, in .venv
	$(PIP) "transformers>=4.57,<5" "trl>=1.16" datasets tokenizers
	$(PYTEST) tests/integrations tests/simulate tests/fitting tests/test_cli.py

# Unlocked versions in separate environments. lowest-direct installs the oldest version of each
# dependency in pyproject.toml and the newest of their dependencies.
test-oldest: RESOLUTION = lowest-direct  ## run the tests with the oldest dependencies
test-newest: RESOLUTION = highest  ## run the tests with the newest dependencies
test-oldest test-newest: test-%:
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	build/$*/bin/uv pip install --quiet --python build/$*/bin/python --resolution $(RESOLUTION) \
	  -r pyproject.toml --extra test "setuptools>=77" "ninja>=1.11" "pybind11>=3" "wheel>=0.45" \
	  "pytest-xdist>=3.6"
	STORAGE_OPS_NO_NATIVE=0 build/$*/bin/pip install --quiet --no-build-isolation --no-deps --editable .
	OMP_WAIT_POLICY=passive build/$*/bin/python -m pytest -n 2 --dist worksteal

# A second build of the package, in one folder with a copy of the tests, which import it from there.
# Python does not link to the runtime of the sanitizer, so it is preloaded. libstdc++ is preloaded too,
# because the runtime searches for its functions at the start. Python and torch keep memory until they
# exit, so there is no check for leaks. pytest does not capture file descriptors, so that reports are
# visible. The sanitizers increase memory and time, so tests that measure them are left out. They do
# not check compiled graphs, so tests of compilers are left out too. Waiting threads sleep, because
# spinning would take most of the time.
SANITIZE_NOT = not ten_thousand_calls and not microseconds and not compile and not inductor and not make_fx
SANITIZE_ENV = OMP_WAIT_POLICY=passive LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) \
  $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
  UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=.
SANITIZE_LOADED = from storage_ops import info; i = info(); \
  assert 'libstorage_ops_cpu.so' in i['loaded'] and i['storage_path'] == 'binding', i

# The thread sanitizer checks only the package's own code, and a race ends the run.
THREADS_ENV = LD_PRELOAD=$$($(CXX) -print-file-name=libtsan.so) OMP_NUM_THREADS=1 PYTHONPATH=. \
  TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"
SANITIZED = cd build/sanitize-$(1) && $(2) $(abspath $(BIN))/python -c "$(SANITIZE_LOADED)" && \
  $(2) $(abspath $(BIN))/python -m pytest --capture=sys

build/sanitize-%: $(VENV)/installed FORCE
	rm -rf $@
	STORAGE_OPS_SANITIZE=$* FORCE_CUDA=0 $(BIN)/python setup.py -q build --build-lib $@
	cp -r tests $@

sanitize: build/sanitize-address build/sanitize-thread  ## run the tests of the ops with sanitizers
	$(call SANITIZED,address,$(SANITIZE_ENV)) -n 2 --dist worksteal \
	  tests/storage tests/loss tests/divergence tests/matmul \
	  tests/checkpoint/test_saved_tensors.py tests/checkpoint/test_native_policies.py \
	  tests/checkpoint/test_noted_parameters.py tests/checkpoint/test_known_walks.py \
	  tests/checkpoint/test_default_hooks.py tests/checkpoint/test_snapshot.py \
	  tests/checkpoint/test_plain_region.py tests/checkpoint/test_call_in.py \
	  tests/checkpoint/test_nested_functions.py -k "$(SANITIZE_NOT)"
	$(call SANITIZED,thread,$(THREADS_ENV)) tests/storage/test_storage_threads.py
	$(EMULATED_IN_THREADS)
	$(EMULATED_IN_MEMORY)

# The kernels for a GPU, compiled for the CPU. Threads in a report are CUDA threads.
EMULATED = $(BIN)/python -m pytest --capture=sys -k "not 50257" \
  tests/cuda_emulation/test_row_kernel.py tests/cuda_emulation/test_scale.py
EMULATED_IN_THREADS = $(THREADS_ENV) STORAGE_OPS_EMULATION_SANITIZER=thread $(EMULATED)
EMULATED_IN_MEMORY = $(SANITIZE_ENV) STORAGE_OPS_EMULATION_SANITIZER=address $(EMULATED)

CXX_SOURCES = $(wildcard csrc/*.* csrc/*/* cuda/* $(addprefix tests/,other_device/*.cpp \
  $(addprefix cuda_emulation/,*.h *.cpp *.cu include/*)))

build: $(READY)  ## build the native libraries in place

lint: $(VENV)/installed  ## ruff, mypy, import-linter, codespell and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

# A user's file is outside the checkout, so a type checker must find the package by its installation.
types: $(READY)  ## pyright on a user's file with every public name; mypy is a part of lint
	$(PYTHON) -m venv build/pyright
	build/pyright/bin/pip install --quiet --disable-pip-version-check basedpyright==1.40.2
	folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && cp tests/typed_use.py "$$folder" && \
	  cd "$$folder" && $(abspath build/pyright/bin)/basedpyright --level error \
	  --pythonpath $(abspath $(BIN))/python typed_use.py

format: $(VENV)/installed  ## apply ruff and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: $(READY)  ## measure everything, for hours, into bench-report/
	$(BIN)/python -m storage_ops bench

results: $(READY)  ## merge FROM=files into benchmarks/results; write reports, README and docs from all results
	$(BIN)/python -m benchmarks.report $(FROM)

docs: $(VENV)/installed  ## build the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/installed  ## build an sdist, and from it one wheel for every CPython here, into dist/
	$(BIN)/python -m build_tools.wheel all

TORCHES ?=
test-wheel: $(VENV)/installed  ## test the wheel of `make wheel` under every torch; TORCHES="2.10 2.15" for some
	$(BIN)/python -m build_tools.check_wheel dist/*.whl
	$(BIN)/python -m build_tools.measure_build
	$(BIN)/python -m build_tools.test_wheel --fallbacks $(TORCHES)

# One lock for every Python and platform. The lock of the builds is a part of the other.
LOCK = cd requirements && ../$(BIN)/uv pip compile --quiet --config-file uv.toml --universal \
  --python-version 3.10 --generate-hashes --no-annotate --no-header --no-emit-package torch
lock: $(VENV)/installed  ## update the versions and hashes that `make` and the workflows install
	$(PIP) uv==0.13.9
	$(LOCK) --upgrade dev.txt -o dev.lock
	$(LOCK) --constraint dev.lock build.txt -o build.lock

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist *.egg-info storage_ops/lib storage_ops/_build_info*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

# First install the requirements of a build. It needs only torch's headers, so with `make -j2` it
# compiles while pip installs the rest. torch has no hash in the lock. Its dependencies are installed
# before, except those of CUDA builds.
$(VENV)/torch: requirements/build.lock requirements/torch.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes -r requirements/build.lock
	$(PIP) --no-deps -r requirements/torch.txt
	touch $@

$(VENV)/installed: $(VENV)/torch requirements/dev.lock
	$(PIP) --no-deps --require-hashes -r requirements/dev.lock
	$(PIP) -r requirements/torch.txt
	touch $@

$(VENV)/built: $(VENV)/torch $(NATIVE)
	STORAGE_OPS_NO_NATIVE=$${STORAGE_OPS_NO_NATIVE:-0} \
	  $(PIP) --no-build-isolation --no-deps --editable .
	touch $@
