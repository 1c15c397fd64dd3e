# The longer test suites: `make long` lists them, `make long SUITE=kills` runs one. ARGS are options
# of the suite's script, TESTS limits suites of pytest, and PYTEST_ARGS are options for it.

ARGS ?=
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
ARM_CPU ?= max
ARM := build/aarch64
SCHEMA_SUITE := build/json-schema-suite
NIXL := PYTHONPATH=src:tests:.:.venv-nixl $(BIN)/python
LARGER_MODELS := gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b

long-rounds: build pull ## Run the randomized tests with ten times as many cases (TESTS=).
	@$(BIN)/python -m pytest --require-model -m '(seeds or rounds) and not oracle' --rounds 10 $(PYTEST_ARGS) $(TESTS)

long-mutants: build pull ## Plant faults in the sources; the tests must catch each (ARGS="cache top-k").
	@$(BIN)/python -m pytest --require-model -m mutants $(PYTEST_ARGS) tests/canary
	@PYTHONPATH=src $(BIN)/python tests/mutants/run.py $(ARGS)

long-models: build pull ## Test with three larger models (1.9 GB).
	@$(BIN)/twostroke pull $(LARGER_MODELS)
	@$(BIN)/python -m pytest --require-models -m 'models and not oracle' $(PYTEST_ARGS) $(TESTS)

long-oracle: build pull ## Compare with PyTorch and transformers.
	@$(MAKE) --no-print-directory .venv-oracle/.ready
	@PYTHONPATH=src .venv-oracle/bin/python -m pytest --require-model -m oracle -W default $(PYTEST_ARGS) tests/oracle

long-llama-oracle: build ## Compare tiny models of all families with llama.cpp (ARGS="qwen3.5 llama").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/oracle/compare_llama.py $(ARGS)

long-gpu: $(READY) ## Run the kernels for GPUs in Triton's interpreter; needs no GPU (TESTS=).
	@$(MAKE) --no-print-directory .venv-gpu/.ready
	@PYTHONPATH=src .venv-gpu/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) \
	  $(if $(filter tests,$(TESTS)),tests/backends/gpu,$(TESTS))

long-gpu-compile: $(READY) ## Compile the kernels for five GPU architectures; needs no GPU (ARGS="--cases Q4_K").
	@$(MAKE) --no-print-directory .venv-gpu-oldest/.ready .venv-gpu/.ready
	@for venv in .venv-gpu-oldest .venv-gpu; do \
	  PYTHONPATH=src $$venv/bin/python tests/gpu/compile.py $(ARGS) || exit 1; done

long-parallel: build pull ## Compare tokens of several ranks with those of one process (ARGS="--kills 100" kills ranks).
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/parallel.py $(ARGS)

long-kills: build pull ## End, stop and crash a server's engine under load (ARGS="--kills 200").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/server_kills.py --kills 200 $(ARGS)

long-fleet: build ## Kill, freeze and cut off replicas behind a router under load (ARGS="--faults 200 --first 0").
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/fleet.py $(ARGS)
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/engine_killers.py

long-deaths: build ## Let engines and replicas die, and compare all streams (ARGS="--deaths 500 --kinds kill drain").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/deaths.py $(ARGS)

long-routers: build ## Kill routers that share a Redis store under load, and compare all counts (ARGS="--kills 100").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/routers.py $(ARGS)

long-machine: build ## Run 10,000,000 random operations on KV pages, scheduler, engine and supervisor.
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/machine.py $(ARGS)

long-disaggregation: build ## Lose and repeat messages between prefill and decode engines, kill both.
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/disaggregation.py $(ARGS)

long-disaggregation-nixl: build pull ## The same, with NIXL moving the KV pages.
	@$(MAKE) --no-print-directory .venv-nixl/.ready
	@$(NIXL) -m pytest --require-model $(PYTEST_ARGS) tests/engine/disaggregation
	@$(NIXL) tests/exact/disaggregation.py --nixl $(ARGS)
	@$(NIXL) tests/exact/disaggregated_tokens.py --nixl

long-disaggregation-tokens: build pull ## Compare tokens of disaggregated engines with those of one engine.
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/disaggregated_tokens.py $(ARGS)

long-models-on-demand: build pull ## Send 500 hostile requests for three models with memory for two.
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/on_demand_models.py $(ARGS)

long-ray: build pull ## Start a fleet on Ray, kill and update replicas under load, stop it (ARGS="--kills 10").
	@$(MAKE) --no-print-directory .venv-fleet/.ready
	@PYTHONPATH=src .venv-fleet/bin/python tests/exact/ray_fleet.py $(ARGS)

long-from-zero: build ## Scale a fleet's model to zero and back, kill starts, give spot notices (ARGS="--rounds 600").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/from_zero.py $(ARGS)

long-kv-offload: native $(DEV_READY) ## Damage and swap 10,000 offloaded KV pages; none may be used.
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/kv_offload.py $(ARGS)

long-soak: build pull ## Load a server for half an hour, kill its engine, look for memory growth (ARGS="--minutes 5").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/exact/soak.py $(ARGS)

long-speculation: build pull ## Compare tokens with and without speculative decoding.
	@PYTHONPATH=src $(BIN)/python tests/exact/speculation.py --model $(MODEL) $(ARGS)

long-structured-output: build pull $(SCHEMA_SUITE)/tests ## Check answers, the JSON Schema Test Suite and random walks (ARGS="suite walks").
	@PYTHONPATH=src $(BIN)/python tests/structured_output/run.py --model $(MODEL) --suite $(SCHEMA_SUITE) $(ARGS)

long-tool-calls: build pull ## Count a model's tool calls that are parsed (MODEL=qwen2.5-coder-1.5b).
	@PYTHONPATH=src $(BIN)/python tests/exact/tool_calls.py --model $(MODEL) $(ARGS)

long-clients: build pull ## Run other projects' clients against a server (ARGS=openai).
	@$(BIN)/twostroke pull qwen2.5-coder-0.5b
	@PYTHONPATH=src $(BIN)/python tests/clients/run.py $(ARGS)

long-durable: build ## Fail each write, cut the power, kill a server in batches, damage files (ARGS="--kills 300").
	@$(BIN)/python tests/durable/disk.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/damage.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/stored_files.py
	@PYTHONPATH=src:tests $(BIN)/python tests/durable/kills.py $(ARGS)

long-floods: build ## Send the costliest bodies of every path to a server and a router.
	@PYTHONPATH=src:tests $(BIN)/python tests/exact/floods.py $(ARGS)

long-api: build pull ## Generate requests from the OpenAPI document (ARGS="--model smollm2").
	@$(MAKE) --no-print-directory .venv-api/.ready
	@$(BIN)/python tests/api/run.py --schemathesis .venv-api/bin/schemathesis $(ARGS)

long-malformed: build ## Send malformed requests, raw bytes and frames, 100,000 of each (ARGS="--http 1000").
	@PYTHONPATH=src:tests:. $(BIN)/python tests/malformed/run.py $(ARGS)

long-memory: build pull ## Serve in control groups of 350 MB, with long prompts; needs root (ARGS="--mb 300").
	@PYTHONPATH=src $(BIN)/python tests/memory/groups.py --model $(MODEL) $(ARGS)

long-page: build pull ## Test the web page in a browser (CHROMIUM=).
	@test -n "$(CHROMIUM)" || { echo "This needs a browser: apt-get install chromium, or set CHROMIUM=/path/to/it"; exit 1; }
	@$(MAKE) --no-print-directory .venv-page/.ready .venv-page/node_modules/axe-core
	@PYTHONPATH=src CHROMIUM=$(CHROMIUM) AXE=$(abspath .venv-page)/node_modules/axe-core/axe.min.js \
	  .venv-page/bin/python -m pytest -m page $(PYTEST_ARGS) tests/page

long-avx512: $(DEV_READY) ## Test the AVX-512 and AMX kernels on emulated instructions (TESTS=).
	@$(CMAKE) -B build/avx512 -DTS_STRICT=ON -DTS_EMULATED_AVX512=ON >/dev/null
	@$(BIN)/cmake --build build/avx512
	@TWOSTROKE_NATIVE_DIR=$(abspath build/avx512) $(BIN)/python -m pytest \
	  -k 'avx512 or amx_emulated or vector_levels' $(PYTEST_ARGS) $(if $(filter tests,$(TESTS)),tests/native tests/backends,$(TESTS))

long-aarch64: $(ARM)/python ## Cross-build for AArch64 and test under emulation (TESTS=, ARM_CPU=cortex-a72).
	@$(CMAKE) -B $(ARM)/native -DTS_STRICT=ON -DCMAKE_TOOLCHAIN_FILE=$(abspath native/aarch64.cmake) >/dev/null
	@$(BIN)/cmake --build $(ARM)/native
	@QEMU_CPU=$(ARM_CPU) TWOSTROKE_NATIVE_DIR=$(abspath $(ARM)/native) $(ARM)/python -m pytest $(PYTEST_ARGS) $(if $(filter tests,$(TESTS)),tests/native tests/backends/cpu,$(TESTS))

long-fuzz: ## Fuzz the readers of model files (ARGS="--cases 20000").
	@$(MAKE) --no-print-directory .venv-fuzz/.ready
	@.venv-fuzz/bin/python tests/fuzz/run.py $(ARGS)

long-correctness: build pull ## Compare each level of this machine with the float32 reference.
	@$(BIN)/twostroke compare $(MODEL) --levels all --activation-bits 15 --check $(ARGS)

# Their environments.

.venv-%/.ready: tests/%/requirements.txt requirements/test-%.txt
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing into $(@D)"
	@$(@D)/bin/python $(INSTALL) test-$*
	@touch $@

# The JSON Schema Test Suite, as the sources of `jsonschema` contain it.
$(SCHEMA_SUITE)/tests:
	@echo "Fetching the JSON Schema Test Suite"
	@mkdir -p $(SCHEMA_SUITE)
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(SCHEMA_SUITE) jsonschema==4.26.0
	@tar xzf $(SCHEMA_SUITE)/jsonschema-4.26.0.tar.gz -C $(SCHEMA_SUITE) --strip-components=2 jsonschema-4.26.0/json
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
