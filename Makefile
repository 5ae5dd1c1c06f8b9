# cowrec: `make demo` shows it at work, `make test` checks it; both set up .venv first. See `make help`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# No warning about conflicts: torchrec's metadata misses fbgemm-gpu wherever the CPU build stands in for it.
PIP := $(BIN)/python -m pip install -qq --no-warn-conflicts --constraint scripts/constraints.txt
PACKAGES := trainer models sparse_opt data_pipeline
SOURCES := $(PACKAGES) scripts tests

.PHONY: help demo test setup clean

help:
	@echo 'make demo     set up .venv if needed, then train a small model end to end and show the result'
	@echo 'make test     set up .venv if needed, then run ruff, mypy and pytest'
	@echo 'make setup    only set up .venv (PYTHON=python3.12 chooses the interpreter)'
	@echo 'make clean    remove .venv, build leftovers and caches; your runs and data stay'

demo: $(READY)
	@$(BIN)/python scripts/demo.py

# mypy does not follow editable installs, so it is shown the import name cowrec as a folder of links.
test: $(READY)
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo 'not formatted; run: $(BIN)/ruff format $(SOURCES)'; exit 1; }
	@mkdir -p build/typed/cowrec
	@for package in $(PACKAGES); do ln -sfn ../../../$$package build/typed/cowrec/$$package; done
	@ln -sfn ../../scripts build/typed/scripts
	@MYPYPATH=build/typed $(BIN)/mypy $(addprefix -p cowrec.,$(PACKAGES)) -p scripts
	@$(BIN)/pytest -q --numprocesses 2 --dist loadfile

setup: $(READY)

# Each line does nothing when its work is done already, and the stamp comes last: a set-up that was cut short goes on
# where it stopped. The CUDA build of fbgemm needs both a GPU and a torch built for CUDA.
$(READY): pyproject.toml scripts/constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo 'cowrec needs Python 3.11 or 3.12; there is no $(PYTHON) here, choose one with: make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and "cowrec needs Python 3.11 or 3.12, but $(PYTHON) is %d.%d; choose one with: make PYTHON=python3.11" % v)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'setup 1/4: $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'setup 2/4: torch (the largest download)'
	@$(PIP) torch
	@fbgemm=fbgemm-gpu-cpu; \
	if nvidia-smi >/dev/null 2>&1 && $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; \
	then fbgemm=fbgemm-gpu; fi; \
	echo "setup 3/4: $$fbgemm and torchrec"; \
	$(PIP) --no-deps $$fbgemm torchrec
	@echo 'setup 4/4: cowrec and its other dependencies'
	@$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
