# One command from a fresh clone: `make demo` or `make test`. `make help` lists the rest.
#
# What make needs it installs into a virtual environment inside the tree: .venv for the default torch, .venv-<torch> for
# another (make test TORCH=torch==2.13.0). VENV=path uses an existing environment and the torch that is in it; with
# TORCH as well, that torch is installed there. PATCHCONV_CUDA, CUDA_HOME, TORCH_CUDA_ARCH_LIST and MAX_JOBS reach the
# build through the environment; setup.py says what they do.

DEFAULT_TORCH := torch==2.14.1 torchvision==0.29.1
TORCH ?= $(DEFAULT_TORCH)
PYTHON ?= python3

BUILD_NEEDS := setuptools>=77 wheel ninja packaging numpy
DEMO_NEEDS := pillow rich matplotlib scikit-image
# kaleido 0.2.1 carries a browser of its own (80 MB): the page that a memory report writes is opened in it.
TEST_NEEDS := pytest pytest-xdist pytest-timeout hypothesis expecttest filelock h5py zarr kaleido==0.2.1 $(if $(shell command -v cmake),,cmake<4)
LINT_NEEDS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5
BENCH_NEEDS := patch-conv diffusers lightstream==1.0.7
MODEL_NEEDS := timm diffusers monai

# Without a GPU in sight the demo needs no CUDA kernels. A CUDA build that is there is used as it is.
CUDA_IN_SIGHT := $(wildcard /dev/nvidia0 /dev/dxg)$(shell grep -s '"cuda": "' patchconv_native/_build_info.json)
DEMO_CUDA := $(or $(PATCHCONV_CUDA),$(if $(CUDA_IN_SIGHT),auto,0))

# ----------------------------------------------------------------------------------------------------------------------
# The environment. A stamp in it names what was installed, so that a change of the list installs again.

empty :=
space := $(empty) $(empty)
GIVEN_VENV := $(VENV)
ifeq ($(GIVEN_VENV),)
  ifeq ($(TORCH),$(DEFAULT_TORCH))
    VENV := .venv
  else
    VENV := .venv-$(subst $(space),-,$(subst /,-,$(subst =,,$(TORCH))))
  endif
else ifeq ($(origin TORCH),file)
  # An environment of the user's own, and no wish about torch: whatever is there, or the default if nothing is.
  HAS_TORCH := $(shell $(VENV)/bin/python -c 'import torch; print("yes")' 2>/dev/null)
endif
override VENV := $(abspath $(VENV))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet install
export PATH := $(VENV)/bin:$(PATH)

hash = $(firstword $(shell echo '$(1)' | cksum))
STAMP := $(VENV)/.patchconv
TORCH_STAMP := $(STAMP)-torch-$(call hash,$(if $(HAS_TORCH),present,$(TORCH)))
DEMO_STAMP := $(STAMP)-demo-$(call hash,$(DEMO_NEEDS))
TEST_STAMP := $(STAMP)-test-$(call hash,$(TEST_NEEDS))
LINT_STAMP := $(STAMP)-lint-$(call hash,$(LINT_NEEDS))
BENCH_STAMP := $(STAMP)-bench-$(call hash,$(BENCH_NEEDS))
MODEL_STAMP := $(STAMP)-model-$(call hash,$(MODEL_NEEDS))

# Tests run in parallel, one process a core up to four: each holds its own torch. Threads share the cores between them.
CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -lt 4 ] && echo $(CORES) || echo 4)
THREADS ?= $(shell expr $(CORES) / $(WORKERS))
PYTEST_ARGS ?=
KERNEL_TESTS = tests/cuda/test_conv_kernels.py tests/cuda/test_conv_weight_kernels.py tests/cuda/test_kernels.py \
  tests/cuda/test_layer_norm_kernels.py tests/cuda/test_norm_kernels.py
RUN_TESTS = OMP_NUM_THREADS=$(THREADS) $(PY) -m pytest -n $(WORKERS) --dist worksteal
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help demo test check build wheel cpp kernels lint format bench models gpu clean distclean

help: ## this list
	@echo 'make TARGET [TORCH="torch==X.Y.Z"] [VENV=path] [PATCHCONV_CUDA=auto|0|1]'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile

demo: export PATCHCONV_CUDA := $(DEMO_CUDA)
demo: build $(DEMO_STAMP) ## a whole network on a large photograph, in 256 MiB: demo.png, memory.png
	$(PY) -m patchconv_native demo

test: build $(TEST_STAMP) $(DEMO_STAMP) ## every kind of test, the C++ ones too (PYTEST_ARGS, WORKERS)
	$(RUN_TESTS) $(PYTEST_ARGS)

check: build $(TEST_STAMP) $(DEMO_STAMP) $(MODEL_STAMP) ## every test at full width, and every model family: hours
	PATCHCONV_FULL_TESTS=1 PATCHCONV_ALL_MODELS=1 $(RUN_TESTS) $(PYTEST_ARGS)
	PATCHCONV_HOST_CUDA=races $(RUN_TESTS) $(PYTEST_ARGS) $(KERNEL_TESTS)
	PATCHCONV_HOST_CUDA="races at-once" $(RUN_TESTS) $(PYTEST_ARGS) $(KERNEL_TESTS)
	PATCHCONV_HOST_CUDA=ptx $(RUN_TESTS) $(PYTEST_ARGS) $(KERNEL_TESTS)
	PATCHCONV_HOST_CUDA="ptx at-once" $(RUN_TESTS) $(PYTEST_ARGS) $(KERNEL_TESTS)
	$(PY) -m bench.ptx

build: $(TORCH_STAMP) ## the extension, in place; recompiles what changed
	$(PY) setup.py --quiet build_ext --inplace

# The clean environment has nothing but the wheel, and torch through a path file: a second copy of several gigabytes
# would test nothing more. --no-index lets pip check the wheel's pin of torch, but not repair it by a download.
wheel: $(TORCH_STAMP) ## dist/*.whl, tried in a clean environment outside the tree
	set -e; outside=$$(mktemp -d); trap 'rm -rf "$$outside"' EXIT; \
	$(PIP:install=wheel) --no-build-isolation --no-deps --wheel-dir "$$outside/dist" .; \
	$(PY) -m venv --without-pip "$$outside/venv"; \
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo "$$outside"/venv/lib/python3*/site-packages)/torch.pth"; \
	$(PY) -m pip --disable-pip-version-check --quiet --python "$$outside/venv" install --no-index "$$outside"/dist/*.whl; \
	cp tests/support/wheel_smoke.py "$$outside"; cd "$$outside"; venv/bin/python -I wheel_smoke.py; \
	mkdir -p $(CURDIR)/dist; cp dist/*.whl $(CURDIR)/dist; ls -l $(CURDIR)/dist

cpp: build $(TEST_STAMP) ## libpatchconv with CMake, its tests and a program that uses it
	$(PY) -m pytest tests/ops/test_cpp.py $(PYTEST_ARGS)

kernels: $(DEMO_STAMP) $(TEST_STAMP) ## CUDA kernels without a GPU: registers and memory against budgets, counts of what they do
	$(PY) -m bench.kernels
	$(PY) -m bench.kernel_counts --out build/kernels
	cat build/kernels/kernel_counts.md

lint: $(TEST_STAMP) $(DEMO_STAMP) $(LINT_STAMP) ## ruff, mypy, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(LINT_STAMP) ## rewrites the sources as lint wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

bench: build $(DEMO_STAMP) $(BENCH_STAMP) ## time and memory beside stock PyTorch and patch_conv
	$(PY) -m bench

models: build $(TEST_STAMP) $(MODEL_STAMP) ## every model family of torchvision, timm and diffusers, converted against stock
	PATCHCONV_ALL_MODELS=1 $(RUN_TESTS) tests/layers/test_models.py $(PYTEST_ARGS)

gpu: build $(DEMO_STAMP) $(TEST_STAMP) ## the checks and measurements that need a GPU
	$(PY) -m bench.gpu

clean: ## what was built; environments stay
	rm -rf build dist *.egg-info patchconv_native/*.so patchconv_native/_build_info.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find patchconv_native bench tests -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## that, and the environments inside the tree
	rm -rf .venv .venv-*

# ----------------------------------------------------------------------------------------------------------------------

$(PY):
	$(PYTHON) -m venv $(VENV)

$(TORCH_STAMP): | $(PY)
	$(if $(HAS_TORCH),,$(PIP) $(foreach one,$(TORCH),'$(one)'))
	$(PIP) $(foreach one,$(BUILD_NEEDS),'$(one)')
	@rm -f $(STAMP)-*
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

# The stamp of torch is a constraint as well: what needs torch itself (timm) must not bring another one.
define needs
$(2): $(TORCH_STAMP)
	$$(PIP) --constraint $(TORCH_STAMP) $$(foreach one,$$($(1)_NEEDS),'$$(one)')
	@rm -f $$(STAMP)-$(3)-*
	@touch $$@
endef
$(eval $(call needs,DEMO,$(DEMO_STAMP),demo))
$(eval $(call needs,TEST,$(TEST_STAMP),test))
$(eval $(call needs,LINT,$(LINT_STAMP),lint))
$(eval $(call needs,BENCH,$(BENCH_STAMP),bench))
$(eval $(call needs,MODEL,$(MODEL_STAMP),model))
