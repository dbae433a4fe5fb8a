# `make demo` and `make test` set up everything they need in .venv; PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PROMPT ?= The LORD is my
JOBS ?= auto

.PHONY: demo test test-slow lint bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/exl3-triton generate --prompt "$(PROMPT)" --max-tokens 64 --temperature 0 --echo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/benchmark --benchmark-only

clean:
	rm -rf $(VENV) build dist *.egg-info
