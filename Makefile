# make demo and make test need only Python >= 3.11; they set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint docs mutation clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("logitless needs Python 3.11 or newer; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/logitless train recipes/quickstart.yaml --numbered

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not multi_gpu'

docs: .venv/.installed
	$(BIN)/python -m logitless.train.document
	$(BIN)/python -m logitless.rewards.instructions.document
	$(BIN)/python -m logitless.bench.objectives_document

mutation: .venv/.installed
	$(BIN)/python -m tests.mutation

clean:
	rm -rf .venv build dist
