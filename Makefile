# Two commands need nothing but Python (3.10 to 3.13) and make: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# CPU threads of one test process; two processes run beside each other.
JOBS ?= 2

.PHONY: run test lint types unit overhead docs gpu clean

run: $(VENV)/installed
	$(BIN)/dsa-dispatch run quickstart

test: lint types unit overhead

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

# In the order of the folders: by default files of one long test would come last, and one process would wait.
unit: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --ignore tests/overhead

# Alone, since it measures time.
overhead: $(VENV)/installed-dev
	$(BIN)/pytest tests/overhead -s

# On a machine with a GPU; PARTS="tests conformance sanitize bench" or some of them. Results go to $(OUT), the table to the
# end of the output. Where there is no package index: make gpu GPU_PYTHON=python3 WHEEL=dsa_dispatch-...whl, with what
# the library needs on PYTHONPATH.
PARTS ?= tests conformance sanitize bench
OUT ?= build/gpu
GPU_PYTHON ?= $(BIN)/python

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/installed-dev)
	$(GPU_PYTHON) benchmarks/gpu.py --out $(OUT) $(if $(WHEEL),--wheel $(WHEEL)) $(PARTS)

# Generated documentation; the tests fail while it is stale.
docs: $(VENV)/installed
	$(BIN)/dsa-dispatch pages docs

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing torch and what the library needs into $(VENV), once; this may take a few minutes"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(VENV)/installed | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,triton]'
	touch $@
