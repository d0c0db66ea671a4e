# make demo | test | test-exhaustive | test-sim | test-torch | compare | lint | docs | dist | pack | test-gpu | test-gpu-alone | bench | models | verdicts | golden | clean. Each makes .venv first; PYTHON names the interpreter to make it with.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# A bare `torch` requirement pulls gigabytes of CUDA packages, so a machine without a GPU gets the CPU build
# first. --no-deps keeps this to one lookup: the package's own installation brings what torch needs. Where the
# extra index cannot be reached, pip still takes the file from the places that it is configured with. It is not
# quiet, as it takes minutes.
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

TORCH_TESTS := test/fx_walk test/ops test/test_api.py test/test_gemm.py test/test_models.py test/test_sample.py

define cpu_torch
	@if ! command -v nvidia-smi >/dev/null 2>&1; then \
		echo "No GPU here: installing the CPU build of torch."; \
		$(1) -m pip install --no-deps --retries 1 --extra-index-url $(TORCH_CPU_INDEX) $(TORCH_CPU); \
	fi
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-exhaustive test-sim test-torch compare lint docs dist pack test-gpu test-gpu-alone bench models verdicts golden clean

help:
	@echo "make demo      install, then explain, build and check a fused fp8 MLP (and run it, on a GPU)"
	@echo "make test      install, lint, then every test but those of the next two and of test-gpu"
	@echo "make test-exhaustive  the rest of the sweeps that make test has a part of: for a change of templates"
	@echo "make test-sim  every shipped configuration on the simulated machine, hours on 2 cores"
	@echo "make compare   whether the kernels here are those of BASE=main; ONLY=pattern, GOLDENS=1"
	@echo "make test-torch TORCH=2.15.0  the walker's, API's and models' tests on that torch, in build/torch-2.15.0"
	@echo "make test-gpu JOBS=15  the tests that run kernels, on a Hopper or Blackwell GPU, in ten minutes of 16 cores"
	@echo "make test-gpu-alone  those that need the GPU for themselves: memcheck and tuning"
	@echo "make bench     the whole benchmark on the GPU here: benchmarks/results and docs/speed.png"
	@echo "make models    docs/models.md, some minutes"
	@echo "make verdicts  what the compiler says of the kernels of shared epilogues, some minutes"
	@echo "make golden    accept what is generated now: test/expected and the samples in the README and docs"
	@echo "make lint      ruff and mypy"
	@echo "make dist      wheel and sdist in dist/, checked, and run from a clean environment"
	@echo "make pack ARCH=sm_90a  a wheel of the kernels of models, in dist/; ONLY='bert*' of some"
	@echo "make docs      the pages of docs/, as build/docs/index.html"
	@echo "make clean     remove $(VENV) and every cache in this folder"

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -m "not gpu and not sim and not exhaustive" -n $(JOBS) --dist worksteal

test-exhaustive: $(INSTALLED)
	$(BIN)/python -m pytest -m exhaustive -n $(JOBS) --dist worksteal

test-sim: $(INSTALLED)
	$(BIN)/python -m pytest -m sim -n $(JOBS) --dist worksteal

compare: $(INSTALLED)
	$(BIN)/python test/compare_kernels.py --base $(or $(BASE),main) --jobs $(JOBS) \
		$(if $(GOLDENS),--goldens) $(if $(ONLY),--only '$(ONLY)')

# The tests that depend on torch's own behaviour, on a version that pyproject.toml allows. PyPI's torch brings CUDA
# packages of some gigabytes; none of it needs a GPU.
test-torch:
	@test -n "$(TORCH)" || { echo "name a version, as in: make test-torch TORCH=2.15.0"; exit 2; }
	test -x build/torch-$(TORCH)/bin/pytest || { $(PYTHON) -m venv build/torch-$(TORCH) \
		&& build/torch-$(TORCH)/bin/python -m pip install -q torch==$(TORCH) \
		&& build/torch-$(TORCH)/bin/python -m pip install -q -e '.[dev,models]' torch==$(TORCH); }
	build/torch-$(TORCH)/bin/python -m pytest -n $(JOBS) --dist worksteal $(TORCH_TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

pack: $(INSTALLED)
	$(BIN)/python -m pip install -q -e '.[models]' 'setuptools>=77'
	$(BIN)/python wheels/kernels.py --arch $(or $(ARCH),sm_90a) $(if $(ONLY),--only '$(ONLY)') -o dist

dist: $(INSTALLED)
	$(BIN)/python -m pip install -q build twine
	rm -rf dist build/clean
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/clean
	$(call cpu_torch,build/clean/bin/python)
	build/clean/bin/python -m pip install -q dist/*.whl
	cd build/clean && bin/python -m cute_backend explain $(CURDIR)/examples/small_linear.py

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo build/docs/index.html

# Tests that time kernels, or run them under compute-sanitizer, have the GPU to themselves.
ALONE := test/gpu/test_memcheck_gpu.py test/gpu/test_tune_gpu.py

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m "gpu and not exhaustive" test/gpu -n $(JOBS) --dist worksteal \
		$(addprefix --ignore=,$(ALONE))

test-gpu-alone: $(INSTALLED)
	$(BIN)/python -m pytest -m "gpu and not exhaustive" $(ALONE)

bench: $(INSTALLED)
	$(BIN)/python -m cute_backend bench --peers --json benchmarks/results --picture docs/speed.png
	$(BIN)/python -m cute_backend bench --host --json benchmarks/results
	$(BIN)/python -m cute_backend bench --models --json benchmarks/results

models: $(INSTALLED)
	$(BIN)/python docs/models.py

verdicts: $(INSTALLED)
	$(BIN)/python test/fixtures/record_verdicts.py

golden: $(INSTALLED)
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q -n $(JOBS) test/test_golden.py test/test_api.py \
		test/fx_walk/test_walk_recorded.py test/test_models.py -k 'not gradients'
	EXPECTTEST_ACCEPT=1 $(BIN)/python -m pytest -q test/test_readme.py test/test_docs.py -k 'not build'

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "cute_backend needs Python 3.10 or later; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(call cpu_torch,$(BIN)/python)
	$(BIN)/python -m pip install -e '.[dev,models]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
