# The benchmarks: `make bench WHAT=list` lists them, `make bench WHAT=peers` runs one. ARGS are
# options of the benchmark's script; ARGS=--help lists them.

LEVEL ?=
GPU_PYTHON ?=

bench-speed: native pull ## Speed, scheduling policies, start, memory and sizes.
	@$(BIN)/python -m benchmarks.engine.speed $(ARGS)

bench-peers: native pull ## Speed beside llama.cpp and others, installed into .bench-peers.
	@$(BIN)/python -m benchmarks.peers.compare $(ARGS)

bench-start: native pull ## Time from the start to the first token, peak memory.
	@$(BIN)/python -m benchmarks.engine.start $(ARGS)

bench-serving: native pull ## A server with 16 clients.
	@$(BIN)/python -m benchmarks.serving.clients $(ARGS)

bench-traffic: native pull ## Servers under loads of `twostroke bench`: clients, batching, prefixes, traces.
	@$(BIN)/python -m benchmarks.serving.traffic $(ARGS)

bench-speculation: native pull ## Speculative decoding against plain decoding.
	@$(BIN)/python -m benchmarks.engine.speculation $(ARGS)

bench-overhead: native pull ## A step without its kernels, a request without its engine.
	@$(BIN)/python -m benchmarks.engine.overhead $(ARGS)
	@$(BIN)/python -m benchmarks.serving.tenants

bench-kv-offload: native pull ## KV offload: cached pages after a restart, a slow disk.
	@$(BIN)/python -m benchmarks.serving.kv_offload $(ARGS)

bench-recurrent-prefixes: native ## Prompt tokens that recurrent layers compute again; counts, no times.
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.engine.recurrent_prefixes $(ARGS)

bench-disaggregation: native pull ## KV transfer and prefill on another engine (ARGS="--parts first").
	@$(BIN)/python -m benchmarks.serving.disaggregation $(ARGS)

bench-batches: native pull ## A batch file, and one client beside a full batch.
	@$(BIN)/python -m benchmarks.serving.batches $(ARGS)

bench-recording: native pull ## What `--record-trace` costs: time of a request, bytes.
	@$(BIN)/python -m benchmarks.serving.recording $(ARGS)

bench-equal-requests: native pull ## Equal requests: computed once, or read from the answer cache.
	@$(BIN)/python -m benchmarks.serving.equal_requests $(ARGS)

bench-slow-readers: native pull ## One client among a thousand that read slowly.
	@$(BIN)/python -m benchmarks.serving.slow_readers $(ARGS)

bench-hostile-schemas: native pull ## Delay of one stream by hostile schemas.
	@$(BIN)/python -m benchmarks.serving.hostile_schemas $(ARGS)

bench-overload: native pull ## Refusals, goodput and fair shares under overload.
	@$(BIN)/python -m benchmarks.serving.overload $(ARGS)

bench-parallel: native pull ## Several ranks beside one process.
	@PYTHONPATH=tests $(BIN)/python -m benchmarks.engine.parallel $(ARGS)

bench-router-store: $(DEV_READY) ## The time that a router's Redis store adds to a request; needs redis-server.
	@$(BIN)/python -m benchmarks.serving.router_store $(ARGS)

bench-plan: native pull ## Plans beside measured steps, memory and published speeds.
	@$(BIN)/python -m benchmarks.lab.plan $(ARGS)

bench-simulate: native pull ## Simulated runs beside the measured server.
	@$(BIN)/python -m benchmarks.lab.simulate $(ARGS)

bench-what-if: native pull ## Recorded loads, changed settings and advice: measured beside predicted.
	@$(BIN)/python -m benchmarks.lab.what_if $(ARGS)

bench-advice: native pull ## A load that is recorded, its advice, and what the advice brings.
	@$(BIN)/python -m benchmarks.lab.advice $(ARGS)

bench-availability: native pull ## Engines and servers killed under load, measured beside simulated.
	@$(BIN)/python -m benchmarks.lab.availability $(ARGS)

bench-client: native ## The client of `twostroke bench` itself, against a server that does nothing.
	@$(BIN)/python -m benchmarks.serving.bench_client $(ARGS)

bench-definitions: native pull ## `twostroke bench` beside aiperf and guidellm on the same traffic.
	@$(BIN)/python -m benchmarks.serving.definitions $(ARGS)

bench-router: native pull ## The router beside clients that choose replicas, its decisions.
	@$(BIN)/python -m benchmarks.serving.router $(ARGS)

bench-fleet: native pull ## Both Mooncake traces simulated on 8 and 64 replicas, one replayed on 2.
	@$(BIN)/python -m benchmarks.serving.fleet $(ARGS)

bench-compress: native pull ## Quantized files beside llama.cpp's.
	@$(BIN)/python -m benchmarks.lab.compress $(ARGS)

bench-kernels: native $(READY) ## Each kernel on one thread beside its limit (LEVEL=avx2, ARGS="1536 768 84 Q4_1").
	@$(CMAKE) -B build/native -DTS_MICROBENCH=ON >/dev/null
	@level=$(LEVEL); level=$${level:-$$($(BIN)/python -c 'from twostroke.backends.cpu.library import choose_level; print(choose_level(None).level)')}; \
	  $(BIN)/cmake --build build/native --target microbench twostroke_$$level && \
	  build/native/microbench build/native/libtwostroke_$$level.so $(ARGS)

# Its environment has PyTorch with CUDA; predictions need none, and GPU_PYTHON names another Python.
IS_DRY_RUN = $(findstring --dry-run,$(ARGS))
bench-gpu: ## The gpu backend on this machine's GPU (ARGS="--minutes 9", "--dry-run").
	@$(if $(GPU_PYTHON),,$(MAKE) --no-print-directory $(if $(IS_DRY_RUN),$(DEV_READY),.venv-cuda/.ready))
	@PYTHONPATH=src $(or $(GPU_PYTHON),$(if $(IS_DRY_RUN),$(BIN),.venv-cuda/bin)/python) -m benchmarks.gpu.campaign $(ARGS)
