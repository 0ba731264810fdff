# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make demo    install, then answer prompts, and a question about a picture, with the models inside the package
#   make test    install, then run the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PICTURE ?= jaxserve/demo_model/vision/example.png
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# Everything here runs on a CPU: compilers for other devices may be installed beside JAX and would look for theirs.
export JAX_PLATFORMS ?= cpu

# Tests start many processes, and each would compile the package's source again.
unexport PYTHONDONTWRITEBYTECODE

# What is given to pytest beside its choice of tests: `make test TESTS=--costs=costs.jsonl`.
TESTS ?=

.PHONY: help demo serve serve-tools test test-slow test-all test-long affected reach reference lint type fmt clean

help:
	@echo "make demo       answer a few prompts, one about a picture, with the demo models (installs first)"
	@echo "make serve      gRPC service with the demo model"
	@echo "make serve-tools  HTTP service with the demo model and its adapter that calls tools"
	@echo "make test       the quick tests (those of the web page need Chromium)"
	@echo "make test-slow  the slow ones, two to three times as long"
	@echo "make test-all   both in one run, which compiles what they share once: what CI runs"
	@echo "make test-long  those of tests/long.txt, which CI leaves out: before a release; goes on where it was ended"
	@echo "make affected   within three minutes, the tests that a change can break (BASE=REF, ALL=1)"
	@echo "make reference  the Python reference from docstrings, as HTML in build/reference"
	@echo "make lint type  ruff and the type checker"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(f"jaxserve needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}; try: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> updating pip, which says nothing while it unpacks packages before 25.1"
	@$(PIP) install --quiet --upgrade 'pip>=25.1' || echo "==> not updated: the next step may be silent for some ten seconds"

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> installing jaxserve (about 1.1 GB; a few minutes)"
	$(PIP) install --progress-bar on -c constraints.txt -e '.[cpu,vision]'
	@touch $@

# Python compiles the modules that are imported; pip would compile all, which takes a minute.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> installing jaxserve and what its tests need"
	$(PIP) install --progress-bar on --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@echo "==> answering prompts with the demo model"
	$(BIN)/python -m jaxserve.run --config configs/demo.yaml --chat \
	  --prompt "Hello! What can you do?" \
	  --prompt "What is 683+784?" \
	  --prompt 'Reverse "wagon".' \
	  --prompt "Tell me a story about a fox."
	@echo "==> asking about a picture, $(PICTURE)"
	$(BIN)/python -m jaxserve.run --model demo-vision --chat --picture $(PICTURE) --prompt "What is in this picture?"

serve: $(VENV)/.demo
	$(BIN)/python -m jaxserve.run --config configs/demo.yaml

serve-tools: $(VENV)/.demo
	$(BIN)/python -m jaxserve.run --config configs/demo-tools.yaml

test: $(VENV)/.dev
	@echo "==> running the tests"
	$(PYTEST) -m "not slow and not long" $(TESTS)

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not long" $(TESTS)

test-all: $(VENV)/.dev
	@echo "==> running all tests but those marked as long"
	$(PYTEST) -m "not long" --maxfail=10 --durations=40 $(TESTS)

test-long: $(VENV)/.dev
	$(PYTEST) -m long --resume --durations=40 $(TESTS)

affected: $(VENV)/.dev
	@$(BIN)/python scripts/affected_tests.py $(if $(BASE),--base $(BASE)) $(if $(ALL),--all)

# Which files each test reaches, for `make affected`: once in a while, since it takes twice as long as `make test-all`.
reach: $(VENV)/.dev
	JAXSERVE_TEST_CACHE=off $(PYTEST) -m "not long" -q --reach=tests/reach.json

reference: $(VENV)/.dev
	$(BIN)/python scripts/make_reference.py build/reference

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.dev
	$(BIN)/basedpyright --pythonpath $(BIN)/python

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
