# The one way in: `make demo` and `make test` work as the first command on a machine with Python 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.installed

.PHONY: install demo test lint docs clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/mgtta demo

# one thread a process: two processes with two threads each would fight for two cores
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The variable silences an advertisement of the theme's.
docs: $(READY)
	$(BIN)/python docs/methods.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
