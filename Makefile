# Each target sets up what it needs in .venv; stamp files there make the second run quick.
#
#   make demo    the first example notebook, run headless; prints what came out
#   make test    linters, types and all tests
#   make bench   launch, closure and step benchmarks beside the peers
#
# Choices: make PYTHON=python3.12 TORCH=torch==2.9.1 test ; make test ARGS='-k capture'

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH ?= torch==2.13.0
ARGS ?=

# Tried in this order; a version manager's shim may exist for a Python that does not start.
CANDIDATES := python3.11 python3.14 python3.13 python3.12 python3.10 python3

help:
	@sed -n '3,7s/^# *//p' Makefile

$(VENV)/.stamp-venv:
	@python="$(PYTHON)"; \
	for candidate in $(CANDIDATES); do \
	  if [ -n "$$python" ]; then break; fi; \
	  if $$candidate -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 10)' \
	    >/dev/null 2>&1; then python=$$candidate; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'No Python >= 3.10 with venv found. On Debian: apt-get install python3-venv' >&2; exit 1; \
	fi; \
	echo "· virtual environment in $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@touch $@

# On its own and first: whatever build of torch this gives stays, nothing later replaces it.
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	@echo "· installing $(TORCH)"
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then echo '  (there already)'; \
	else $(PIP) '$(TORCH)' numpy; fi
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml
	@echo '· installing hydrogen_magic and what the notebooks use'
	@$(PIP) -e '.[torch,notebooks]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml
	@echo '· installing hydrogen_magic and the developer tools'
	@$(PIP) -e '.[torch,dev]'
	@touch $@ $(VENV)/.stamp-demo

$(VENV)/.stamp-bench: $(VENV)/.stamp-torch pyproject.toml
	@echo '· installing hydrogen_magic and the peers it is measured against'
	@$(PIP) -e '.[torch,bench]'
	@touch $@

demo: $(VENV)/.stamp-demo
	@$(BIN)/python example_notebooks/demo.py

lint: $(VENV)/.stamp-dev
	@echo '· ruff, mypy'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check hydrogen_magic tests benchmarks example_notebooks/demo.py
	@$(BIN)/mypy --no-error-summary

# pytest's own closing line stays the last thing printed.
test: lint
	@echo '· pytest'
	@$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/.stamp-bench
	@$(BIN)/python benchmarks/launch.py $(ARGS)
	@$(BIN)/python benchmarks/closure.py $(ARGS)
	@$(BIN)/python benchmarks/step.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
