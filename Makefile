# Two commands on a fresh machine do all set-up: `make reproduce` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup data tokens reproduce quick test test-all test-newest lint docs docs-serve package bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with the package and its tools; skipped when up to date

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

reproduce: data ## the study: the paper's figures and theorems in ten minutes, and out/report.html (PART=fig1 SCALE=quick|paper|full DEVICE=cpu|cuda; PART=fig1 DATA=file.csv DELAYS="10 100": your own)
	$(BIN)/python -m reproduction $(or $(PART),all) --scale $(or $(SCALE),quick) --device $(or $(DEVICE),cpu) --out $(or $(OUT),out) \
		$(if $(DATA),--data $(DATA)) $(if $(DELAYS),--delays $(DELAYS)) $(if $(UPDATES),--updates $(UPDATES))

lint: $(STAMP) ## ruff, mypy and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

CORE := tests/rules/test_transcriptions.py tests/rules/test_sets.py tests/rules/test_facts.py tests/delays/test_delays.py \
	tests/simulator/test_simulate.py tests/optim/test_optim.py tests/serve/test_jobs.py tests/cli/test_registry.py

# One torch thread per test process: two processes on two cores beat two threads in one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(or $(JOBS),2) --dist worksteal

quick: lint ## a contributor's first check: lint, types, and the tests of the core, in a minute
	$(PYTEST) -q -m "not slow" $(CORE)

test: lint ## everything a change must pass (minutes, no GPU, no data sets)
	$(PYTEST) -m "not slow"

data: $(STAMP) ## put Fashion-MNIST and Shakespeare's works into the user's cache, if they are not there yet
	scripts/fetch_fashion_mnist.sh
	scripts/fetch_shakespeare.sh

tokens: $(STAMP) ## put tokens of the Python sources on this machine into the cache, for the study's GPT of 34 million parameters
	$(BIN)/python -m scripts.make_tokens

test-all: lint data ## test, and the slow tests: real data, a real browser, Lightning, Hugging Face and W&B (200 MB)
	scripts/install_chromium.sh
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations,wandb]'
	EXAMPLES=100 $(PYTEST)

test-newest: ## the same checks in .venv-newest, with the newest release of every dependency (torch: several GB)
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n $(or $(JOBS),2) -m "not slow"

docs: $(STAMP) ## the documentation site in site/; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs site

docs-serve: docs ## the same, served at http://localhost:8000 (PORT=...)
	$(BIN)/python -m http.server --directory site $(or $(PORT),8000)

package: $(STAMP) ## wheel and source distribution in dist/
	$(BIN)/python -m build --quiet

bench: data ## benchmarks: ratios measured side by side
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean: ## remove .venv and caches
	rm -rf $(VENV) .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build site docs/reference
