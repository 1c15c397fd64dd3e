# Twostroke. `make` lists what can be made; a fresh clone needs python3 (3.11+), make and g++.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
PROMPT ?= Explain in two sentences why the sky is blue.
HOST ?= 127.0.0.1
PORT ?= 8000
TESTS ?= tests
LARGER_MODELS ?= gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b
PYTEST_ARGS ?=
BENCH_ARGS ?=
LEVEL ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.twostroke-ready
ORACLE ?= .venv-oracle
ORACLE_STAMP := $(ORACLE)/.twostroke-ready
PAGE ?= .venv-page
PAGE_STAMP := $(PAGE)/.twostroke-ready
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
FUZZ ?= .venv-fuzz
FUZZ_STAMP := $(FUZZ)/.twostroke-ready
FUZZ_ARGS ?=
EXACT_ARGS ?=
MUTANTS ?=
API ?= .venv-api
API_STAMP := $(API)/.twostroke-ready
API_ARGS ?=
CLIENTS ?=
CORE_REQUIREMENTS := build/core-requirements.txt
NATIVE_BUILD := build/native
AVX512 := build/avx512
AVX512_TESTS ?= tests/native tests/backends
ARM := build/aarch64
ARM_TESTS ?= tests/native tests/backends/cpu
ARM_CPU ?= max
NATIVE_SOURCES := $(shell find native -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inc' \) 2>/dev/null)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PROMPT # read as "$$PROMPT", so that it may contain quotes

.DEFAULT_GOAL := help
.PHONY: help setup build pull run test test-models test-long test-mutants test-speculation test-forms test-clients test-api test-page test-avx512 test-aarch64 check format test-oracle fuzz bench bench-overhead bench-peers bench-start bench-serve bench-crowd bench-hostile bench-report bench-speculation microbench correctness clean

help: ## List what can be made.
	@echo "Twostroke: what can be made"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT)"

setup: $(STAMP) ## Make the virtual environment with Twostroke and the tools to work on it.

# The editable install compiles in the folder that `make build` uses, so nothing is compiled twice.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Twostroke needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || command -v c++ >/dev/null \
	  || { echo "Twostroke needs a C++ compiler, such as g++. Name another one with: make CXX=..."; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing the build tools"
	@$(BIN)/python -m pip install --quiet scikit-build-core cmake ninja
	@echo "Building and installing Twostroke (one to two minutes the first time)"
	@$(BIN)/python -m pip install --quiet --no-build-isolation \
	  --config-settings=build-dir=$(NATIVE_BUILD) --config-settings=cmake.define.TS_STRICT=ON \
	  --editable '.[dev]'
	@touch $@

build: $(STAMP) ## Compile the native libraries, one an instruction-set level; only what changed.
	@$(BIN)/cmake -S native -B $(NATIVE_BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DTS_STRICT=ON \
	  -DTS_EMULATED_TILES=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	@$(BIN)/cmake --build $(NATIVE_BUILD)
	@$(BIN)/cmake --install $(NATIVE_BUILD) --prefix src >/dev/null

pull: build ## Fetch the default model into the cache, if it is not there yet.
	@$(BIN)/twostroke pull $(MODEL)

run: pull ## Answer a prompt in the terminal, then serve the API (PROMPT=, MODEL=, HOST=, PORT=).
	@$(BIN)/twostroke generate $(MODEL) -p "$$PROMPT" --max-tokens 128
	@echo
	@$(BIN)/twostroke serve $(MODEL) --host $(HOST) --port $(PORT)

test: pull ## Run the tests (TESTS=tests/schedule for some of them).
	@$(BIN)/python -m pytest --require-model -m 'not oracle and not models' $(PYTEST_ARGS) $(TESTS)

test-models: pull ## Run the tests that need the three larger models (1.9 GB, fetched first).
	@for model in $(LARGER_MODELS); do $(BIN)/twostroke pull $$model || exit 1; done
	@$(BIN)/python -m pytest --require-models -m 'models and not oracle' $(PYTEST_ARGS) $(TESTS)

test-long: pull ## Run the tests with random cases ten times as long (TESTS=).
	@$(BIN)/python -m pytest --require-model -m 'seeds and not oracle' --rounds 10 $(PYTEST_ARGS) $(TESTS)

test-mutants: build ## Plant faults in copies of the sources; each must be caught by the tests (MUTANTS="cache top-k").
	@PYTHONPATH=src $(BIN)/python tests/mutants/run.py $(MUTANTS)

test-oracle: pull ## Compare with PyTorch and transformers, in an environment of their own.
	@$(MAKE) --no-print-directory $(ORACLE_STAMP)
	@PYTHONPATH=src $(ORACLE)/bin/python -m pytest --require-model -m oracle -W default $(PYTEST_ARGS) tests/oracle

test-speculation: pull ## Compare answers with every way of guessing ahead with plain ones, on real models (EXACT_ARGS=).
	@PYTHONPATH=src $(BIN)/python tests/exact/run.py --model $(MODEL) $(EXACT_ARGS)

test-forms: pull ## Check answers under a thousand constraints with a validator (MODEL=, EXACT_ARGS=).
	@PYTHONPATH=src $(BIN)/python tests/exact/forms.py --model $(MODEL) $(EXACT_ARGS)

test-clients: build ## Drive clients that others wrote against a server, each in its own environment (CLIENTS=openai).
	@$(BIN)/twostroke pull qwen2.5-coder-0.5b
	@PYTHONPATH=src $(BIN)/python tests/clients/run.py $(CLIENTS)

test-api: build ## Make requests out of the server's OpenAPI document, right and wrong ones (API_ARGS="--model smollm2").
	@$(MAKE) --no-print-directory $(API_STAMP)
	@$(BIN)/python tests/api/run.py --schemathesis $(API)/bin/schemathesis $(API_ARGS)

test-page: pull ## Drive the server's page with a real browser, in an environment of its own (CHROMIUM=).
	@test -n "$(CHROMIUM)" || { echo "This needs a browser: apt-get install chromium, or CHROMIUM=/path/to/it"; exit 1; }
	@$(MAKE) --no-print-directory $(PAGE_STAMP)
	@PYTHONPATH=src CHROMIUM=$(CHROMIUM) AXE=$(abspath $(PAGE))/node_modules/axe-core/axe.min.js \
	  $(PAGE)/bin/python -m pytest -m page $(PYTEST_ARGS) tests/page

test-avx512: $(STAMP) ## Test the AVX-512 and AMX kernels on emulated instructions, on any AVX2 (AVX512_TESTS=).
	@$(BIN)/cmake -S native -B $(AVX512) -G Ninja -DCMAKE_BUILD_TYPE=Release -DTS_STRICT=ON \
	  -DTS_EMULATED_AVX512=ON -DTS_EMULATED_TILES=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	@$(BIN)/cmake --build $(AVX512)
	@TWOSTROKE_NATIVE_DIR=$(abspath $(AVX512)) $(BIN)/python -m pytest \
	  -k 'avx512 or amx_emulated or vector_levels' $(PYTEST_ARGS) $(AVX512_TESTS)

test-aarch64: $(ARM)/python ## Build for AArch64, run the kernels' tests under emulation (ARM_TESTS=, ARM_CPU=cortex-a72).
	@$(BIN)/cmake -S native -B $(ARM)/native -G Ninja -DCMAKE_BUILD_TYPE=Release -DTS_STRICT=ON \
	  -DCMAKE_TOOLCHAIN_FILE=$(abspath native/aarch64.cmake) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja >/dev/null
	@$(BIN)/cmake --build $(ARM)/native
	@QEMU_CPU=$(ARM_CPU) TWOSTROKE_NATIVE_DIR=$(abspath $(ARM)/native) $(ARM)/python -m pytest $(PYTEST_ARGS) $(ARM_TESTS)

# Debian's packages for its own release, and wheels for the same Python.
$(ARM)/python: tools/emulated_python.sh $(CORE_REQUIREMENTS)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null \
	  || { echo "This needs: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }
	@tools/emulated_python.sh $(ARM) $(BIN)/pip $$(cat $(CORE_REQUIREMENTS)) pytest hypothesis

fuzz: ## Feed a million damaged model files to the readers, guided by coverage (FUZZ_ARGS="--cases 20000").
	@$(MAKE) --no-print-directory $(FUZZ_STAMP)
	@$(FUZZ)/bin/python tests/fuzz/run.py $(FUZZ_ARGS)

# Never the project's own environment: the core must be seen to work without these.
$(ORACLE_STAMP): tests/oracle/requirements.txt $(CORE_REQUIREMENTS)
	@test -x $(ORACLE)/bin/python || $(PYTHON) -m venv $(ORACLE)
	@echo "Installing PyTorch and transformers into $(ORACLE) (some 1 GB)"
	@$(ORACLE)/bin/python -m pip install --quiet -r $(CORE_REQUIREMENTS) -r tests/oracle/requirements.txt
	@touch $@

$(FUZZ_STAMP): tests/fuzz/requirements.txt $(CORE_REQUIREMENTS)
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	@echo "Installing the fuzzing engine into $(FUZZ)"
	@$(FUZZ)/bin/python -m pip install --quiet -r $(CORE_REQUIREMENTS) -r tests/fuzz/requirements.txt
	@touch $@

$(API_STAMP): tests/api/requirements.txt
	@test -x $(API)/bin/python || $(PYTHON) -m venv $(API)
	@echo "Installing Schemathesis into $(API)"
	@$(API)/bin/python -m pip install --quiet -r tests/api/requirements.txt
	@touch $@

$(PAGE_STAMP): tests/page/requirements.txt $(CORE_REQUIREMENTS)
	@command -v npm >/dev/null || { echo "This needs: apt-get install npm"; exit 1; }
	@test -x $(PAGE)/bin/python || $(PYTHON) -m venv $(PAGE)
	@echo "Installing what drives the browser into $(PAGE)"
	@$(PAGE)/bin/python -m pip install --quiet -r $(CORE_REQUIREMENTS) -r tests/page/requirements.txt
	@echo '{"private": true}' > $(PAGE)/package.json
	@npm install --prefix $(PAGE) --silent --no-audit --no-fund axe-core@4
	@touch $@

$(CORE_REQUIREMENTS): $(STAMP)
	@mkdir -p $(@D)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' > $@

correctness: pull ## Compare every instruction-set level of this machine with the reference, on held-out text.
	@$(BIN)/twostroke compare $(MODEL) --levels all --check $(BENCH_ARGS)

bench: pull ## Measure speed, policies, start, memory and sizes (BENCH_ARGS="--help" lists parts and rows).
	@$(BIN)/python benchmarks/speed.py $(BENCH_ARGS)

bench-speculation: pull ## Measure what guessing ahead brings, on kinds of text and under load (BENCH_ARGS=).
	@$(BIN)/python benchmarks/speculation.py $(BENCH_ARGS)

bench-overhead: pull ## Measure what a step costs besides its kernels, up to 256 streams (BENCH_ARGS=).
	@$(BIN)/python benchmarks/overhead.py $(BENCH_ARGS)

microbench: build ## Measure each kernel on one thread beside its floor (LEVEL=avx2, BENCH_ARGS="1536 768 84 Q4_1").
	@$(BIN)/cmake -S native -B $(NATIVE_BUILD) -DTS_MICROBENCH=ON >/dev/null
	@$(BIN)/cmake --build $(NATIVE_BUILD) --target microbench
	@level=$(LEVEL); level=$${level:-$$($(BIN)/python -c 'from twostroke.backends.cpu.library import choose_level; print(choose_level(None).level)')}; \
	  $(NATIVE_BUILD)/microbench $(NATIVE_BUILD)/libtwostroke_$$level.so $(BENCH_ARGS)

bench-peers: pull ## Measure beside llama.cpp and others, built into .bench-peers first (BENCH_ARGS=).
	@$(BIN)/python benchmarks/peers.py $(BENCH_ARGS)

bench-start: pull ## Measure start to first token and peak memory beside llama.cpp (BENCH_ARGS=).
	@$(BIN)/python benchmarks/start.py $(BENCH_ARGS)

bench-serve: pull ## Measure 16 clients of the server beside llama-server and the engine (BENCH_ARGS=).
	@$(BIN)/python benchmarks/serving.py $(BENCH_ARGS)

bench-crowd: pull ## Measure one client among a thousand that hold connections and hardly read (BENCH_ARGS=).
	@$(BIN)/python benchmarks/crowd.py $(BENCH_ARGS)

bench-hostile: pull ## Measure how long hostile schemas and grammars hold up another stream (BENCH_ARGS=).
	@$(BIN)/python benchmarks/hostile.py $(BENCH_ARGS)

bench-report: $(STAMP) ## Draw BENCHMARKS.md from what was measured.
	@$(BIN)/python benchmarks/bench_report.py

check: build ## Everything that can be known without running it: style, types, imports, sizes.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES))

format: $(STAMP) ## Put Python and C++ into the house's form.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

clean: ## Remove what was built, except the virtual environments and the cached models.
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf src/twostroke/backends/cpu/lib
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
