# make demo    a model whose KV cache outgrows its device cache, in one command
# make test    lint, types and tests
# Both set up everything they need in .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Where there is no GPU a pinned torch keeps several GB of CUDA packages away.
TORCH  ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.6,torch==2.13.0)

.PHONY: demo test lint types tests clean

demo: $(VENV)/ready
	$(BIN)/longshore demo --report demo-report

test: lint types tests

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy -p longshore

tests: $(VENV)/ready
	$(BIN)/pytest -q

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Longshore needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "no venv module: installing Debian's python3-venv"; \
		apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[transformers,report,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
