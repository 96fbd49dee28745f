# make venv       create .venv and install the pinned set
# make train      train four workers by Stochastic Gradient Push on real handwritten digits
# make compare    the exact recipes on the same data and budget, as a table and a picture
# make consensus  how fast workers agree, by every way to compress, in steps and in bits
# make test       the tests
# make quick      the tests of the algorithms, under a minute and without processes: for the loop of editing
# make gate       what .ci/run has no time for: make soak, and the library's tests with the oldest and the newest torch
# make soak       those that take longer: whole jobs that are killed, preempted and go on, examples, the table of faults
# make test-torch TORCH=2.15.0  the tests that touch the library, with that torch from .venv-torch-2.15.0, which it makes
#                 (by default without those that start processes; TESTS="-m 'not soak'" takes them in)
# make check      ruff and mypy
# make docs       the documentation as pages in build/docs; open build/docs/index.html
# make bench      step times beside hand-written loops, DistributedDataParallel and Decent-DP
# make faults     what every wrapper does when ranks are killed, stopped, fail or leave, as a table
# make chaos      eight workers train while a random fault hits them every two seconds, ten minutes, with a picture
# make cluster    methods side by side on an emulated cluster; needs root and iproute2
# make cluster-venv  create .venv-cluster with the other libraries that `make cluster` compares with
# make clean      remove .venv, .venv-cluster, .venv-torch-*, caches and builds (runs/ stays)
#
# train, compare and consensus write to runs/make/, anew each time. Every command creates .venv when it is missing.
# Another interpreter: make venv PYTHON=python3.12

PYTHON ?= python3
# Not taken from the environment, where job_scripts/launch.sh may be told of somebody else's.
VENV = .venv
PIP_INSTALL = $(VENV)/bin/python -m pip install --constraint constraints.txt
TORCHRUN = OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone
# Of these commands alone, which write it anew each time: no run of your own is ever there.
RUNS = runs/make
INSTALLED = $(VENV)/.installed
BENCH_INSTALLED = $(VENV)/.bench-installed
DOCS_INSTALLED = $(VENV)/.docs-installed
# The other libraries want versions of their own, so they stay out of the environment that everything else is tested in,
# and find there what suits them: a second copy of torch would be gigabytes.
CLUSTER_VENV = .venv-cluster
CLUSTER_INSTALLED = $(CLUSTER_VENV)/.installed
PURELIB = import sysconfig; print(sysconfig.get_path("purelib"))

.DELETE_ON_ERROR:
.PHONY: venv train compare consensus test quick gate soak test-torch smoke-torch venv-torch check docs bench faults chaos cluster cluster-venv clean

venv: $(INSTALLED)

# Debian's python3 has no ensurepip until python3-venv is installed, and a `venv` that fails for it leaves one
# without pip behind, which the second attempt completes.
$(INSTALLED): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON): got $$($(PYTHON) --version 2>&1), expected Python >= 3.10;" \
	       "name a newer one, e.g. make venv PYTHON=python3.11" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "$(PYTHON) cannot make virtual environments: installing python3-venv"; \
	    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv \
	      && $(PYTHON) -m venv $(VENV); \
	  else \
	    false; \
	  fi; } || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; install its venv module and try again" \
	       "(Debian, Ubuntu: sudo apt-get install python3-venv)" >&2; exit 1; }
	$(PIP_INSTALL) --editable '.[test,dev]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

train: $(INSTALLED)
	$(TORCHRUN) --nproc-per-node 4 -m train.gossip_sgd --recipe sgp --out-dir $(RUNS)/train --overwrite

compare: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m train.compare --out-dir $(RUNS)/compare --overwrite

consensus: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m train.consensus --out-dir $(RUNS)/consensus --overwrite

# Not --dist loadfile: where a process of pytest-xdist 3.8 ends in a test, it may wait for ever (its issue 1378).
# One process more than there are cores, up to four, since a third of the time of tests is waiting.
NUM_PROCESSES = $(shell $(VENV)/bin/python -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')
PYTEST_PARALLEL = -m pytest --numprocesses $(NUM_PROCESSES) --dist worksteal

# Compiled modules are kept, whatever the environment says: hundreds of processes would each compile them again.
test quick: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST_PARALLEL)

# Graphs, weights, codes, vectors, the contract of algorithms, laws of outer methods, and when rounds run.
QUICK_TESTS = $(addprefix tests/library/,test_layers.py test_schedule.py flat graph_manager mixing_manager compression \
  rounds/test_push_pull.py algorithms/test_choco.py algorithms/test_outer_laws.py wrappers/test_optimizer_steps.py)

quick: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python $(PYTEST_PARALLEL) --durations=5 -m "not soak and not e2e" $(QUICK_TESTS)

gate: $(INSTALLED)
	bash .ci/run gate

soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m soak

# The oldest torch that setup.py allows and the newest; each has a torchvision of its own.
TORCH = 2.15.0
TORCHVISION_OF_2.7.0 = 0.22.0
TORCHVISION_OF_2.15.0 = 0.29.2
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_INSTALLED = $(TORCH_VENV)/.installed
# What torch.distributed, autograd and networks decide; the rest reads files, starts SLURM or emulates clusters.
TORCH_TESTS = --ignore=tests/train --ignore=tests/visualization --ignore=tests/benchmarks \
  $(addprefix --ignore=tests/end_to_end/,test_job_scripts.py test_setup.py test_slurm.py)

TESTS = -m 'not soak and not e2e'
# Autograd, optimizers, compilation, collectives, messages, state: some sixty tests.
SMOKE_TESTS = $(addprefix tests/library/,wrappers/test_training_tools.py transport/test_process_group.py \
  transport/test_state_tree.py)
WITH_TORCH = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python

# What is not torch's own (pytest, mpirun, ...) is that of .venv.
test-torch: $(TORCH_INSTALLED)
	$(WITH_TORCH) $(PYTEST_PARALLEL) $(TORCH_TESTS) $(TESTS)

smoke-torch: $(TORCH_INSTALLED)
	$(WITH_TORCH) $(PYTEST_PARALLEL) $(TESTS) $(SMOKE_TESTS)

venv-torch: $(TORCH_INSTALLED)

$(TORCH_INSTALLED): $(INSTALLED)
	@test -n "$(TORCHVISION_OF_$(TORCH))" || { \
	  echo "error: got TORCH=$(TORCH), expected one whose torchvision the Makefile knows" \
	       "($(patsubst TORCHVISION_OF_%,%,$(filter TORCHVISION_OF_%,$(.VARIABLES)))); name it as well," \
	       "e.g. make test-torch TORCH=2.9.1 TORCHVISION_OF_2.9.1=0.24.1" >&2; exit 1; }
	$(VENV)/bin/python -m venv $(TORCH_VENV)
	$(VENV)/bin/python -c '$(PURELIB)' >"$$($(TORCH_VENV)/bin/python -c '$(PURELIB)')/beside.pth"
	$(TORCH_VENV)/bin/python -m pip install torch==$(TORCH) torchvision==$(TORCHVISION_OF_$(TORCH))
	@touch $@

check: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Warnings are errors: a link that leads nowhere, a name without a docstring, a page that no menu has. The variable silences
# an advertisement. docs/voice.py says which pages do not speak to their reader, benchmarks.claims which figures no row has.
docs: $(DOCS_INSTALLED)
	$(VENV)/bin/python docs/voice.py
	$(VENV)/bin/python -m benchmarks.claims --check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "open $(CURDIR)/build/docs/index.html"

bench: $(BENCH_INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.step_time

# Options: make faults FAULTS="--wrappers sgp --faults kill-odd"
faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.faults $(FAULTS)

# Options: make chaos CHAOS="--methods SGP 'MATCHA, ring' --seconds 60"
chaos: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.chaos --output $(RUNS)/chaos/chaos.csv \
	  --faults $(RUNS)/chaos/chaos_faults.csv $(CHAOS)
	$(VENV)/bin/python -m visualization.chaos $(RUNS)/chaos/chaos_faults.csv

# Options: make cluster CLUSTER="--hosts 4 --methods ddp sgp"
cluster: $(INSTALLED)
	$(if $(wildcard $(CLUSTER_INSTALLED)),$(CLUSTER_VENV),$(VENV))/bin/python -m benchmarks.cluster $(CLUSTER)

cluster-venv: $(CLUSTER_INSTALLED)

$(CLUSTER_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python -m venv $(CLUSTER_VENV)
	$(VENV)/bin/python -c '$(PURELIB)' >"$$($(CLUSTER_VENV)/bin/python -c '$(PURELIB)')/beside.pth"
	$(CLUSTER_VENV)/bin/python -m pip install --constraint constraints.txt --editable '.[test,cluster]'
	@touch $@

clean:
	rm -rf .venv .venv-cluster .venv-torch-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
