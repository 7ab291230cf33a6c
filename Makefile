# The commands of the project. `make demo` and `make test` need Python 3.11+, pip, make and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-extras
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs

.PHONY: help install demo test check docs bench lint types format lock clean

help:            ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv and install from requirements.lock

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "noisewise needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(EXTRAS): requirements-extras.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-extras.lock
	touch $@

$(DOCS): requirements-docs.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-docs.lock
	touch $@

$(BENCH): requirements-bench.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-bench.lock
	touch $@

demo: $(STAMP)   ## compare all methods on handwritten digits (about a minute)
	$(BIN)/noisewise compare configs/demo.toml --output runs/demo

test: $(STAMP)   ## all tests but the long proofs and those of the extras and of the browser
	$(BIN)/python -m pytest -m "not slow and not extras and not browser" -n 2

lint: $(STAMP)   ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

check: lint types $(EXTRAS) ## lint, types and every test, as CI runs it
	$(BIN)/python -m pytest -n 2

docs: $(DOCS)    ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir site
	@echo "open site/index.html"

bench: $(BENCH)  ## speed and precision, as ratios in one run each (an hour)
	$(BIN)/python -m pytest -q benchmarks
	$(BIN)/python benchmarks/estimators.py
	$(BIN)/python benchmarks/precision.py --train
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/ledger.py --kills 1000

format: $(STAMP) ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP)   ## write requirements.lock from what .venv holds
	{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable | grep -vxFf requirements-extras.lock | grep -v "^pip==" | sed "s/+cpu//"; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:           ## remove what the commands made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
