# The two commands: `make run` (set-up and the main job) and `make test` (set-up and every test).
# .venv holds what running needs, .venv-dev also the tools: `make run` stays a matter of seconds,
# and what tests need cannot hide a missing run-time dependency.
PYTHON ?= python3
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
REQUESTS ?= 1000
PAGE_BYTES ?= 64KiB
TRACE_DIR := $(or $(L3STORE_TRACE_DIR),../shared/traces)
TRACE := $(wildcard $(TRACE_DIR)/mooncake_conversation.jsonl)
STORE := $(CURDIR)/.data/store

.PHONY: help run test lint bench soak clean

help:  ## say what the targets do
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 8

run: .venv/installed  ## replay a trace of real prompts over a local store, and show the result
	@rm -rf $(STORE) && mkdir -p $(dir $(STORE))
	@.venv/bin/l3store replay $(or $(TRACE),--synthetic 1) --url file://$(STORE) \
		--requests $(REQUESTS) --page-bytes $(PAGE_BYTES); code=$$?; rm -rf $(STORE); exit $$code

test: lint  ## lint, types, and every test but the soak
	.venv-dev/bin/pytest

lint: .venv-dev/installed  ## ruff, and mypy over the unpacked wheel
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/python tools/typecheck.py

bench: .venv-dev/installed  ## the figures of docs/ and README, measured here
	.venv-dev/bin/python bench/overhead.py
	.venv-dev/bin/l3store bench 'memory://?capacity=8GiB'
	@rm -rf $(STORE) && mkdir -p $(dir $(STORE))
	.venv-dev/bin/l3store bench file://$(STORE); code=$$?; rm -rf $(STORE); exit $$code

soak: .venv-dev/installed  ## the long runs
	.venv-dev/bin/pytest -m soak --timeout 7200

clean:  ## remove what the targets above made
	rm -rf .venv .venv-dev .data build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/installed: pyproject.toml constraints.txt
	@rm -rf .venv && $(PYTHON) -m venv .venv
	@.venv/bin/pip install $(PIP_FLAGS) --editable .
	@touch $@

.venv-dev/installed: pyproject.toml constraints.txt
	@rm -rf .venv-dev && $(PYTHON) -m venv .venv-dev
	@.venv-dev/bin/pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@
