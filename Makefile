# `make` alone lists the commands. Each installs what it needs, once, into .venv beside this file.
# Works with GNU make 3.81 (macOS) and later.

PYTHON ?= python3
# Passed on to the command that a target runs: make train ARGS="--help", make test ARGS="-k counts"
ARGS ?=
# Of make train: MEMORY_BUDGET=600MiB
MEMORY_BUDGET ?= 1GiB

VENV := .venv
LOWEST_VENV := .venv-lowest
# The lowest torch that pyproject.toml allows; a test keeps the two the same.
LOWEST_TORCH := 2.6.0

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input
CHECK_PYTHON := import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"wholebatch needs Python 3.11 or newer, and this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help train test check smoke bench clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s  %s\n", $$1, $$2}' Makefile

train: $(VENV)/.train  ## install, and train a small Transformer on real text (a few minutes on 2 CPU cores)
	$(VENV)/bin/wholebatch train --memory-budget $(MEMORY_BUDGET) $(ARGS)

test: $(VENV)/.test  ## run the tests
	$(VENV)/bin/python -m pytest $(ARGS)

check: $(VENV)/.dev  ## lint, format, types, and the layers that imports may cross
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

smoke: $(LOWEST_VENV)/.lowest  ## run the tests marked smoke on the lowest torch that is claimed
	$(LOWEST_VENV)/bin/python -m pytest -m smoke $(ARGS) $$(grep -rl --include='test_*.py' 'mark\.smoke' tests)

bench: $(VENV)/.bench  ## measure wholebatch against a loop written by hand and against its peers (ARGS: of peers.py)
	$(VENV)/bin/python benchmarks/overhead.py
	$(VENV)/bin/python benchmarks/peers.py $(ARGS)

clean:  ## remove the virtual environments and caches; what was trained stays
	rm -rf $(VENV) $(LOWEST_VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps: a second call installs nothing until the requirements change.
$(VENV)/.train $(VENV)/.test $(VENV)/.dev $(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing wholebatch into $(VENV) (torch alone may be a download of gigabytes) ..."
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
$(VENV)/.train: EXTRAS := train
$(VENV)/.test: EXTRAS := train,test
$(VENV)/.dev: EXTRAS := train,dev
$(VENV)/.bench: EXTRAS := train,test,bench

$(LOWEST_VENV)/.lowest: pyproject.toml constraints.txt Makefile | $(LOWEST_VENV)/bin/pip
	@echo "Installing wholebatch into $(LOWEST_VENV) with torch $(LOWEST_TORCH) ..."
	@$(LOWEST_VENV)/bin/python $(PIP_INSTALL) torch==$(LOWEST_TORCH) $$(grep -E '^(hypothesis|numpy|pytest)==' constraints.txt) -e .
	@touch $@

$(VENV)/bin/pip $(LOWEST_VENV)/bin/pip:
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(@D:/bin=)
