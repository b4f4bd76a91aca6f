# Every target does all of its own set-up, in .venv of this checkout, and is quick when run again.
# It needs Python 3.11 to 3.13 and make. Options for pip: make demo PIP_ARGS="--index-url ..."; another Python: PYTHON=python3.12

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

# Idle threads sleep instead of spinning: on a machine that does other work too this is many times faster (docs/cli.md).
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-gpu lint clean

demo: $(VENV)/ready-demo
	$(RUN) -m narrowgate compare demo/model --plot compare.png
	$(RUN) -m narrowgate generate demo/model --scheme mxfp4 --prompt "class Stack:" --echo --max-new-tokens 120 \
		--temperature 0.7 --top-p 0.95 --seed 1

# A process a core, each with one thread: two would wait for each other.
test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "not gpu" -n auto --dist worksteal

test-gpu: $(VENV)/ready-dev
	$(RUN) -m pytest -q -m gpu

lint: $(VENV)/ready-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build *.egg-info

# torch first and pinned, from whatever index pip is set up for; on Linux that build carries CUDA (README).
$(VENV)/ready-torch:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11, 3.12 or 3.13 on the PATH, or PYTHON=/path/to/it" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 numpy
	@touch $@

$(VENV)/ready-demo: $(VENV)/ready-torch pyproject.toml
	$(PIP) torch==2.13.0 --editable '.[plot]'
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready-torch pyproject.toml
	$(PIP) torch==2.13.0 --editable '.[dev]'
	@touch $@ $(VENV)/ready-demo
