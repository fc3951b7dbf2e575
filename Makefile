# Two commands: `make demo` and `make test`. Each sets up all it needs, and is quick when everything is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip takes whatever build its index offers, and keeps one that is installed; name another to override it.
TORCH ?= torch>=2.11,<2.14

.PHONY: demo test lint format setup clean

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

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache
