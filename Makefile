# The commands of the project. `make demo` and `make test` need Python 3.11+, pip, make and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
STAMP := $(VENV)/.installed
EXTRAS := $(VENV)/.installed-extras
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs

# Installs lock files. pip takes only files whose SHA-256 is listed there; HASHES=no takes any build
# of the pinned versions, where the listed ones (torch's CPU build) are not offered.
HASHES ?= yes
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ifeq ($(HASHES),no)
from_lock = grep -hoE '^[A-Za-z0-9._-]+==[^ ]+' $(1) > $(VENV)/versions.txt && $(PIP) -r $(VENV)/versions.txt
else
from_lock = $(PIP) --require-hashes $(addprefix -r ,$(1)) || { echo "If pip offers no torch with a listed hash: \
	add an index of torch's CPU builds to pip's configuration, or run \`make HASHES=no $(MAKECMDGOALS)\`." >&2; exit 1; }
endif

.PHONY: help install demo test citest slowtest fulltest check docs docs-serve build bench lint types format lock clean

help:            ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv and install from requirements.lock

$(LOCKED): requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "noisewise needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call from_lock,requirements.lock)
	touch $@

$(STAMP): $(LOCKED) pyproject.toml
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(EXTRAS): requirements-extras.lock $(STAMP)
	$(call from_lock,requirements.lock requirements-extras.lock)
	touch $@

$(DOCS): requirements-docs.lock $(STAMP)
	$(call from_lock,requirements.lock requirements-docs.lock)
	touch $@

$(BENCH): requirements-bench.lock $(STAMP)
	$(call from_lock,requirements.lock requirements-bench.lock)
	touch $@

demo: $(STAMP)   ## compare all methods on handwritten digits (about a minute)
	$(BIN)/noisewise compare configs/digits_head.toml --output runs/demo

test: $(STAMP)   ## all tests but the long proofs and those of extras, registries, browser and system accounts
	$(BIN)/python -m pytest -m "not slow and not extras and not registry and not browser and not accounts" -n 2

lint: $(STAMP)   ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

MEASURED := $(if $(COVERAGE),--cov --cov-report=term:skip-covered)
citest: $(EXTRAS) ## all tests but the long proofs, as CI runs them; COVERAGE=yes measures coverage, too
	$(BIN)/python -m pytest -m "not slow" -n 2 $(MEASURED)

slowtest: $(EXTRAS) ## the long proofs (half an hour)
	$(BIN)/python -m pytest -m slow -n 2

fulltest: $(EXTRAS) ## every test; COVERAGE=yes measures coverage, too
	$(BIN)/python -m pytest -n 2 $(MEASURED)

check: lint types citest ## lint, types and all tests but the long proofs, as CI runs them

docs: $(DOCS)    ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	$(BIN)/python .ci/check_site.py site
	@echo "open site/index.html"

docs-serve: $(DOCS) ## the documentation on this machine, rebuilt when a page changes; PORT=8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:$(or $(PORT),8000)

# The wheel is built from the sdist, so that the sdist is complete; then it is installed beside the locked packages in an
# environment without this folder.
build: $(STAMP)  ## sdist and wheel in dist/, and a smoke test of the wheel
	rm -rf build dist
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	PIP_COMPILE=0 $(MAKE) --no-print-directory VENV=build/smoke build/smoke/.locked
	build/smoke/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	build/smoke/bin/python -m pip check
	build/smoke/bin/python -P .ci/smoke.py

bench: $(BENCH)  ## speed and precision, as ratios in one run each (an hour)
	$(BIN)/python -m pytest -q -s benchmarks
	$(BIN)/python benchmarks/estimators.py
	$(BIN)/python benchmarks/precision.py --train
	$(BIN)/python benchmarks/gradients.py
	$(BIN)/python benchmarks/isolation.py
	$(BIN)/python benchmarks/rounding.py
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/many_clients.py
	$(BIN)/python benchmarks/heads.py
	$(BIN)/python benchmarks/calibration.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/ledger.py --kills 1000

format: $(STAMP) ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(STAMP)   ## write the lock files from pyproject.toml; UPGRADE="NAME ..." moves these packages
	$(BIN)/python .ci/lock.py $(if $(UPGRADE),--upgrade $(UPGRADE))

clean:           ## remove what the commands made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
