# The one way in: `make demo` and `make test` work as the first command on a machine with Python 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.installed

.PHONY: install demo demo-serve test lint docs fuzz kill soak clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/mgtta demo

# A service whose cameras see changing weather; open the address that it prints
demo-serve: $(READY)
	$(BIN)/python examples/serve_weather.py

# One thread per process, since there is a process per core. With worksteal a file's tests stay in one process as long
# as both are busy, so that expensive fixtures are made once.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -q

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@.ci/audit $(BIN)

# The long tests: 100,000 hostile inputs, then the file readers under atheris if it can be installed; 200 kills; the soak
fuzz: $(READY)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt atheris || echo "atheris cannot be installed here"
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --cases 100000 $$($(BIN)/python -c "import atheris" 2>/dev/null && echo --atheris)

kill: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kill.py --kills 200 --out results

soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --out results

# The variable silences an advertisement of the theme.
docs: $(READY)
	$(BIN)/python docs/methods.py
	$(BIN)/python docs/commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
