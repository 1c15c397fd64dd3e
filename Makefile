# Twostroke. `make` lists the targets. A fresh clone needs python3 (3.11 or newer), make and g++.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
PROMPT ?= Explain in two sentences why the sky is blue.
HOST ?= 127.0.0.1
PORT ?= 8000
TESTS ?= tests
PYTEST_ARGS ?=
WORKERS ?= 3
SUITE ?=
WHAT ?= speed
NEWEST ?=

BIN := $(VENV)/bin
TOOLS := $(VENV)/.build-tools
READY := $(VENV)/.package
DEV_READY := $(VENV)/.dev-tools
INSTALL = tools/requirements.py install
NATIVE_SOURCES := $(shell find native -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.inc' \) 2>/dev/null)
CMAKE = $(BIN)/cmake -S native -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja

# $(call compile,FOLDER,OPTIONS) compiles what changed and installs the libraries into the package.
define compile
@$(CMAKE) -B $(1) $(2) >/dev/null
@MAKEFLAGS= $(BIN)/cmake --build $(1)
@$(BIN)/cmake --install $(1) --prefix src >/dev/null
endef

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; without bytecode, each would compile the package and NumPy anew.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath build/bytecode)
export PROMPT # read as "$$PROMPT", so that it may contain quotes

.DEFAULT_GOAL := help
.PHONY: help run pull setup native build wheel check format tables lock newest test long bench report clean
.PHONY: levels types style # parts of the targets above

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

types: $(DEV_READY)
	$(BIN)/mypy

style: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py
	$(BIN)/python tools/plain.py --list all
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES))

test: $(DEV_READY) pull ## Run the tests (TESTS=tests/engine/scheduler for some of them; WORKERS=0 for one process).
	$(call compile,build/strict,-DTS_LEVELS=runnable -DTS_STRICT=ON)
	@$(BIN)/python -m pytest --require-model -m 'not oracle and not models and not mutants' \
	  -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) $(TESTS)

format: $(DEV_READY) ## Format Python and C++.
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(NATIVE_SOURCES),$(BIN)/clang-format -i $(NATIVE_SOURCES))

tables: $(READY) ## Write the tables of request fields and options in docs/reference.
	@PYTHONPATH=src $(BIN)/python tools/field_tables.py
	@PYTHONPATH=src $(BIN)/python tools/options_page.py

newest: ## Check and test with the newest versions of all packages, in .venv-newest.
	@rm -f .venv-newest/.package .venv-newest/.dev-tools
	@$(MAKE) VENV=.venv-newest NEWEST=--newest check test

lock: $(TOOLS) ## Write requirements/*.txt anew, with the newest versions of all packages.
	@$(BIN)/python tools/requirements.py lock

setup: $(READY) $(DEV_READY) ## Make the virtual environment with all tools.

build: levels $(DEV_READY) ## Compile every level and the test builds; warnings are errors.

# Compiles as `build` does, without installing other tools.
levels: $(TOOLS)
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

##@ Test and measure for longer

long: ## Run a longer test suite (SUITE=, ARGS=); without SUITE, list them.
	@$(if $(SUITE),$(MAKE) --no-print-directory long-$(SUITE),$(call list,long,tests/suites.mk,SUITE))

bench: ## Run a benchmark (WHAT=speed, ARGS=); WHAT=list lists them.
	@$(if $(filter list,$(WHAT)),$(call list,bench,benchmarks/suites.mk,WHAT),$(MAKE) --no-print-directory bench-$(WHAT))

report: $(READY) ## Write BENCHMARKS.md from the stored measurements.
	@$(BIN)/python -m benchmarks.write_report

# $(call list,PREFIX,FILE,VARIABLE) prints the targets of a file with their descriptions.
list = awk -F ':.*\#\# ' '/^$(1)-[a-z0-9-]+:.*\#\# / {printf "  make $(1) $(3)=%-24s %s\n", substr($$1, length("$(1)-") + 1), $$2}' $(2)

include tests/suites.mk benchmarks/suites.mk

long-%:
	@echo 'There is no suite named $*; `make long` lists them.'; exit 1

bench-%:
	@echo 'There is no benchmark named $*; `make bench WHAT=list` lists them.'; exit 1

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
