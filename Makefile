# Twostroke. `make` lists the targets. A fresh clone needs python3 (3.11 or newer), make and g++.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
PROMPT ?= Explain in two sentences why the sky is blue.
HOST ?= 127.0.0.1
PORT ?= 8000
TESTS ?= tests
GPU_ARGS ?=
GPU_PYTHON ?=
PYTEST_ARGS ?=
WORKERS ?= 3
BENCH_ARGS ?=
EXACT_ARGS ?=
KILLS ?=
DEMAND_ARGS ?=
DURABLE_KILLS ?= 300
FORMS ?=
MUTANTS ?=
API_ARGS ?=
MALFORMED_ARGS ?=
FLOOD_ARGS ?=
FUZZ_ARGS ?=
CLIENTS ?=
LEVEL ?=
BASE ?= main
AVX512_TESTS ?= tests/native tests/backends
ARM_TESTS ?= tests/native tests/backends/cpu
ARM_CPU ?= max
NEWEST ?=
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

BIN := $(VENV)/bin
TOOLS := $(VENV)/.build-tools
READY := $(VENV)/.package
DEV_READY := $(VENV)/.dev-tools
INSTALL = tools/requirements.py install
ARM := build/aarch64
SUITE := build/json-schema-suite
NIXL := PYTHONPATH=src:tests:benchmarks:.venv-nixl $(BIN)/python
LARGER_MODELS := gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b
NATIVE_SOURCES := $(shell find native -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inc' \) 2>/dev/null)
CMAKE = $(BIN)/cmake -S native -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja

# $(call compile,FOLDER,OPTIONS) compiles what changed and installs the libraries into the package.
define compile
@$(CMAKE) -B $(1) $(2) >/dev/null
@MAKEFLAGS= $(BIN)/cmake --build $(1)
@$(BIN)/cmake --install $(1) --prefix src >/dev/null
endef

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PROMPT # read as "$$PROMPT", so that it may contain quotes

.DEFAULT_GOAL := help
.PHONY: help run test check types style levels format tables newest lock setup build native pull wheel clean test-models test-long test-mutants test-oracle test-gpu gpu-compile gpu-campaign test-parallel test-kills test-machine test-handover test-handover-nixl test-fleet test-models-on-demand test-ray test-tiers bench-tiers bench-handover test-exact-fleet soak test-speculation test-forms test-calls test-clients test-durable test-api test-floods test-malformed test-memory test-page test-avx512 test-aarch64 fuzz correctness bench bench-peers bench-start bench-serve bench-speculation bench-overhead bench-batch bench-crowd bench-hostile bench-overload bench-parallel bench-plan bench-simulate bench-router bench-fleet bench-compress bench-report microbench

help: ## List the targets.
	@awk -F ':.*## ' '/^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' Makefile
	@printf '\nVariables: MODEL=%s HOST=%s PORT=%s PYTHON=%s VENV=%s\n' \
	  '$(MODEL)' '$(HOST)' '$(PORT)' '$(PYTHON)' '$(VENV)'

##@ Use

# The model is fetched while the kernels are compiled.
run: $(TOOLS) ## Answer a prompt, then serve the API and the page (PROMPT=, MODEL=, HOST=, PORT=).
	@$(MAKE) --no-print-directory -j2 native pull
	@$(BIN)/twostroke generate $(MODEL) -p "$$PROMPT" --max-tokens 128
	@echo
	@$(BIN)/twostroke serve $(MODEL) --host $(HOST) --port $(PORT)

pull: $(READY) ## Fetch the model, if it is not in the cache (MODEL=).
	@$(BIN)/twostroke pull $(MODEL)

native: $(TOOLS) ## Compile the kernels for this processor.
	@echo "Compiling the kernels for this processor"
	$(call compile,build/native,-DTS_LEVELS=best -DTS_EMULATED_TILES=OFF)

##@ Work on it

check: build types style ## Check that everything compiles, types, style, imports and sizes; run nothing.

types: $(DEV_READY) ## Check types.
	$(BIN)/mypy

style: $(DEV_READY) ## Check style, imports and sizes.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/plain.py --diff $(BASE)
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES))

test: $(DEV_READY) pull ## Run the tests (TESTS=tests/engine/scheduler for some of them; WORKERS=0 for one process).
	$(call compile,build/strict,-DTS_LEVELS=runnable -DTS_STRICT=ON)
	@$(BIN)/python -m pytest --require-model -m 'not oracle and not models and not mutants' \
	  -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) $(TESTS)

format: $(DEV_READY) ## Format Python and C++.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

tables: $(READY) ## Write the tables of request fields in docs/reference/api.md.
	@PYTHONPATH=src $(BIN)/python tools/field_tables.py

newest: ## Check and test with the newest versions of all packages, in .venv-newest.
	@rm -f .venv-newest/.package .venv-newest/.dev-tools
	@$(MAKE) VENV=.venv-newest NEWEST=--newest check test

lock: $(TOOLS) ## Write requirements/*.txt anew, with the newest versions of all packages.
	@$(BIN)/python tools/requirements.py lock

setup: $(READY) $(DEV_READY) ## Make the virtual environment with all tools.

build: levels $(DEV_READY) ## Compile every level and the test builds; warnings are errors.

levels: $(TOOLS) ## Compile as `build` does, without installing other tools.
	$(call compile,build/strict,-DTS_LEVELS=checked -DTS_STRICT=ON)

wheel: requirements/wheel.txt ## Build a wheel with all levels that installs without a compiler, into dist/.
	@test -x .venv-wheel/bin/auditwheel || { $(PYTHON) -m venv .venv-wheel && .venv-wheel/bin/python $(INSTALL) wheel; }
	@rm -rf build/wheel dist
	@PATH="$(abspath .venv-wheel/bin):$$PATH" .venv-wheel/bin/python -m build --wheel --no-isolation \
	  --outdir build/wheel -C cmake.define.TS_PORTABLE_WHEEL=ON -C build-dir=build/portable .
	@PATH="$(abspath .venv-wheel/bin):$$PATH" .venv-wheel/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls -l dist

clean: ## Remove build outputs; keep virtual environments and fetched models.
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .schemathesis
	rm -rf src/twostroke/backends/cpu/lib
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

##@ Longer tests, each with its own environment where it needs one

test-long: build pull ## Run the tests with random cases ten times as long (TESTS=).
	@$(BIN)/python -m pytest --require-model -m '(seeds or rounds) and not oracle' --rounds 10 $(PYTEST_ARGS) $(TESTS)

test-mutants: build pull ## Plant faults in the sources; the tests must catch each (MUTANTS="cache top-k").
	@$(BIN)/python -m pytest --require-model -m mutants $(PYTEST_ARGS) tests/canary
	@PYTHONPATH=src $(BIN)/python tests/mutants/run.py $(MUTANTS)

test-models: build pull ## Test with three larger models (1.9 GB).
	@$(BIN)/twostroke pull $(LARGER_MODELS)
	@$(BIN)/python -m pytest --require-models -m 'models and not oracle' $(PYTEST_ARGS) $(TESTS)

test-oracle: build pull ## Compare with PyTorch and transformers.
	@$(MAKE) --no-print-directory .venv-oracle/.ready
	@PYTHONPATH=src .venv-oracle/bin/python -m pytest --require-model -m oracle -W default $(PYTEST_ARGS) tests/oracle

test-gpu: $(READY) ## Run the kernels for GPUs in Triton's interpreter; needs no GPU (TESTS=).
	@$(MAKE) --no-print-directory .venv-gpu/.ready
	@PYTHONPATH=src .venv-gpu/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) \
	  $(if $(filter tests,$(TESTS)),tests/backends/gpu,$(TESTS))

gpu-compile: $(READY) ## Compile the kernels for five GPU architectures; needs no GPU (GPU_ARGS="--cases Q4_K").
	@$(MAKE) --no-print-directory .venv-gpu-oldest/.ready .venv-gpu/.ready
	@for venv in .venv-gpu-oldest .venv-gpu; do \
	  PYTHONPATH=src $$venv/bin/python tests/gpu/compile.py $(GPU_ARGS) || exit 1; done

# Its environment has PyTorch with CUDA; predictions need none, and GPU_PYTHON names another Python.
IS_DRY = $(findstring --dry-run,$(GPU_ARGS))
gpu-campaign: ## Measure the gpu backend on this machine's GPU (GPU_ARGS="--minutes 9", "--dry-run").
	@$(if $(GPU_PYTHON),,$(MAKE) --no-print-directory $(if $(IS_DRY),$(DEV_READY),.venv-cuda/.ready))
	@PYTHONPATH=src $(or $(GPU_PYTHON),$(if $(IS_DRY),$(BIN),.venv-cuda/bin)/python) benchmarks/gpu.py $(GPU_ARGS)

test-parallel: build pull ## Compare answers of several ranks with those of one process (KILLS=100 kills ranks; EXACT_ARGS=).
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/parallel.py $(if $(KILLS),--kills $(KILLS)) $(EXACT_ARGS)

test-kills: build pull ## End, stop and crash a server's engine under load (KILLS=200).
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/service.py --kills $(or $(KILLS),200)

test-fleet: build ## Kill, freeze and cut off replicas behind a router under load (FAULTS=200, FIRST=0).
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/fleet.py --faults $(or $(FAULTS),200) --first $(or $(FIRST),0)
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/killers.py

test-machine: build ## Do 10,000,000 random operations on pages, scheduler, engine and supervisor (MACHINE_ARGS=).
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/machine.py $(MACHINE_ARGS)

test-handover: build ## Lose and double messages between prefill and decode engines, kill both (HANDOVER_ARGS=).
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/handover.py $(HANDOVER_ARGS)

test-handover-nixl: build pull ## Let NIXL move the pages between prefill and decode engines (HANDOVER_ARGS=, EXACT_ARGS=).
	@$(MAKE) --no-print-directory .venv-nixl/.ready
	@$(NIXL) -m pytest --require-model $(PYTEST_ARGS) tests/engine/disaggregation
	@$(NIXL) tests/exact/handover.py --nixl $(HANDOVER_ARGS)
	@$(NIXL) tests/exact/handed_over.py --nixl $(EXACT_ARGS)

test-exact-fleet: build pull ## Compare answers of prefill and decode engines with those of one (EXACT_ARGS=).
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/handed_over.py $(EXACT_ARGS)

test-models-on-demand: build pull ## Send 500 hostile requests for three models with memory for two (DEMAND_ARGS=).
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/demand.py $(DEMAND_ARGS)

test-ray: build pull ## Bring a fleet up on Ray, kill and update it under load, end it (RAY_ARGS="--kills 10").
	@$(MAKE) --no-print-directory .venv-fleet/.ready
	@PYTHONPATH=src .venv-fleet/bin/python tests/exact/ray_fleet.py $(RAY_ARGS)

test-tiers: native $(DEV_READY) ## Damage and swap 10,000 stored pages; none may be used (TIERS_ARGS=).
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/tiers.py $(TIERS_ARGS)

soak: build pull ## Load a server for half an hour, kill its engine, look for growth (SOAK_ARGS="--minutes 5").
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/exact/soak.py $(SOAK_ARGS)

test-speculation: build pull ## Compare answers with and without speculation, token by token (EXACT_ARGS=).
	@PYTHONPATH=src $(BIN)/python tests/exact/run.py --model $(MODEL) $(EXACT_ARGS)

test-forms: build pull $(SUITE)/tests ## Check answers, a suite and random walks against schemas (FORMS="suite walks").
	@PYTHONPATH=src $(BIN)/python tests/forms/run.py --model $(MODEL) --suite $(SUITE) $(FORMS)

test-calls: build pull ## Count how a model's calls of tools come back (MODEL=qwen2.5-coder-1.5b, EXACT_ARGS=).
	@PYTHONPATH=src $(BIN)/python tests/exact/calls.py --model $(MODEL) $(EXACT_ARGS)

test-clients: build pull ## Run other projects' clients against a server (CLIENTS=openai).
	@$(BIN)/twostroke pull qwen2.5-coder-0.5b
	@PYTHONPATH=src $(BIN)/python tests/clients/run.py $(CLIENTS)

test-durable: build ## Let each write fail or lose power, kill a server while batches run, damage all files (DURABLE_KILLS=).
	@$(BIN)/python tests/durable/disk.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/damage.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/kept_files.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/kills.py --kills $(DURABLE_KILLS)

test-floods: build ## Send the costliest bodies of every path to a server and a router (FLOOD_ARGS=).
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/floods.py $(FLOOD_ARGS)

test-api: build pull ## Generate requests from the OpenAPI document (API_ARGS="--model smollm2").
	@$(MAKE) --no-print-directory .venv-api/.ready
	@$(BIN)/python tests/api/run.py --schemathesis .venv-api/bin/schemathesis $(API_ARGS)

test-malformed: build ## Send malformed requests, raw bytes and frames, 100,000 of each (MALFORMED_ARGS="--http 1000").
	@PYTHONPATH=src:tests:benchmarks $(BIN)/python tests/malformed/run.py $(MALFORMED_ARGS)

test-memory: build pull ## Serve in control groups of 350 MB, with long prompts; needs root (MEMORY_ARGS="--mb 300").
	@PYTHONPATH=src $(BIN)/python tests/memory/groups.py --model $(MODEL) $(MEMORY_ARGS)

test-page: build pull ## Test the page in a browser (CHROMIUM=).
	@test -n "$(CHROMIUM)" || { echo "This needs a browser: apt-get install chromium, or set CHROMIUM=/path/to/it"; exit 1; }
	@$(MAKE) --no-print-directory .venv-page/.ready .venv-page/node_modules/axe-core
	@PYTHONPATH=src CHROMIUM=$(CHROMIUM) AXE=$(abspath .venv-page)/node_modules/axe-core/axe.min.js \
	  .venv-page/bin/python -m pytest -m page $(PYTEST_ARGS) tests/page

test-avx512: $(DEV_READY) ## Test the AVX-512 and AMX kernels on emulated instructions (AVX512_TESTS=).
	@$(CMAKE) -B build/avx512 -DTS_STRICT=ON -DTS_EMULATED_AVX512=ON >/dev/null
	@$(BIN)/cmake --build build/avx512
	@TWOSTROKE_NATIVE_DIR=$(abspath build/avx512) $(BIN)/python -m pytest \
	  -k 'avx512 or amx_emulated or vector_levels' $(PYTEST_ARGS) $(AVX512_TESTS)

test-aarch64: $(ARM)/python ## Cross-build for AArch64 and test under emulation (ARM_TESTS=, ARM_CPU=cortex-a72).
	@$(CMAKE) -B $(ARM)/native -DTS_STRICT=ON -DCMAKE_TOOLCHAIN_FILE=$(abspath native/aarch64.cmake) >/dev/null
	@$(BIN)/cmake --build $(ARM)/native
	@QEMU_CPU=$(ARM_CPU) TWOSTROKE_NATIVE_DIR=$(abspath $(ARM)/native) $(ARM)/python -m pytest $(PYTEST_ARGS) $(ARM_TESTS)

fuzz: ## Feed damaged model files to the readers (FUZZ_ARGS="--cases 20000").
	@$(MAKE) --no-print-directory .venv-fuzz/.ready
	@.venv-fuzz/bin/python tests/fuzz/run.py $(FUZZ_ARGS)

##@ Measure (BENCH_ARGS=--help lists what each script takes)

correctness: build pull ## Compare each level of this machine with the float32 reference.
	@$(BIN)/twostroke compare $(MODEL) --levels all --activation-bits 15 --check $(BENCH_ARGS)

bench: native pull ## Measure speed, policies, start, memory and sizes.
	@$(BIN)/python benchmarks/speed.py $(BENCH_ARGS)

bench-peers: native pull ## Measure beside llama.cpp and others, installed into .bench-peers.
	@$(BIN)/python benchmarks/peers.py $(BENCH_ARGS)

bench-start: native pull ## Measure the time to the first token and peak memory.
	@$(BIN)/python benchmarks/start.py $(BENCH_ARGS)

bench-serve: native pull ## Measure 16 clients of the server.
	@$(BIN)/python benchmarks/serving.py $(BENCH_ARGS)

bench-speculation: native pull ## Measure what speculation saves.
	@$(BIN)/python benchmarks/speculation.py $(BENCH_ARGS)

bench-overhead: native pull ## Measure a step without its kernels, and a request without its engine.
	@$(BIN)/python benchmarks/overhead.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/tenants.py

bench-tiers: native pull ## Measure pages on disk after a restart, and a slow disk.
	@$(BIN)/python benchmarks/tiers.py $(BENCH_ARGS)

bench-handover: native pull ## Measure prompts that another engine reads (BENCH_ARGS="--parts first").
	@$(BIN)/python benchmarks/handover.py $(BENCH_ARGS)

bench-batch: native pull ## Measure a file of requests, and a client beside a full batch.
	@$(BIN)/python benchmarks/batches.py $(BENCH_ARGS)

bench-crowd: native pull ## Measure one client among a thousand slow readers.
	@$(BIN)/python benchmarks/crowd.py $(BENCH_ARGS)

bench-hostile: native pull ## Measure how long hostile schemas delay another stream.
	@$(BIN)/python benchmarks/hostile.py $(BENCH_ARGS)

bench-overload: native pull ## Measure refusals, goodput, fair shares under far too much load.
	@$(BIN)/python benchmarks/overload.py $(BENCH_ARGS)

bench-parallel: native pull ## Measure a model on several ranks beside one process.
	@PYTHONPATH=tests $(BIN)/python benchmarks/parallel.py $(BENCH_ARGS)

bench-plan: native pull ## Compare plans with measured steps, memory and published speeds; time answers.
	@$(BIN)/python benchmarks/plan.py $(BENCH_ARGS)

bench-simulate: native pull ## Compare simulated runs with the measured server.
	@$(BIN)/python benchmarks/simulate.py $(BENCH_ARGS)

bench-router: native pull ## Measure the router beside clients that pick replicas, and its decisions.
	@$(BIN)/python benchmarks/router.py $(BENCH_ARGS)

bench-fleet: native pull ## Simulate both Mooncake traces before 8 and 64 replicas; replay one on two.
	@$(BIN)/python benchmarks/fleet.py $(BENCH_ARGS)

bench-compress: native pull ## Measure quantized files beside llama.cpp's, with an off-grid twin.
	@$(BIN)/python benchmarks/compress.py $(BENCH_ARGS)

bench-report: $(READY) ## Write BENCHMARKS.md from the stored measurements.
	@$(BIN)/python benchmarks/bench_report.py

microbench: native $(READY) ## Measure each kernel on one thread (LEVEL=avx2, BENCH_ARGS="1536 768 84 Q4_1").
	@$(CMAKE) -B build/native -DTS_MICROBENCH=ON >/dev/null
	@level=$(LEVEL); level=$${level:-$$($(BIN)/python -c 'from twostroke.backends.cpu.library import choose_level; print(choose_level(None).level)')}; \
	  $(BIN)/cmake --build build/native --target microbench twostroke_$$level && \
	  build/native/microbench build/native/libtwostroke_$$level.so $(BENCH_ARGS)

# Environments. `make run` needs the first two; the third is for those who work on Twostroke.

$(TOOLS): requirements/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Twostroke needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || command -v c++ >/dev/null \
	  || { echo "Twostroke needs a C++ compiler, such as g++. Name another one with: make CXX=..."; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing the build tools"
	@$(BIN)/python $(INSTALL) build
	@touch $@

$(READY): pyproject.toml requirements/run.txt $(TOOLS)
	@echo "Installing Twostroke and what it needs"
	@$(BIN)/python $(INSTALL) run $(NEWEST)
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --no-build-isolation \
	  --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace --editable .
	@touch $@

$(DEV_READY): requirements/dev.txt $(READY)
	@echo "Installing the tools for checks and tests"
	@$(BIN)/python $(INSTALL) dev $(NEWEST)
	@touch $@

.venv-%/.ready: tests/%/requirements.txt requirements/test-%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing into $(@D)"
	@$(@D)/bin/python $(INSTALL) test-$*
	@touch $@

# The JSON Schema Test Suite, as the sources of `jsonschema` contain it.
$(SUITE)/tests:
	@echo "Fetching the JSON Schema Test Suite"
	@mkdir -p $(SUITE)
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(SUITE) jsonschema==4.26.0
	@tar xzf $(SUITE)/jsonschema-4.26.0.tar.gz -C $(SUITE) --strip-components=2 jsonschema-4.26.0/json
	@touch $@

# Its requirements name PyTorch, which it does not need.
.venv-nixl/.ready: $(READY)
	@echo "Installing NIXL into $(@D)"
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(@D) nixl-cu12
	@touch $@

.venv-page/node_modules/axe-core:
	@command -v npm >/dev/null || { echo "This needs: apt-get install npm"; exit 1; }
	@echo '{"private": true}' > .venv-page/package.json
	@npm install --prefix .venv-page --silent --no-audit --no-fund axe-core@4

# Debian's Python for AArch64, with wheels for the same version.
$(ARM)/python: tools/emulated_python.sh requirements/test-aarch64.txt $(DEV_READY)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null \
	  || { echo "This needs: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }
	@tools/emulated_python.sh $(ARM) $(BIN)/pip --require-hashes --requirement requirements/test-aarch64.txt
