# Everything starts from here; `make help` lists it. Nothing needs to be installed by hand on a Debian machine.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Debian's own Python is built with all optimisations; take it when it is new enough, else the one on the PATH.
PYTHON ?= $(shell for p in /usr/bin/python3 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && { command -v $$p; break; }; done)
PY := .venv/bin/python

.PHONY: help setup compiled demo demo-vllm test test-compiled lint test-live bench bench-overload bench-agreement example-record soak fuzz audit constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup: .venv/.stamp compiled ## the environment in .venv, and the data path compiled

compiled: .venv/.stamp ## the data path, compiled from the sources as they are now (a minute; not without a C compiler)
	@$(PY) deploy/compile.py

.venv/.stamp: pyproject.toml constraints.txt
	@deploy/python-venv.sh "$(PYTHON)" .venv
	$(PY) -m pip --disable-pip-version-check install --quiet -e '.[dev,otel]' -c constraints.txt
	@touch $@

demo: setup ## qualify a simulated server, serve it, and watch each decision
	$(PY) deploy/demo/run.py

demo-vllm: setup ## the same on a real vLLM (CPU; 3.4 GB are built once)
	deploy/vllm-cpu/setup.sh
	$(PY) deploy/demo/run.py --backend vllm

test: setup lint ## lint, types, layers, and every test that needs no vLLM
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest
	@$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

test-compiled: setup ## what a request passes through, tested on the compiled build
	@$(PY) -c 'import gateway.edge.path as path; assert path.__file__.endswith(".so"), "the data path is not compiled"'
	PLIMSOLL_INTERPRETED=0 $(PY) -m pytest tests/edge_path tests/flow/scenarios tests/attack/test_repeated_heads.py

lint: .venv/.stamp ## ruff, mypy --strict and import-linter
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

test-live: setup ## the tests against a real vLLM (CPU; 3.4 GB are built once)
	deploy/vllm-cpu/setup.sh
	$(PY) -m pytest -m 'live and not slow' tests/live

bench: setup ## the gateway beside the bare upstream: a table, and JSON
	$(PY) tests/bench/run.py

bench-overload: setup ## goodput at 0.5 to 4 times the qualified capacity
	$(PY) tests/bench/overload.py

bench-agreement: setup ## on a real vLLM: qualify beside `vllm bench serve`, and a replay that must keep the record's bound
	deploy/vllm-cpu/setup.sh
	$(PY) -m tests.bench.agreement
	$(PY) -m pytest -s -m 'live and slow' tests/live/test_replay_live.py

example-record: setup ## measure the tiny model on a real vLLM and put record, samples and report into records/examples
	deploy/vllm-cpu/setup.sh
	$(PY) -m tests.bench.example_record

soak: setup ## ten minutes of load, a storm, crowds of clients; memory must stay flat (PLIMSOLL_SOAK_S=60 for a short one)
	$(PY) -m pytest -s -m 'slow and not live' tests --ignore tests/fuzz

fuzz: setup ## a million damaged inputs, in process and over sockets (PLIMSOLL_FUZZ_INPUTS, PLIMSOLL_FUZZ_SEED)
	$(PY) -m tests.fuzz.campaign

audit: setup ## known vulnerabilities in what is pinned (needs the network: it asks the package index's advisories)
	$(PY) -m pip --disable-pip-version-check install --quiet 'pip-audit>=2.9'
	$(PY) -m pip_audit --no-deps --disable-pip -r constraints.txt

constraints: setup ## write the versions that are installed now to constraints.txt
	@$(PY) -m pip --disable-pip-version-check freeze --exclude-editable | LC_ALL=C sort -f >constraints.txt.new
	@! grep -n ' @ \|://' constraints.txt.new
	@mv constraints.txt.new constraints.txt && touch .venv/.stamp

clean: ## remove what these targets made in the tree (the cached vLLM stays)
	rm -rf .venv .demo .coverage .coverage.* htmlcov build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
