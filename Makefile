# make demo    see it work: a mount, a save, a crash, a restore      make check   format, lint, types, fast tests
# make run     a mount at ./demo/ckpt                                make test    every test
# make bench   compare with raw staging, pyfuse3's example, rclone
# Everything is installed into .venv and .envs; system packages only when something is missing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --silent

PYTHON ?= python3
TORCH := torch==2.13.0
WITH_TORCH ?= no
NO_TORCH = echo "NOTE: the tests with torch were left out: $$(.venv/bin/python -V), and no wheel of $(TORCH) at hand" \
    "(PIP_FIND_LINKS). Fetch one, of several GB perhaps: make test WITH_TORCH=yes; or use make PYTHON=python3.11"
PIP := .venv/bin/python -m pip --disable-pip-version-check --no-input -qq
LOCKED := $(PIP) install --require-hashes
# Steps that install run one at a time, also when make is called twice at once: the second waits, then finds it done.
ONE_AT_A_TIME := mkdir -p .envs && flock --close .envs/lock $(MAKE)

.PHONY: setup dev torch servers demo run check lint test bench lock clean help

help:
	@sed -n '1,4s/^# *//p' Makefile

setup: ## system packages, .venv, locked dependencies, cachefs itself
	@$(ONE_AT_A_TIME) .venv/.setup
dev: ## setup, and what the tests need
	@$(ONE_AT_A_TIME) .venv/.dev
torch:
	@$(ONE_AT_A_TIME) .venv/.torch
servers: dev ## the S3 servers of the tests, each in an environment of its own
	@mkdir -p .envs && flock --close .envs/lock .venv/bin/python -m tests.servers install

.venv/.python:
	@.ci/packages $(PYTHON) run
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@touch $@

# pyfuse3 comes as source. Its build requirements are locked too, so it is built with them and not in an isolated
# environment that would fetch whatever is newest.
.venv/.setup: .venv/.python requirements-build.lock requirements.lock pyproject.toml $(wildcard setup.py cachefs/*/*.c)
	@echo "installing locked dependencies"
	@$(LOCKED) -r requirements-build.lock
	@$(LOCKED) --no-build-isolation -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation --no-index --editable .
	@touch $@

.venv/.dev: .venv/.setup requirements-dev.lock .ci/packages
	@.ci/packages $(PYTHON) test
	@echo "installing locked development tools"
	@$(LOCKED) --no-build-isolation -r requirements-dev.lock
	@touch $@

# torch itself is not in a lock file: which of its builds is right (CPU, CUDA, a local wheel) is the machine's business.
# With another Python than 3.11 that may be a build for CUDA of several GB: only if a wheel is at hand, or if asked to.
.venv/.torch: .venv/.dev requirements-torch.lock Makefile
	@if [ "$(WITH_TORCH)" = yes ] || .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	        $(PIP) install --dry-run --ignore-installed --no-deps --no-index $(TORCH) 2>/dev/null; then \
	    echo "installing $(TORCH) for the tests"; \
	    $(LOCKED) -r requirements-torch.lock; \
	    $(PIP) install $(TORCH); \
	    touch $@; \
	fi

demo: setup
	@.venv/bin/python -m cachefs.demo

run: setup
	@mkdir -p demo/ckpt demo/store demo/staging
	@.venv/bin/cachefs mount ./demo/ckpt --store file://$(CURDIR)/demo/store --staging ./demo/staging

lint: dev
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

check: lint
	@.venv/bin/python -m pytest tests -q -m "not server and not mount and not torch"

# Two files at a time: most of the integration tests wait for a daemon, while those of the rules keep a core busy.
EVERY_TEST := .venv/bin/python -m pytest tests integration -n 2 --dist loadfile --no-loadscope-reorder --durations=10
test: dev torch servers
	@if [ -e .venv/.torch ]; then \
	    $(EVERY_TEST); \
	else \
	    $(EVERY_TEST) -m "not torch"; \
	    $(NO_TORCH); \
	fi

bench: dev
	@.venv/bin/python -m integration.bench $(BENCH)

# Existing versions are kept where they still fit; delete a lock file first to take the newest of everything.
UV ?= $(firstword $(wildcard .venv/bin/uv) uv)
COMPILE = $(UV) pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
lock:
	@command -v $(UV) >/dev/null || { echo "error: make lock needs uv: pip install uv" >&2; exit 1; }
	@$(COMPILE) pyproject.toml -o requirements.lock
	@$(COMPILE) pyproject.toml --group dev -c requirements.lock -o requirements-dev.lock
	@printf '%s\n' pip 'setuptools>=78.1.1' setuptools-scm cython \
	    | $(COMPILE) - -c requirements-dev.lock -o requirements-build.lock
	@printf '%s\n' sympy networkx jinja2 fsspec filelock typing-extensions \
	    | $(COMPILE) - -c requirements-dev.lock -o requirements-torch.lock
	@! grep -nE 'https?://|file:/|index-url|find-links' requirements*.lock

clean:
	@if mountpoint -q demo/ckpt; then echo "error: demo/ckpt is still mounted: fusermount3 -u demo/ckpt" >&2; exit 1; fi
	@rm -rf .venv .envs build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
