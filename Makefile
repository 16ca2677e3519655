# Everything starts here. Each target does its own set-up in .venv: the first time from the package index, afterwards
# without the network. Stages add up (base < lab < book < test), so that `make demo` installs only what it needs.

.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/sh

PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2

# A stage is done when its stamp exists. The name of a stamp holds what was installed: the two files and the folder,
# since an editable install remembers where it lies.
KEY := $(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.stage
# No interpreter, or one that no longer runs: build the environment anew.
ifneq ($(shell { $(PY) -c pass || echo broken; } 2>/dev/null),)
$(shell rm -rf $(STAMP))
endif

.PHONY: help demo lab book test lint unit kernels notebooks browser chromium clean

help:
	@echo "make demo    a trained Mixture-of-Experts model serves a mixed batch in this terminal"
	@echo "make lab     the notebooks in JupyterLab, on this machine only"
	@echo "make book    build the book, readable offline, in book/_build/html"
	@echo "make test    everything that proves it: lint, unit, kernels, notebooks, browser (each is a target, too)"
	@echo "make clean   remove .venv and everything built"
	@echo "PYTHON=/path/to/python3.12 picks an interpreter; JOBS=4 runs the tests on four cores."

# ---------------------------------------------------------------------------------------------------- set-up

$(STAMP)/venv:
	@for python in $(PYTHONS); do \
	  $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || continue; \
	  echo "Making $(VENV) with $$($$python -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	  $$python -m venv --clear $(VENV) && mkdir -p $(STAMP) && touch $@; exit; \
	done; \
	echo "tinymoe needs Python 3.11 to 3.14 with its venv module; none of these is one: $(PYTHONS)." \
	  "Install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

# torch alone comes first, at its pin, so that nothing else decides which build of it is taken.
$(STAMP)/base-$(KEY): $(STAMP)/venv
	@echo "Installing torch and the engine (once; a few minutes)"
	@$(PIP) setuptools torch
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(STAMP)/lab-$(KEY): $(STAMP)/base-$(KEY)
	@echo "Installing JupyterLab and the widgets (once)"
	@$(PIP) --no-build-isolation --editable ".[lab]"
	@touch $@

$(STAMP)/book-$(KEY): $(STAMP)/lab-$(KEY)
	@echo "Installing the book's tools (once)"
	@$(PIP) --no-build-isolation --editable ".[lab,book]"
	@touch $@

$(STAMP)/test-$(KEY): $(STAMP)/book-$(KEY)
	@echo "Installing the test tools (once)"
	@$(PIP) --no-build-isolation --editable ".[lab,book,test]"
	@touch $@

# Debian's Chromium for the browser tests. Without it, or where it cannot be had, those tests skip and say so.
chromium:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -f /etc/debian_version ]; then \
	  echo "Installing chromium for the browser tests (once)"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null \
	    || echo "chromium could not be installed: the browser tests will skip"; \
	else echo "No chromium here: the browser tests will skip"; fi

# -------------------------------------------------------------------------------------------------- the ways in

demo: $(STAMP)/base-$(KEY)
	@$(PY) -m tinymoe demo

lab: $(STAMP)/lab-$(KEY)
	@$(PY) -m jupyterlab --ip=127.0.0.1 --ServerApp.root_dir=notebooks $$([ "$$(id -u)" != 0 ] || echo --allow-root) \
	  --LabApp.extension_manager=readonly --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate

book: $(STAMP)/book-$(KEY)
	@$(PY) -m sphinx --fail-on-warning --quiet --builder html --doctree-dir book/_build/doctrees book book/_build/html
	@echo "The book is built. Open it in a browser, no server needed: $(CURDIR)/book/_build/html/index.html"

# ------------------------------------------------------------------------------------------------------- tests
# One torch thread a process: the tests run $(JOBS) processes side by side. Nothing may reach for a model hub.

PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PY) -m pytest -q

test: lint unit kernels notebooks browser
	@echo "make test: all stages passed"

lint: $(STAMP)/test-$(KEY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright --pythonpath $(PY)

unit: $(STAMP)/test-$(KEY)
	@$(PYTEST) -n $(JOBS) --ignore=tests/e2e tests

# Triton's interpreter runs the kernels on a CPU; it is chosen by a variable before Triton is imported.
kernels: $(STAMP)/test-$(KEY)
	@TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) -W ignore::RuntimeWarning tests/test_kernels_*.py

# Strict: every stored output is compared. Cells of one notebook share a kernel, hence loadfile.
notebooks: $(STAMP)/test-$(KEY)
	@files=$$(ls notebooks/*.ipynb 2>/dev/null) || { echo "no notebooks yet"; exit 0; }; \
	$(PY) -c "import triton" 2>/dev/null || { \
	  files=$$(grep -L "# needs triton" $$files); echo "No Triton here: the notebooks that need it are left out"; }; \
	$(PYTEST) -n $(JOBS) --dist loadfile --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg \
	  --nbval-cell-timeout=120 $$files

browser: $(STAMP)/test-$(KEY) chromium book
	@$(PYTEST) tests/e2e

clean:
	rm -rf $(VENV) book/_build build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
