# All targets create the environment .venv if it is missing, and install each dependency once.
PYTHON ?= python3
BIN := .venv/bin
# The versions of Python that `make release-check` tries.
PYTHONS ?= python3.11 python3.12 python3.13
# Number of parallel test processes. Each uses one thread and up to two gigabytes of memory. In slow tests, a process waits for other
# processes and for files for a tenth of the time, so `make test-all` has one more.
WORKERS ?= 2
# The tests of `make lowest`; they need no further packages.
LOWEST_TESTS := $(addprefix tests/,config/test_parse.py hooks/test_module_hooks.py hooks/test_parameter_gradients.py \
	hooks/test_tensor_gradients.py stats/test_merge.py storage/test_journal.py storage/test_run_folder.py)
PYTEST = $(BIN)/python -m pytest -p xdist --numprocesses $(WORKERS)
RUN_STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
# Python compiles a module at its first import, and stores the result. pip would compile all modules, of which a third are imported.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench bench-gpu bench-peers bench-scale release-check lowest check format docs pictures site clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(RUN_STAMP)  ## train a CNN on MNIST with hooks that record, clip, scale and modify, and create a report
	$(BIN)/python -m instrument +exp=mnist_hooks report=true

test: $(DEV_STAMP)  ## run the tests, without slow ones
	$(PYTEST) --dist loadscope --no-loadscope-reorder

test-all: WORKERS = 3
test-all: $(DEV_STAMP) .engines/.installed .torchtitan/.installed  ## run all tests, including slow ones
	$(PYTEST) --dist worksteal -m ""

bench: $(DEV_STAMP)  ## measure overhead, start-up, budgets, predictions, storage, growth and distributed runs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -W ignore benchmarks/start.py
	$(BIN)/python -W ignore benchmarks/steps.py
	$(BIN)/python -W ignore benchmarks/firing.py
	$(BIN)/python -W ignore benchmarks/device_host.py
	$(BIN)/python -W ignore benchmarks/functions.py
	$(BIN)/python -W ignore benchmarks/budget.py
	$(BIN)/python -W ignore benchmarks/forecasts.py
	$(BIN)/python -W ignore benchmarks/storage.py
	$(BIN)/python -W ignore benchmarks/features.py
	$(BIN)/python -W ignore benchmarks/forward.py
	$(BIN)/python -W ignore benchmarks/memory.py
	$(BIN)/python -W ignore benchmarks/growth.py
	$(BIN)/python -W ignore benchmarks/rules.py
	$(BIN)/python -W ignore benchmarks/reference_rules.py
	$(BIN)/python -W ignore benchmarks/watching.py
	$(BIN)/python benchmarks/ranks.py

bench-gpu: $(DEV_STAMP)  ## measure steps of ResNet-50, GPT-2 small and a Llama-like network on a GPU
	$(BIN)/python -W ignore benchmarks/gpu.py

bench-peers: $(DEV_STAMP)  ## run the same job with other tools, each in its own environment
	$(BIN)/python -W ignore benchmarks/peers/compare.py
	PYTHONPATH=. .peers/nvdlfw-inspect/bin/python -W ignore benchmarks/firing.py

bench-scale: $(DEV_STAMP)  ## run four queries on 100 million rows of 1,000 runs; needs 7 GB of disk space
	$(BIN)/python -W ignore benchmarks/scale.py

release-check: $(DEV_STAMP)  ## build the wheel and the sources, and run both in an empty environment of each of PYTHONS
	rm -rf build dist .release
	$(BIN)/python -m build --outdir .release/build > /dev/null
	PATH=$(abspath $(BIN)):$$PATH auditwheel repair --wheel-dir dist .release/build/*.whl
	mv .release/build/*.tar.gz dist
	set -e; for python in $(PYTHONS); do .ci/check_release $$python; done

lowest:  ## run some tests with Python 3.11 and the lowest versions that pyproject.toml accepts
	python3.11 -m venv --clear .lowest
	grep -oE '"[A-Za-z-]+>=[0-9.]+' pyproject.toml | tr -d '"' | sed 's/>=/==/' | sort -u > .lowest/constraints.txt
	.lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c .lowest/constraints.txt -e '.[run,sql,report]' pytest pytest-xdist hypothesis
	.lowest/bin/python -m pytest -p xdist --numprocesses $(WORKERS) $(LOWEST_TESTS)

check: $(DEV_STAMP)  ## check formatting, lint, wording and types, without changes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python docs/words.py
	$(BIN)/mypy

format: $(DEV_STAMP)  ## format the code and apply fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP)  ## generate the reference pages and the JSON Schema from the code
	$(BIN)/python docs/make.py

pictures: $(DEV_STAMP)  ## make the pictures of the README and the docs again
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/screenshots.py

site: docs  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site        site/index.html"

clean:  ## remove the environment, caches and builds, but not runs
	rm -rf .venv .peers .engines .lowest .torchtitan .release build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "instrument needs Python 3.11 or later; select it with: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(RUN_STAMP): pyproject.toml constraints.txt | .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[run,report]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(RUN_STAMP)

# Dask and Spark, which read run folders in a test. They have an environment without the packages of this project.
.engines/.installed: tests/engines.txt
	$(PYTHON) -m venv .engines
	.engines/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# torchtitan on top of .venv, with the older datasets that it requires.
.torchtitan/.installed: tests/torchtitan.txt | $(DEV_STAMP)
	$(BIN)/python -m venv .torchtitan
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; $(BIN)/python -c "$$purelib" > "$$(.torchtitan/bin/python -c "$$purelib")/shared.pth"
	.torchtitan/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r $<
	@touch $@
