# Every target prepares .venv by itself; the second time that takes no time. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
TESTS ?= tests
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
N ?= 2

# .venv first, then the tools that a reused torch environment brings.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
python := .venv/bin/python
cxx_sources := $(shell find csrc -type f \( -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \) | sort)

.PHONY: demo test lint format bench bench-ranks report setup doctor clean help

# Threads that wait asleep: where anything else runs on the machine, spinning ones multiply every time measured.
demo: export OMP_WAIT_POLICY ?= passive
demo: .venv/.package  ## three tiny models: Transformers alone and through the operators; and prefills over ranks
	$(python) -m torch_sparse_mla demo $(DEMO_ARGS)
	$(if $(strip $(DEMO_ARGS)),,$(python) -m torch_sparse_mla demo --prefill --world 2 --layout bf16_mla_nope)

# One thread for each test process: two that share two cores with two threads each wait for one another. Work is stolen,
# because the tests that take longest stand together.
test: .venv/.package  ## every test; those that need a GPU skip themselves where there is none
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(python) -m pytest -n $(JOBS) --dist worksteal $(TESTS) $(PYTEST_ARGS)

doctor: .venv/.package  ## what this machine has, which kernel each operator runs, what is missing
	$(python) -m torch_sparse_mla doctor

lint: .venv/.lint  ## check style; changes nothing
	ruff check .
	ruff format --check .
	$(if $(cxx_sources),clang-format --dry-run --Werror $(cxx_sources))

format: .venv/.lint  ## rewrite files in the house style
	ruff check --fix .
	ruff format .
	$(if $(cxx_sources),clang-format -i $(cxx_sources))

bench: .venv/.package  ## one operator's benchmark: make bench OP=sparse_ckv_decode
	@if [ ! -f "profiling/bench_$(OP).py" ]; then \
		echo "make bench: OP='$(OP)'; allowed: $$(cd profiling && ls bench_*.py 2>/dev/null | sed 's/^bench_//; s/\.py$$//' | xargs)" >&2; \
		exit 2; \
	fi
	$(python) profiling/bench_$(OP).py $(BENCH_ARGS)

# PYTHON, where it is given, runs this as it is: a machine without a network has no other way to come by packages.
bench-ranks: $(if $(filter file,$(origin PYTHON)),.venv/.package)  ## what takes N GPUs of one host: make bench-ranks N=2 PYTHON=python3
	$(if $(filter file,$(origin PYTHON)),$(python),$(PYTHON)) profiling/run_ranks.py --ranks $(N) $(BENCH_ARGS)

report: .venv/.package  ## tables and pictures from profiling/results
	$(python) profiling/report.py

setup: .venv/.package  ## only prepare .venv and build the package

clean:  ## remove what the build and the tools made; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .venv/.package torch_sparse_mla/_native*.so
	find torch_sparse_mla tests tools profiling -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.venv/.environment: tools/requirements.txt tools/setup_env.py
	$(PYTHON) tools/setup_env.py environment
	@touch $@

.venv/.package: .venv/.environment pyproject.toml setup.py $(cxx_sources)
	$(PYTHON) tools/setup_env.py package
	@touch $@

.venv/.lint: .venv/.environment tools/requirements-lint.txt
	$(PYTHON) tools/setup_env.py lint
	@touch $@
