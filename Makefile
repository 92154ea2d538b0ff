# The two commands: `make run` (set-up and the main job) and `make test` (set-up and every test).
# .venv holds what running needs, .venv-dev also the tools: `make run` stays a matter of seconds,
# and what tests need cannot hide a missing run-time dependency.
PYTHON ?= python3
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
REQUESTS ?= 1000
PAGE_BYTES ?= 64KiB
BENCH_NVME ?= --raw
BENCH_REDIS ?= --raw
TRACE_DIR := $(or $(L3STORE_TRACE_DIR),../shared/traces)
TRACE := $(wildcard $(TRACE_DIR)/mooncake_conversation.jsonl)
STORE := $(CURDIR)/.data/store
NEW_STORE := rm -rf .data/store && mkdir -p .data

.PHONY: help run test sglang lint bench soak clean

help:  ## say what the targets do
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 8

run: .venv/installed  ## replay a trace of real prompts over a local store, and show the result
	@$(NEW_STORE)
	@.venv/bin/l3store replay $(or $(TRACE),--synthetic 1) --url "nvme://$(STORE)?capacity=4GiB" \
		--requests $(REQUESTS) --page-bytes $(PAGE_BYTES); code=$$?; rm -rf .data/store; exit $$code

test: lint .venv-sglang/installed  ## lint, types, and every test but the soak
	.venv-dev/bin/pytest --ignore tests/sglang
	.venv-sglang/bin/pytest tests/sglang

sglang: .venv-sglang/installed  ## serve a tiny model with the real SGLang on the CPU: prompts come back from L3
	@$(NEW_STORE)
	@.venv-sglang/bin/python tests/sglang/demo.py $(STORE) && .venv-sglang/bin/l3store ls nvme://$(STORE); \
		code=$$?; rm -rf .data/store; exit $$code

lint: .venv-dev/installed  ## ruff, and mypy over the unpacked wheel
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/python tools/typecheck.py

bench: .venv-dev/installed .venv-sglang/installed  ## the figures of docs/ and README, measured here
	.venv-dev/bin/python bench/overhead.py
	.venv-dev/bin/l3store bench 'memory://?capacity=8GiB'
	@$(NEW_STORE)
	.venv-dev/bin/l3store bench "nvme://$(STORE)?capacity=4GiB"; code=$$?; rm -rf .data/store; exit $$code
	.venv-dev/bin/python bench/nvme --dir .data $(BENCH_NVME)
	.venv-dev/bin/python bench/consensus
	.venv-dev/bin/python bench/redis $(BENCH_REDIS)
	.venv-dev/bin/python bench/mooncake
	.venv-sglang/bin/python bench/adapter_cost.py
	.venv-sglang/bin/python bench/sglang_file --dir .data

soak: .venv-dev/installed .venv-sglang/installed  ## the long runs
	.venv-dev/bin/pytest -m soak --timeout 7200 --ignore tests/sglang
	.venv-sglang/bin/pytest -m soak --timeout 7200 tests/sglang

clean:  ## remove what the targets above made
	rm -rf .venv .venv-dev .venv-sglang .data build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .coverage*

# A pip that stands outside can install into a venv (22.3 and later); one inside costs 3 s to make.
HAS_PIP := import pip, sys; sys.exit([*map(int, pip.__version__.split(".")[:2])] < [22, 3])
OUTER_PIP = $(shell $(PYTHON) -c '$(HAS_PIP)' 2>/dev/null && echo yes)
VENV = rm -rf $(1) && $(PYTHON) -m venv $(if $(OUTER_PIP),--without-pip) $(1)
INSTALL = $(if $(OUTER_PIP),$(PYTHON) -m pip --python $(1)/bin/python,$(1)/bin/pip) \
	install $(PIP_FLAGS)

.venv/installed: pyproject.toml constraints.txt
	@$(call VENV,.venv)
	@$(call INSTALL,.venv) --editable .
	@touch $@

.venv-dev/installed: pyproject.toml constraints.txt
	@rm -rf .venv-dev && $(PYTHON) -m venv .venv-dev
	@.venv-dev/bin/pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

# The real engine, on a CPU. In two steps: the first takes a minute, the second two seconds.
.venv-sglang/packages: tests/sglang/requirements.txt tests/sglang/finish_venv.py constraints.txt
	@$(call VENV,.venv-sglang)
	@$(call INSTALL,.venv-sglang) --no-deps --no-compile -r tests/sglang/requirements.txt
	@.venv-sglang/bin/python tests/sglang/finish_venv.py
	@touch $@

.venv-sglang/installed: .venv-sglang/packages pyproject.toml
	@$(call INSTALL,.venv-sglang) --no-deps --no-build-isolation --editable .
	@touch $@
