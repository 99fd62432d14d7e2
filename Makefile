# make demo: set up and answer questions about a long document, dense beside sparse.  make test: set up and run all tests.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# The editable install lists the package's files, so it is made anew when one comes or goes.
STAMP := $(VENV)/.installed-$(shell find saccade -name '*.py' | sort | cksum | cut -d ' ' -f 1)

.PHONY: setup demo test lint types fuzz-server storm-server build clean

setup: $(STAMP)

# Where the machine's own Python already has torch and transformers (a prepared GPU host), they are used as they are.
$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"saccade needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.12") if v < (3, 11) else None'
	@test -x $(BIN)/python || { \
	  if $(PYTHON) -c 'import torch, transformers' 2>/dev/null; then flags=--system-site-packages; fi; \
	  $(PYTHON) -m venv $$flags $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "torch==$(TORCH)"
	@echo "installing saccade into $(VENV)"
	@$(BIN)/python -m pip uninstall -q -y saccade 2>/dev/null || true  # its distribution's name up to 0.1
	@$(BIN)/python -m pip install -q -e '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@

demo: setup
	@$(BIN)/saccade demo $(if $(TEXT),--text "$(TEXT)")

test: setup
	@$(BIN)/python -m pytest -n auto --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

fuzz-server: setup  # malformed requests against a server of its own; a quarter of an hour for 100,000
	$(BIN)/python tests/server_fuzz.py $(or $(COUNT),100000)

storm-server: setup  # many requests at once, a tenth of which go away; every answer is compared with the library's
	$(BIN)/python tests/server_storm.py $(or $(SHORT),100000) $(or $(STREAMED),10000)

build: setup
	$(BIN)/python -m pip wheel -q --no-deps -w build/wheel .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
