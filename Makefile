# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Many tests wait for schedulers and clocks: several side by side, even on two cores (tests/conftest.py orders them).
TESTERS ?= 4

.PHONY: demo test check benchmark clean

demo: $(READY)
	$(BIN)/fedqueue demo

# Lint, types, tests. Tests that need data files say so when they are skipped (see FEDQUEUE_DATA in the README).
test: check
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadscope --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmark: $(READY)
	$(BIN)/python -m benchmarks --json benchmarks/results.json

# Every file that is installed has one of the hashes in requirements.lock, which `python supply/lock.py` makes.
$(READY): pyproject.toml reproduction/pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable . --editable reproduction
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
