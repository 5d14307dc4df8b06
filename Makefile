# Every command of the course and of its developers is one word. `make` lists them.
PYTHON ?= python3
LAB_ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help lab test quick test-gpu setup notebooks lint clean

help: ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "%-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

lab: setup ## open the course in JupyterLab (LAB_ARGS="--no-browser --port=8899" are its arguments)
	$(BIN)/gpukern lab $(LAB_ARGS)

test: setup ## run all tests
	$(PYTEST) -n 2 --dist loadgroup

quick: setup ## run the tests of every day: not the slow ones, not those in a browser
	$(PYTEST) -n 2 --dist loadgroup -m "not slow and not browser"

test-gpu: setup ## run all tests on this machine's CUDA card, one after the other
	GPUKERN_DEVICE=cuda $(PYTEST)

setup: ## make .venv, or bring it up to date (PYTHON=python3.12 names the interpreter)
	@tools/setup.sh $(PYTHON)

notebooks: setup ## put all notebooks into canonical form and regenerate the exercises
	$(BIN)/python tools/notebooks.py --fix

lint: setup ## check style and form of the code and of the notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/notebooks.py --check

clean: ## remove the environment and what tests and tools leave behind
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info tests/artefacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
