# Every target sets up what it needs in .venv first. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := setup.py pyproject.toml $(wildcard csrc/* cuda/*)

.PHONY: demo test build lint format bench wheel clean
.DELETE_ON_ERROR:

demo: $(VENV)/built  ## train a small GPT with and without storage_ops
	$(BIN)/python -m storage_ops demo

test: $(VENV)/built  ## run the tests
	$(BIN)/python -m pytest

build: $(VENV)/built  ## build the native libraries in place

lint: $(VENV)/installed  ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror csrc/* cuda/*

format: $(VENV)/installed  ## apply ruff and clang-format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/* cuda/*

bench: $(VENV)/built  ## measure; results go to benchmarks/results
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.linear_cross_entropy

wheel: $(VENV)/installed  ## build an sdist, and a wheel from it, into dist/
	$(BIN)/python -m build --no-isolation .

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist *.egg-info storage_ops/lib storage_ops/_build_info*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/installed: requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	touch $@

$(VENV)/built: $(VENV)/installed $(NATIVE)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@
