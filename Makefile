# make demo | make test | make lint. A virtual environment is made in .venv on first use.
#
#   PYTHON=python3.12          the interpreter (3.11 to 3.13)
#   TORCH_SPEC="torch==2.11.0" another torch
#   PIP_ARGS="--index-url URL" where torch comes from: PyTorch's CPU index has a build a fifth of the size, for machines
#                              without GPU
#   VENV=/path                 another place for the environment
PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.posttrain-installed

# One thread a process: small models spend more time on handing work to threads than on the work (measured: 1 s against 10 s).
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test test-long lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else f"Python 3.11 to 3.13 is needed, $(PYTHON) is {sys.version.split()[0]}; choose one with PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); this takes a few minutes"
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(PIP_ARGS) "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/posttrain run recipes/demo.yaml --resume

# Integration tests start Ray, which wants the machine to itself.
test: setup
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile --ignore tests/integration $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "not long" tests/integration $(PYTEST_ARGS)

test-long: setup
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
