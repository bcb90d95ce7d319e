# `make demo` and `make test` do all the set-up. Everything is installed into .venv; nothing outside it is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# pip passes on more than one setting for the build since 23.1. PySpark is built from its sources, without isolation; setuptools
# makes wheels by itself since 70.1.
BUILD_TOOLS := Cython meson meson-python ninja 'pip>=23.1' 'setuptools>=70.1'
# Where an editable install builds: one directory for each version of Python.
EDITABLE = $(CURDIR)/build/$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
BENCH ?= all
# Processes among which `make test`, `make slow` and `make quick` divide the tests.
WORKERS ?= 2
SANITIZE_TESTS ?= tests/unit tests/parallel tests/hosts/test_lying_peers.py

# Thousands of processes start in the tests, and without byte code each would compile what it imports: torch would take 7 s,
# not 3. An editable install reads byte code but writes none.
unexport PYTHONDONTWRITEBYTECODE
define RUN_TESTS
$(BIN)/python -m compileall -q engine engine_ext autotune benchmarks grafana tools
@$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope
endef

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter (now: $(PYTHON)). Where PyPI serves the large CUDA build of torch,'
	@echo 'PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the small one.'

.PHONY: demo
demo: $(VENV)/.installed-examples ## Train a model on two processes, and prove that nothing changed but the time
	@$(BIN)/python examples/demo.py

.PHONY: test
test: $(VENV)/.installed-dev ## Run every check and every test but the slow ones
	@$(RUN_TESTS)

# Whole trainings, searches and builds, long waits; part of what they look at `make test` sees in other ways.
.PHONY: slow
slow: $(VENV)/.installed-dev ## Run the tests that take long
	@$(RUN_TESTS) --slow

# With two ranks, and without what builds, measures, starts many jobs, or imports a framework.
.PHONY: quick
quick: $(VENV)/.installed-dev ## Run the checks, and the tests that need one process or two ranks, and no framework
	@$(RUN_TESTS) -q --only-ranks 2 -m quick tests/checks tests/unit tests/launch tests/parallel

.PHONY: lint
lint: $(VENV)/.installed-dev ## Run the static checks alone
	@$(BIN)/python -m pytest tests/checks

.PHONY: format
format: $(VENV)/.installed-dev ## Format the Python sources and mend what ruff can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: bench
bench: $(VENV)/.installed-bench ## Measure the engine beside its baselines: BENCH='collective --quick', 'training', ...
	@$(BIN)/python -m benchmarks $(BENCH)

.PHONY: cross-check
cross-check: $(VENV)/.installed-dev ## Compile the native sources for aarch64, with CROSS_CC
	@$(BIN)/python tools/cross_check.py "$(EDITABLE)"

# Fetches wheels (400 MB) into build/gpu-abi; GPU_ABI='--include DIRECTORY' takes headers that are here.
.PHONY: gpu-abi
gpu-abi: $(VENV)/.installed-dev ## Hold the declarations of CUDA and NCCL against their headers
	@$(BIN)/python -m tools.gpu_abi $(GPU_ABI)

# The instrumented build is installed beside the editable one, which stays out of the way. What it is tested with imports no
# framework: those are not instrumented, and slow to start under a sanitizer.
SANITIZED := build/sanitized
.PHONY: sanitize
sanitize: $(VENV)/.installed-dev ## Run the native tests under the address and undefined-behaviour sanitizers
	@echo 'Building with sanitizers'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-index --no-build-isolation --upgrade --target $(SANITIZED) \
	    -Cbuild-dir=build/sanitize -Csetup-args=-Dbuildtype=debugoptimized \
	    -Csetup-args=-Db_sanitize=address,undefined -Csetup-args=-Db_lundef=false .
	@PYTHONPATH="$(CURDIR)/$(SANITIZED)" MESONPY_EDITABLE_SKIP="$(EDITABLE)" \
	    LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(BIN)/python -P -m pytest $(SANITIZE_TESTS)

# HOSTILE frames between hosts, drawn by SEED, against the build with sanitizers.
HOSTILE ?= 100000
.PHONY: fuzz
fuzz: SANITIZE_TESTS = tests/hosts/test_lying_peers.py
fuzz: sanitize ## Send hostile frames to the native engine under sanitizers, and hostile messages to what reads them and what listens
	@PYTHONPATH="$(CURDIR)/$(SANITIZED):$(CURDIR)" MESONPY_EDITABLE_SKIP="$(EDITABLE)" \
	    LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(BIN)/python -P -m tests.hosts.fuzz_frames --count $(HOSTILE) --seed $(SEED)
	@$(BIN)/python -m tests.net.fuzz_stream --count $(HOSTILE) --seed $(SEED)
	@$(BIN)/python -m tests.hosts.fuzz_messages --count $(HOSTILE) --seed $(SEED)
	@$(BIN)/python -m tests.hosts.fuzz_sockets --count $$(($(HOSTILE) / 100)) --seed $(SEED)

# Ranks are threads here, since this sanitizer sees one process; with one mapping of their memory, since it goes by addresses.
# It reports what our code does; the interpreter and NumPy are not instrumented. pytest must not keep its reports to itself (-s).
.PHONY: sanitize-threads
sanitize-threads: $(VENV)/.installed-dev ## Run ranks as threads of one process under the thread sanitizer
	@echo 'Building with the thread sanitizer'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-index --no-build-isolation --upgrade --target $(SANITIZED)-threads \
	    -Cbuild-dir=build/sanitize-threads -Csetup-args=-Dbuildtype=debugoptimized \
	    -Csetup-args=-Db_sanitize=thread -Csetup-args=-Db_lundef=false \
	    '-Csetup-args=-Dc_args=-include $(CURDIR)/tests/verify/one_mapping.h' .
	@PYTHONPATH="$(CURDIR)/$(SANITIZED)-threads" MESONPY_EDITABLE_SKIP="$(EDITABLE)" \
	    LD_PRELOAD="$$(cc -print-file-name=libtsan.so)" \
	    TSAN_OPTIONS="exitcode=66 history_size=7" \
	    $(BIN)/python -P -m pytest -s -o timeout=0 -o faulthandler_timeout=0 tests/parallel/test_threads.py

# In an environment of their own, which sees what .venv has: they bring much (1 GB), and want no other torch. torchtitan imports
# triton, and DeepSpeed compiles a small extension.
RECIPES := output/recipes
.PHONY: recipes
recipes: $(VENV)/.installed-dev ## Train with Trainer, Accelerate, Lightning, TRL, DeepSpeed and torchtitan, and compare with one process or with gloo
	@echo 'Installing the libraries into $(RECIPES)'
	@$(BIN)/python -m venv $(RECIPES)
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	    > "$$($(RECIPES)/bin/python -c 'import site; print(site.getsitepackages()[0])')/engine.pth"
	@$(RECIPES)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt \
	    transformers accelerate pytorch-lightning lightning deepspeed trl torchtitan triton
	@$(RECIPES)/bin/python tests/recipes/libraries.py
	@$(RECIPES)/bin/python tests/recipes/backends.py
	@$(RECIPES)/bin/python -m pytest --slow tests/examples/test_library_examples.py

# With zensical; the site opens from the disk, and its search needs a server: `python -m http.server -d build/site/site`.
.PHONY: docs
docs: $(VENV)/.installed-docs ## Write the generated parts of docs/reference, make build/site from all pages, and check its links
	@$(BIN)/python -m tools.docs_reference
	@$(BIN)/python -m tools.docs_site build/site

.PHONY: prometheus
prometheus: $(VENV)/.installed-dev ## Fetch Debian's Prometheus for the tests; nothing is installed
	@$(BIN)/python -m tests.metrics.prometheus_server

# Its sources are in the root, and `engine` must be the installed one.
GRAFANA := PYTHONPATH="$(CURDIR)" $(BIN)/python -P -m
.PHONY: dashboards
dashboards: $(VENV)/.installed-dev ## Write the dashboards anew from their sources, and compile them against Grafana's types
	@$(GRAFANA) grafana
	@$(GRAFANA) grafana.types

# An elastic job of eight ranks, of which one is slow, one is killed and one is stopped, under Debian's Prometheus: ten minutes.
.PHONY: dashboards-seen
dashboards-seen: $(VENV)/.installed-dev ## Record what every panel of the dashboards shows of a real job with faults, and draw the pictures of the page
	@$(BIN)/python -m tests.metrics.dashboards_seen
	@$(BIN)/python -m benchmarks draw dashboard-overview dashboard-ranks dashboard-engine dashboard-autotune

# EXAMPLES programs are drawn for each number of ranks; then jobs with late and dying ranks run for MINUTES.
EXAMPLES ?= 2000
MINUTES ?= 10
.PHONY: soak
soak: $(VENV)/.installed-dev ## Draw many more programs, then run thousands of steps with late and killed ranks
	@DRAWN_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/parallel/test_drawn.py tests/parallel/test_threads.py
	@$(BIN)/python -m tests.fault.soak --minutes $(MINUTES) $(SOAK)

# FAILURES of ranks, hosts and cables are drawn, the first by SEED; needs root. Leave the machine alone: times are judged, too.
FAILURES ?= 200
SEED ?= 1
.PHONY: failures
failures: $(VENV)/.installed-dev ## Kill ranks and hosts and cut cables at random, and see that all that are left name the same
	@$(BIN)/python -m tests.hosts.drawn_failures --count $(FAILURES) --seed $(SEED)

MINUTES ?= 10
# CHAOS="--count 1000" MINUTES=120 injects a thousand failures.
.PHONY: chaos
chaos: $(VENV)/.installed-dev ## Train on hosts that fail at random, and see that the model is that of an undisturbed run
	@$(BIN)/python -m tests.elastic.chaos --minutes $(MINUTES) --seed $(SEED) $(CHAOS)

.PHONY: sizes
sizes: $(VENV)/.installed-dev ## Run the tests of torch on four ranks, too
	@$(BIN)/python -m pytest -m on_ranks --only-ranks 4 tests/frameworks

# CASES is a pattern of names, such as '*all_reduce*'. gloo and the engine run them on three ranks, one after another.
CASES ?= *
.PHONY: torch-suite
torch-suite: $(VENV)/.installed-dev ## Run the distributed tests in torch's wheel on gloo and on the backend of torch.distributed, and compare
	@$(BIN)/python -m tests.c10d.torch_suite --cases '$(CASES)'

.PHONY: large
large: $(VENV)/.installed-dev ## Run the operations on tensors of more than 2 GiB
	@LARGE_TENSORS=1 $(BIN)/python -m pytest tests/parallel/test_large.py

# STRANGE names parts (ranks python3.12 torch-oldest torch-newest ...). torch is large where PyPI serves CUDA builds: see PIP_EXTRA_INDEX_URL.
.PHONY: strange
strange: $(VENV)/.installed-dev ## Run 64 ranks, and build for other Pythons, the oldest and the newest torch
	@$(BIN)/python -m tests.strange.strange --build build/strange $(STRANGE)

# VERSIONS names parts (tensorflow-2.16 jax-0.6 torch-2.7 torch-2.10 ...), and options such as --only-ranks 2. 10 GB below build/versions.
.PHONY: versions
versions: $(VENV)/.installed-dev ## Run the tests of TensorFlow, Keras, JAX and torch.distributed with the oldest versions that work, and others
	@$(BIN)/python -m tests.versions $(VERSIONS)

.PHONY: mutate
mutate: $(VENV)/.installed-dev ## Leave out each memory fence in turn, and see that a stress run or the model misses it
	@MESONPY_EDITABLE_SKIP="$(EDITABLE)" $(BIN)/python -m tests.verify.mutate --build build/mutate $(MUTATE)

.PHONY: interleave
interleave: $(VENV)/.installed-dev ## Play thousands of orders of the protocol's steps, on the engine and on broken copies of it
	@MESONPY_EDITABLE_SKIP="$(EDITABLE)" $(BIN)/python -m tests.verify.interleave --build build/interleave $(INTERLEAVE)

.PHONY: gpu-faults
gpu-faults: $(VENV)/.installed-dev ## Kill and stop a rank in each call that opens a GPU, and leave out each wait of the CUDA thread (stand-ins)
	@EVERY_CALL=1 $(BIN)/python -m pytest tests/gpu/test_plane.py tests/gpu/test_mutants.py tests/gpu/test_metrics.py \
	    tests/gpu/test_sets.py tests/parallel/test_frozen_runs.py

# Only after an edit of engine_ext/gpu/kernels.cu; what comes out is committed. 200 MB below build/gpu-kernels; no GPU.
.PHONY: gpu-kernels
gpu-kernels: $(VENV)/.installed-dev ## Compile the GPU plane's kernels to the PTX that is shipped, and let three assemblers try it
	@$(BIN)/python -m tools.gpu_kernels build/gpu-kernels

# WHEELS names some of them: cp311-x86_64, cp314t, aarch64. Each needs the headers of its Python: Debian's, or those beside it.
WHEELS ?=
.PHONY: wheels
wheels: $(VENV)/.wheel-tools ## Build the last commit's wheels into dist: for glibc 2.28, x86-64 and aarch64, one for each Python
	@$(BIN)/python -m tools.release $(WHEELS)

# STEPS names some of them: version, licences, sdist, site, upgrade, wheels, trials. A table at the end names what failed, and
# what could not be tried here. Trials need user namespaces (`unshare --user`) and Debian's apt; nothing has to be installed.
# Wheels for aarch64 also need binfmt_misc in these namespaces (Linux 6.7) for QEMU, which apt fetches from Debian 13 (qemu-user).
# They show there that the wheel loads, that its kernels compute the right values, and that ranks agree; neither how fast it is
# nor whether the order of its memory accesses is right on such a processor.
.PHONY: release-check
release-check: $(VENV)/.wheel-tools $(VENV)/.installed-dev $(VENV)/.installed-docs $(VENV)/.installed-bench ## Check a release: version, licences, sdist, site, upgrade, wheels
	@$(BIN)/python -m tools.release.check $(if $(STEPS),--steps $(STEPS)) $(WHEELS)

.PHONY: clean
clean: ## Remove the environment and everything that was built
	rm -rf $(VENV) build dist .mesonpy-* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) tools/preflight.py
	@echo 'Making the environment $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Bytecode is compiled at the first import instead: most of what a framework installs is never imported.
$(VENV)/.build-tools: constraints.txt | $(VENV)/.made
	@$(PIP) install --no-compile -c constraints.txt $(BUILD_TOOLS)
	@touch $@

$(VENV)/.wheel-tools: constraints.txt $(VENV)/.build-tools
	@$(PIP) install --no-compile -c constraints.txt auditwheel ziglang
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt tools/build_backend.py $(VENV)/.build-tools
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/install.py 'Building the engine and installing what "$*" needs' \
	    --no-compile --no-build-isolation -c constraints.txt -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-examples)
