# cowrec: `make demo` shows it at work, `make test` checks it; both set up .venv first. See `make help`.

PYTHON ?= python3
VENV := .venv
# test-python-PYTHON-torch-TORCH for each line of MATCHED_SETS and each of its Pythons, the default set first.
MATRIX := $(shell awk -F'"' '/^    MatchedSet."/ { split($$2, torch, "."); split($$8, pythons, " "); \
	for (i = 1; i in pythons; i++) print "test-python-" pythons[i] "-torch-" torch[1] "." torch[2] }' sparse_opt/versions.py)
# torch of the matched set to install: scripts/constraints_torch_$(TORCH).txt.
TORCH := $(lastword $(subst -, ,$(firstword $(MATRIX))))
# Tests to run; all by default.
TESTS :=

BIN := $(VENV)/bin
READY := $(VENV)/.ready-torch-$(TORCH)
CONSTRAINTS := scripts/constraints.txt scripts/constraints_torch_$(TORCH).txt
# No warning about conflicts: torchrec's metadata misses fbgemm-gpu wherever the CPU build stands in for it.
PIP := $(BIN)/python -m pip install -qq --no-warn-conflicts $(addprefix --constraint ,$(CONSTRAINTS))
# The tests start hundreds of processes: none compiles modules again, even where the environment forbids to keep them.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q --numprocesses 3 --dist worksteal
PACKAGES := trainer models sparse_opt data_pipeline
SOURCES := $(PACKAGES) $(wildcard cowrec/*.py) scripts tests docs
LINT := ruff-check ruff-format mypy codespell links workflows

.PHONY: help demo test test-all thorough lint $(LINT) docs dist suite coverage test-matrix $(MATRIX) test-without-gpu setup clean

help:
	@echo 'make demo         set up .venv if needed, then train a small model end to end and show the result'
	@echo 'make test         set up .venv if needed, then run the linters and the first two tiers of tests'
	@echo 'make test-all     the same with the third tier and the other Pythons and matched sets'
	@echo 'make thorough     only pytest, with the third tier'
	@echo 'make lint         only the linters, as pre-commit runs them: $(LINT)'
	@echo 'make suite        only pytest; TESTS=tests/models chooses tests, here and below'
	@echo 'make coverage     the same with a coverage report'
	@echo 'make test-matrix  pytest under all Pythons and matched sets, each in build/venv-*; one of them:'
	@for entry in $(MATRIX); do echo "                  make $$entry"; done
	@echo 'make test-without-gpu  the tests of the CUDA path that need no GPU, under the first and the last matched set'
	@echo 'make docs         build the documentation as a site in build/site; make test-all does so too'
	@echo 'make dist         build wheel and sdist in build/dist, and try the wheel in a bare environment'
	@echo 'make setup        only set up .venv (PYTHON=python3.12 chooses the interpreter)'
	@echo 'make clean        remove .venv, build leftovers and caches; your runs and data stay'

demo: $(READY)
	@$(BIN)/cowrec demo

# Linters and tests side by side: mypy takes a core for a minute or two.
test: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 lint suite

# The third tier: kills, faults of hosts and servers, scripts, documents, long grids, and the first two tiers in the matrix's other environments.
test-all: lint thorough
	@$(MAKE) --no-print-directory $(filter-out test-python-$(shell \
		$(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')-torch-$(TORCH),$(MATRIX))

thorough: $(READY)
	@$(PYTEST) --thorough $(TESTS)

lint: $(LINT)

ruff-check: $(READY)
	@$(BIN)/ruff check --quiet $(SOURCES)

ruff-format: $(READY)
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo 'not formatted; run: $(BIN)/ruff format $(SOURCES)'; exit 1; }

mypy: $(READY)
	@$(BIN)/mypy -p cowrec -p scripts

codespell: $(READY)
	@$(BIN)/codespell $(SOURCES) .github *.md *.toml *.cff Makefile

links: $(READY)
	@$(BIN)/rumdl check --quiet --no-cache *.md docs results .github

workflows: $(READY)
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

suite: $(READY)
	@$(PYTEST) $(TESTS)

coverage: $(READY)
	@$(PYTEST) $(TESTS) --cov --cov-report=term --cov-report=html

test-matrix: $(MATRIX)

# test-python-3.12-torch-2.11 is the suite with TORCH=2.11 in an environment of its own.
$(MATRIX): test-%:
	@echo '$*'
	@$(MAKE) --no-print-directory suite VENV=build/venv-$* \
		PYTHON=python$(word 2,$(subst -, ,$*)) TORCH=$(word 4,$(subst -, ,$*))

# The same tests as in make test, and those of the oldest matched set, whose Triton is the oldest.
test-without-gpu:
	@$(MAKE) --no-print-directory suite TESTS=tests/without_gpu
	@$(MAKE) --no-print-directory $(lastword $(MATRIX)) TESTS=tests/without_gpu

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would drop warnings, which are then no errors
	@echo build/site/index.html

dist: $(READY)
	@rm -rf build/dist
	@$(BIN)/python -m build --outdir build/dist .
	@$(BIN)/twine check --strict build/dist/*
	@bash scripts/check_wheel.sh build/dist/*.whl $(abspath $(BIN))/python

setup: $(READY)

# Each line does nothing when its work is done already, and the stamp comes last: a set-up that was cut short goes on
# where it stopped. The CUDA build of fbgemm needs both a GPU and a torch built for CUDA.
$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'cowrec needs Python 3.11 or newer, and $(PYTHON) is older or not there; choose one with: make PYTHON=python3.12'; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'setup 1/4: $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $(VENV)/.ready*
	@echo 'setup 2/4: torch (the largest download)'
	@$(PIP) torch
	@fbgemm=fbgemm-gpu-cpu; \
	if nvidia-smi >/dev/null 2>&1; then \
		if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then fbgemm=fbgemm-gpu; \
		else echo "there is a GPU, but pip's index has a torch for CPU alone: nothing will run on the GPU" >&2; fi; \
	fi; \
	echo "setup 3/4: $$fbgemm and torchrec"; \
	$(PIP) --no-deps $$fbgemm torchrec
	@echo 'setup 4/4: cowrec and its other dependencies'
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) cowrec -name __pycache__ -type d -prune -exec rm -rf {} +
