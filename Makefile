# Each target does its own set-up in .venv; all that a fresh machine needs is python3 (with venv), gcc and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.zero_trial_installed
LIBRARIES := .venv/.libraries_installed
SITE := .venv/.docs_installed
COMPAT := build/torch-$(TORCH)-$(notdir $(PYTHON))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Processes that run tests side by side. Each file's tests stay in one, where they share their pools of ranks.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Containers often set it. pytest then compiles every test file again in each run, which takes 18 of the 27 seconds of collecting them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-slow test-extended test-all compat durations lint format docs docs-check bench gpu-check setup clean help

run: setup  ## Train the quickstart: a byte-level GPT at ZeRO-2 on two CPU ranks, through det and a master of its own
	$(BIN)/python experiments/quickstart/run.py

test: setup  ## Run the tests that cover every package, in minutes
	$(PYTEST) -m "not slow and not extended"

test-slow: $(LIBRARIES)  ## Run the tests that `make test` leaves out
	$(PYTEST) -m "slow and not extended"

test-extended: setup  ## Run the numeric tests under other instruction sets, every benchmark as its docstring says, whole matrices
	$(BIN)/python -m pytest -m extended

test-all: $(LIBRARIES)  ## Run every test but the extended ones
	$(PYTEST) -m "not extended"

compat:  ## Run the tests of the engine and below with another torch, in an environment of its own: make compat TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "make compat TORCH=2.15.0" >&2; exit 2; }
	@test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	@grep -vE '^(torch|setuptools|nvidia-[a-z-]+)==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip --disable-pip-version-check install --quiet -c $(COMPAT)/constraints.txt torch==$(TORCH) -e '.[test]'
	$(COMPAT)/$(subst $(BIN)/,bin/,$(PYTEST)) -m "not slow and not extended" tests/engine tests/sharding tests/pipeline tests/ops

durations: $(LIBRARIES)  ## Run every test and record what each takes: `make test` is chosen from it
	$(PYTEST) -m "not extended" --record-durations

lint: setup  ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(SITE)  ## Build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-check: setup  ## Run every command of the guides and compare its output with the page
	$(BIN)/python -m tests.docs.check

bench: setup  ## Measure against peers; those that are not installed are named and left out
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/engine.py

# With the machine's own torch, which knows its CUDA; nothing is installed. PYTHON=... names another interpreter.
gpu-check:  ## Prove the CUDA half on a GPU in eight minutes: kernels, engine, bandwidth, a GPT of 1 B parameters
	$(PYTHON) benchmarks/gpu_check.py

setup: $(STAMP)  ## Make .venv and install zero_trial with its extras into it

# torch first and under the constraints, so that nothing that comes later can choose another build of it.
$(STAMP): setup.py pyproject.toml constraints.txt
	@echo "setup   1 of 3: an environment in .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setup   2 of 3: torch, the largest download"
	@$(PIP) torch
	@echo "setup   3 of 3: zero_trial, what it needs, and what its tests need"
	@$(PIP) -e '.[determined,tensorboard,test]'
	touch $@

# 460 MB that only docs/exactness.md and the tests of libraries and of Ray need.
$(LIBRARIES): $(STAMP)
	$(PIP) -e '.[libraries]'
	touch $@

$(SITE): $(STAMP)
	$(PIP) -e '.[docs]'
	touch $@

clean:  ## Remove the environment and the caches, not the runs
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## Say what each target does
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'
