# People and CI use the same targets. Variables, each with its default:
#   PYTHON=python3        the interpreter the environment is made with (3.11, 3.12 or 3.13)
#   VENV=.venv            where the environment lives
#   TORCH=torch==2.13.0   the PyTorch to install; this version is the one the tests run with
#   TORCH_INDEX=          a package index to take PyTorch from (see the README), else pip's own
#   MODEL=                a bundle or checkpoint; left out, the packaged model
#   PROMPT=…              what `make run` asks; RUN_ARGS adds options of `kittiwake run`
#   INSTALL_ARGS=         options of `pip install`
#   PYTEST_ARGS=          options of pytest, such as "-m 'not slow'"
#   PROCESSES=2           how many processes share the test files, and the checking of types
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
MODEL ?=
PROMPT ?= It was a dark night, and the old house by the sea
RUN_ARGS ?=
INSTALL_ARGS ?=
PYTEST_ARGS ?=
PROCESSES ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PROMPT

.DEFAULT_GOAL := help
.PHONY: help run test check fmt verify bench wheel clean FORCE
# A stamp whose recipe failed must not stand.
.DELETE_ON_ERROR:

help:
	@echo "make run      install what is missing, then let the packaged model go on from PROMPT"
	@echo "make test     the tests            make check   ruff and mypy"
	@echo "make fmt      format the code      make verify  prove the law of exactness on MODEL"
	@echo "make bench    time MODEL           make wheel   build the wheel into dist/"
	@echo "make clean    drop what was built; the environment $(VENV) too"

run: $(VENV)/.installed
	@$(BIN)/kittiwake run $(MODEL) --prompt "$$PROMPT" --echo --max-tokens 200 $(RUN_ARGS)

verify: $(VENV)/.installed
	@$(BIN)/kittiwake verify $(MODEL)

bench: $(VENV)/.installed
	@$(BIN)/kittiwake bench $(MODEL)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# All three run, so that one report shows everything there is to mend.
check: $(VENV)/.installed-dev
	@failed=0; \
	$(BIN)/ruff check . || failed=1; \
	$(BIN)/ruff format --check . || failed=1; \
	$(BIN)/mypy --strict --num-workers $(PROCESSES) kittiwake || failed=1; \
	exit $$failed

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.installed-dev
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "error: $(PYTHON) is not on the path"; echo "hint: make run PYTHON=/path/to/python3.11"; exit 2; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: kittiwake runs on Python 3.11, 3.12 and 3.13; $(PYTHON) is $$($(PYTHON) -V 2>&1)"; \
	    echo "hint: make run PYTHON=python3.11"; exit 2; } >&2
	@echo "making the environment $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: $(PYTHON) cannot make a virtual environment"; \
	    echo "hint: install its venv module (Debian and Ubuntu: the package python3-venv), then run make again"; \
	    rm -rf $(VENV); exit 2; } >&2

# Holds the PyTorch asked for and is touched only when that changes, so another TORCH or TORCH_INDEX installs again.
$(VENV)/.torch: FORCE | $(BIN)/python
	@echo '$(TORCH) $(TORCH_INDEX)' | cmp -s - $@ || echo '$(TORCH) $(TORCH_INDEX)' > $@

# PyTorch first and by itself: the package's own range is then satisfied and takes nothing else.
define install
	@echo "installing $(TORCH) and kittiwake into $(VENV); the first time this takes minutes"
	$(PIP) install $(INSTALL_ARGS) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	$(PIP) install $(INSTALL_ARGS) --quiet --editable '$(WHAT)'
endef
WHAT := .
$(VENV)/.installed-dev: WHAT := .[dev,plots]

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(install)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(install)
	@touch $(VENV)/.installed $@
