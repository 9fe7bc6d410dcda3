# Every target CI or a user runs. A fresh clone needs Python 3.11 or later with its headers (python3-dev), a C compiler and make;
# all that is installed goes to .venv.
#
#   make demo    train, plan, export, check, serve and query a model: the whole pipeline in one run
#   make test    the test suite
#   make test-all  also the nightly tests: every mutation and export, the whole parity matrix, Ray, TorchServe beside the other protocols
#   make check   lint, and the tests that train, export and serve nothing
#   make parity  sharded training against the unsharded module: every type, batch and kernel, on 1 to 4 ranks
#   make lint    ruff (lint and format), mypy, and that the generated code is what proto/ says
#   make bench   the side-by-side benchmarks
#   make bench-report  run the benchmarks of docs/benchmarks.md (25 minutes on a quiet machine), write the page and its plots
#   make docs    build the documentation site into site/; broken links are errors
#   make proto   regenerate the protobuf and gRPC code from proto/
#   make clean   remove .venv and every build product
#
# PYTHON=...           the interpreter the virtual environment is made from
# EXTRAS=cuda,onnx,train install for GPUs instead of the CPU
# TORCH_PIP_ARGS=...   extra arguments for installing torch alone, for example an index that has its CPU-only wheels
# TEST_ARGS=...        arguments for pytest, for example TEST_ARGS="tests/quant -x"
# DEMO_ARGS=...        arguments for `recinfer demo`, for example DEMO_ARGS="--data ratings.inter --format movielens"

PYTHON ?= python3.11
VENV ?= .venv
EXTRAS ?= cpu,onnx,train
TEST_ARGS ?= -n 2 --dist worksteal -m "not nightly"
DEMO_ARGS ?=
TORCH_PIP_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml | head -n 1)
STAMP := $(VENV)/.made

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check check-tests parity lint format bench bench-report docs proto clean install install-dev

help:
	@sed -n 's/^#   make/make/p' Makefile

# Stamps, so that a second make installs nothing: one for each thing that can go stale on its own.
$(STAMP)/venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "recinfer needs Python 3.11 or later; say make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMP) && touch $@

# torch first and on its own, so that the choice of its build (CPU or CUDA) is made once, by the user, and not by the
# resolver of another package.
$(STAMP)/$(TORCH): $(STAMP)/venv
	$(PIP) $(TORCH_PIP_ARGS) $(TORCH)
	@touch $@

$(STAMP)/run: $(STAMP)/$(TORCH) pyproject.toml setup.py $(wildcard recinfer/*/*.[ch] recinfer/*/*/*.[ch])
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

$(STAMP)/dev: $(STAMP)/run
	$(PIP) --editable '.[$(EXTRAS),serve,arrow,torchserve,plot,triton,dev]'
	@touch $@

$(STAMP)/docs: $(STAMP)/dev
	$(PIP) --editable '.[$(EXTRAS),docs]'
	@touch $@

install: $(STAMP)/run

install-dev: $(STAMP)/dev

demo: $(STAMP)/run
	$(BIN)/recinfer demo $(DEMO_ARGS)

# One thread a worker: the suite runs in as many processes as -n says, and their pools would fight for the cores. It starts
# some two hundred interpreters, which should not each compile recinfer anew where the environment says to keep no bytecode.
test: $(STAMP)/dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(TEST_ARGS)

# A test of the parity matrix takes longer than the suite's limit for one test.
test-all: $(STAMP)/dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --full-matrix -o faulthandler_timeout=2400

# mypy has one core for a while, and the tests what is left.
check: $(STAMP)/dev
	$(MAKE) --no-print-directory --jobs 2 lint check-tests

# tests/tiers.py says which tests these are.
check-tests: $(STAMP)/dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -m "(pure or in_process) and not slow and not nightly"

# A test here runs some 300 cases, which may take longer than the suite's limit for one test.
parity: $(STAMP)/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity --full-matrix -o faulthandler_timeout=2400

lint: $(STAMP)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/gen_proto.py --check
	$(BIN)/python tools/check_prose.py

format: $(STAMP)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The ones that need nothing but recinfer; benchmarks.planner_parity wants an interpreter with torchrec in it.
BENCHES ?= lookup planner serving "archive --size 1"

bench: $(STAMP)/dev
	@set -e; for bench in $(BENCHES); do \
		echo "== python -m benchmarks.$$bench"; OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$bench </dev/null; \
	done

# BENCH_ARGS: for example "--quick", "--only serving" or "--torchrec-python PATH".
BENCH_ARGS ?=

bench-report: $(STAMP)/dev
	$(BIN)/python -m benchmarks.report $(BENCH_ARGS)

# The pages of the reference are made from the code first.
docs: $(STAMP)/docs
	$(BIN)/python tools/docs_reference.py
	$(BIN)/python tools/docs_diagrams.py --check
	$(BIN)/zensical build --strict

proto: $(STAMP)/dev
	$(BIN)/python tools/gen_proto.py

clean:
	rm -rf $(VENV) build dist site .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find recinfer -name "*.so" -delete
