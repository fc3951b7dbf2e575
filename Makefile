# Two commands: `make demo` and `make test`. Each sets up all it needs, and is quick when everything is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip takes whatever build its index offers, and keeps one that is installed; name another to override it.
TORCH ?= torch>=2.11,<2.14

.PHONY: demo test tools lint format setup clean prove-tasks test-environments

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing glm5 and its development tools into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/glm5 demo $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# What tests need beside. Where it cannot be installed, those that need it skip and say so. A torch for GPUs brings the
# Triton that it wants; beside one for CPUs, operators are tested in the interpreter of this Triton.
tools: setup
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'triton==3.6.0' || \
	  echo "tests of Triton's operators will skip: triton 3.6.0 cannot be installed"
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  { apt-get install -y -qq bubblewrap || { apt-get update -qq && apt-get install -y -qq bubblewrap; }; } >/dev/null 2>&1; } || \
	  echo "tests of the sandbox will skip: bubblewrap is missing (Debian: sudo apt-get install bubblewrap)"

test: lint tools
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Harbor itself attempts our terminal tasks: docs/sandbox.md. Needs Podman and Python 3.12; a quarter of an hour each way.
prove-tasks: setup
	@$(BIN)/python benchmarks/harbor_tasks.py $(ARGS)

# The adapter for environments of the package verifiers, with that package, which wants an older openai than the tests.
test-environments: .venv-environments/.installed
	@PYTHONPATH=src .venv-environments/bin/python -m pytest tests/agents/test_environments.py $(ARGS)

.venv-environments/.installed:
	@$(PYTHON) -m venv .venv-environments
	@.venv-environments/bin/python -m pip install --quiet --disable-pip-version-check \
	  'verifiers==0.4.0' 'pytest>=8' 'pytest-timeout>=2.3' 'starlette>=0.40' 'uvicorn>=0.34' 'httpx>=0.27'
	@touch $@

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache
