# `make demo` and `make test` need nothing but python3: each makes .venv first if it has to.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check format bench alone sizes schedules goldens freeze coverage verify fuzz faults clean

help:  ## say what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

install: $(STAMP)  ## make .venv and install Shardwise in it, with everything needed to work on it

demo: $(STAMP)  ## run examples/demo.py
	$(BIN)/python examples/demo.py

# One thread each, so that test workers and the ranks they start do not fight for cores.
# What memory holds before it is written to is not zero, as it often happens to be.
test: export OMP_NUM_THREADS := 1
test: export MALLOC_PERTURB_ := 165
# Every rank is a process: each reads what the first has compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(STAMP)  ## check everything: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(STAMP)  ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure overhead and planning (benchmarks/)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/planning.py

alone: $(STAMP)  ## measure what shardwise costs plain programs: imports, and torch's own operations beside it (two minutes)
	$(BIN)/python benchmarks/import_side_effects.py --write

sizes: $(STAMP)  ## measure a tensor-parallel block at real sizes against one written by hand (needs a GPU; three minutes)
	$(BIN)/python benchmarks/real_sizes.py --write

schedules: export OMP_NUM_THREADS := 1
schedules: $(STAMP)  ## compare what programs communicate with the best schedules known (a few minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,models]'
	$(BIN)/python benchmarks/schedules.py --write

goldens: export OMP_NUM_THREADS := 1
goldens: $(STAMP)  ## compare layouts, collectives, bytes and rules with what is frozen in benchmarks/goldens (three minutes)
	$(BIN)/python benchmarks/goldens.py

freeze: export OMP_NUM_THREADS := 1
freeze: $(STAMP)  ## freeze them as they are now: the commit says what changed for users, and why
	$(BIN)/python benchmarks/goldens.py --freeze

coverage: export OMP_NUM_THREADS := 1
coverage: $(STAMP)  ## run every operator of torch on DTensors in all layouts against plain torch (a quarter of an hour)
	$(BIN)/shardwise coverage --json .coverage-run.json --resume --write-report benchmarks/results/coverage-$$(date +%F).md

fuzz: export OMP_NUM_THREADS := 1
fuzz: $(STAMP)  ## run 20,000 random programs on the simulator and 4,000 on real ranks against one device (an hour)
	$(BIN)/shardwise fuzz --programs 20000 --gloo 5400 --json .fuzz-run.json --resume --write-report benchmarks/results/fuzz-$$(date +%F).md

verify: export OMP_NUM_THREADS := 1
verify: $(STAMP)  ## judge every sharding rule by brute force, and write docs/rules.md (three minutes)
	$(BIN)/shardwise verify --write-docs docs/rules.md --write-report benchmarks/results/verify-$$(date +%F).md

faults: $(STAMP)  ## kill ranks, fill disks and fail renames at 200 moments of saving (two minutes)
	$(BIN)/python benchmarks/checkpoint_faults.py --write

clean:  ## remove .venv and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Shardwise needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and by its exact version, so that nothing else decides which build of it is taken.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
