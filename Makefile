# Needs Python >= 3.11, a C++17 compiler and a reachable PyPI; everything else goes into $(VENV).
#   make test PYTHON=python3.12 VENV=.venv312      another Python beside the default one

PYTHON ?=
VENV ?= .venv
DIST ?= dist
JOBS ?= 2
# A third of the tests' time is waiting, for deadlines and for processes that start.
PYTEST_ARGS ?= -n $(shell expr $(JOBS) + 1)

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

bin := $(VENV)/bin
py := $(bin)/python
# Folders are listed beside their files: they change when a file is added or removed.
native_sources := $(shell find csrc cmake) CMakeLists.txt pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow native-test sanitize model-check mutants cuda-check gpu-check lint lint-python lint-types lint-native format wheel bench build clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed $(VENV)/.deps-examples ## Train the example model through jcoll, through lax, and on a mesh
	$(py) examples/demo.py

test: $(VENV)/.deps-test $(VENV)/.deps-examples native-test ## Run the native tests, and the Python ones that are not marked slow
	$(bin)/pytest tests -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.deps-test $(VENV)/.deps-examples $(VENV)/.installed ## Run the Python tests that are marked slow
	$(bin)/pytest tests -m slow $(PYTEST_ARGS)

build: $(VENV)/.installed ## Build jcoll and install it, editable, into $(VENV)

native-test: $(VENV)/.installed ## Build and run the native tests
	$(call configure,$(python_build))
	$(call ctest,$(python_build))

sanitize: $(VENV)/.deps-build $(VENV)/.deps-runtime ## Run the native tests under ASan+UBSan, then under TSan
	$(call configure,build/asan,$(call sanitizer,address$(comma)undefined))
	$(call ctest,build/asan,$(if $(CI),-E '$(long_under_asan)'))
	$(call configure,build/tsan,$(call sanitizer,thread))
	$(call ctest,build/tsan,$(if $(CI),-E '$(long_under_tsan)'))

model-check: ## Check the models of the CUDA protocols (needs Debian's spin)
	$(or $(PYTHON),python3) scripts/model_check.py --jobs $(JOBS)

mutants: $(VENV)/.deps-build $(VENV)/.deps-runtime ## Seed bugs in the CUDA kernels' protocols; the emulator has to find each
	PATH="$(abspath $(bin)):$$PATH" $(py) tests/cuda/mutate.py --jobs $(JOBS)

cuda-check: $(VENV)/.deps-build $(VENV)/.deps-runtime $(VENV)/.deps-cuda-tools ## Compile jcoll._cuda for all GPUs, check the machine code (needs nvcc)
	$(call configure,build/cuda,-DJCOLL_PYTHON=ON -DJCOLL_CUDA=ON $(pybind11) -DJCOLL_CUDA_ARCH="$(cuda_archs)")
	$(bin)/cmake --build build/cuda --target _cuda gpu_check
	$(py) scripts/check_cuda_build.py build/cuda/cuda/_cuda*.so

gpu-check: ## Run the CUDA kernels on this machine's GPU (no network; ARGS="--json FILE")
	$(or $(PYTHON),python3) scripts/gpu_check.py $(ARGS)

lint: lint-python lint-types lint-native ## Check style and types, changing nothing (-k: all of it)

lint-python: $(VENV)/.deps-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .

lint-types: $(VENV)/.deps-dev $(VENV)/.deps-runtime $(VENV)/.deps-test $(VENV)/.deps-examples
	$(bin)/pyright --pythonpath $(py)

lint-native: $(VENV)/.deps-dev
	$(bin)/clang-format --dry-run -Werror $(cxx_files)

format: $(VENV)/.deps-dev ## Rewrite the sources in the project's style
	$(bin)/ruff check --fix-only .
	$(bin)/ruff format .
	$(bin)/clang-format -i $(cxx_files)

wheel: $(VENV)/.deps-build ## Build a wheel into $(DIST)
	$(py) scripts/env.py wheel $(DIST)

bench: $(VENV)/.installed ## Time every collective beside lax's, on 8 virtual devices
	$(py) -m jcoll bench all --devices 8

clean: ## Remove what was built (not $(VENV))
	rm -rf build dist $(VENV)/.installed

comma := ,
# What CI leaves out, and its slow leg does not: 15 s in all, of what TSan sees too; and minutes each.
long_under_asan := schedules
long_under_tsan := plan_schedules|cuda_reductions|traffic
cxx_files = $(shell find csrc cuda tests/native tests/cuda tests/cuda_ffi \
  \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)
# All that are built for, and PTX for later ones.
cuda_archs = 80-real;90a-real;100
pybind11 = -Dpybind11_DIR=$(shell $(py) -m pybind11 --cmakedir)
# Where $(VENV)/.installed builds.
python_build = $(shell $(py) -c 'import sys; print("build/" + sys.implementation.cache_tag)')

# $(call configure,build folder,further options): a build of the native tests, with those of CUDA's host
# side. The Python is for the tests' data.
define configure
@headers=$$($(py) scripts/env.py headers) && $(bin)/cmake -S . -B $(1) -G Ninja --log-level=WARNING \
  -DCMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja -DPython_EXECUTABLE=$(abspath $(py)) \
  -DJCOLL_TESTS=ON -DJCOLL_WERROR=$(if $(CI),ON,OFF) $$headers $(2)
endef

# $(call sanitizer,sanitizers): further options of a build without the extension.
sanitizer = -DCMAKE_BUILD_TYPE=RelWithDebInfo -DJCOLL_SANITIZE=$(1)

# $(call ctest,build folder,options of ctest): builds what changed, then runs the tests.
define ctest
$(bin)/cmake --build $(1) --target native_tests
$(bin)/ctest --test-dir $(1) --output-on-failure --parallel $(JOBS) $(2)
endef

$(VENV)/.made:
	sh scripts/make_venv.sh $(VENV) $(PYTHON)
	@touch $@

# One stamp per group of requirements in pyproject.toml: .deps-build, .deps-test, ...
$(VENV)/.deps-%: $(VENV)/.made pyproject.toml
	$(py) scripts/env.py deps $*
	@touch $@

$(VENV)/.installed: $(VENV)/.deps-build $(VENV)/.deps-runtime $(native_sources)
	$(py) scripts/env.py install
	@touch $@

ifdef JCOLL_BUILD_CUDA # Which may be another choice than the last build's.
.PHONY: $(VENV)/.installed
endif

.PRECIOUS: $(VENV)/.made $(VENV)/.deps-%
