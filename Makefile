# Everything here makes its own environment in .venv where it is missing, and installs nothing twice.
PYTHON ?= python3
BIN := .venv/bin
# Processes that tests run in, at once; each has one thread, and takes up to two gigabytes.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -p xdist --numprocesses $(WORKERS)
RUN_STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench bench-peers bench-scale check format docs site clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(RUN_STAMP)  ## train a CNN on MNIST with hooks that record, clip, scale and modify, and make a page of what they saw
	$(BIN)/python -m instrument +exp=mnist_hooks report=true

test: $(DEV_STAMP)  ## run the tests: every behaviour once
	$(PYTEST) --dist loadscope --no-loadscope-reorder

test-all: $(DEV_STAMP)  ## run the tests in their whole depth
	$(PYTEST) --dist worksteal -m ""

bench: $(DEV_STAMP)  ## measure what hooks cost a step, start-up, budgets, forecasts, tensors on disk, growth, and ranks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -W ignore benchmarks/start.py
	$(BIN)/python -W ignore benchmarks/steps.py
	$(BIN)/python -W ignore benchmarks/budget.py
	$(BIN)/python -W ignore benchmarks/forecasts.py
	$(BIN)/python -W ignore benchmarks/storage.py
	$(BIN)/python -W ignore benchmarks/growth.py
	$(BIN)/python benchmarks/ranks.py

bench-peers: $(DEV_STAMP)  ## the same job through other tools, each in an environment of its own
	$(BIN)/python -W ignore benchmarks/peers/compare.py

bench-scale: $(DEV_STAMP)  ## a hundred million rows of a thousand runs, asked four questions; 7 GB of disk for a while
	$(BIN)/python -W ignore benchmarks/scale.py

check: $(DEV_STAMP)  ## check format, lint, words and types; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/words.py
	$(BIN)/mypy

format: $(DEV_STAMP)  ## put the code into its format and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP)  ## generate the reference pages and the JSON Schema from the code
	$(BIN)/python docs/make.py

site: docs  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site        site/index.html"

clean:  ## remove the environment, caches and builds; runs are kept
	rm -rf .venv .peers build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "instrument needs Python 3.11 or later; say which with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(RUN_STAMP): pyproject.toml constraints.txt | .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(RUN_STAMP)
