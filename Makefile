# make train   set up everything (virtual environment, installation), train for real once, evaluate, and write a report
# make test    the same setup plus what the tests need, then run the tests, in parallel (FULL=1: also longer ones that
#              show a promise, as .ci/run does; SLOW=1: all, as each night)
# make lint    check formatting, lint, types
# make docs    build the documentation as a site, in site/
# make bench   compare the trainer with others, half an hour; writes docs/benchmarks.md (ARGS: --data-root DIR)
# make siege   attack it at random for an hour, in three ways at once (SIEGE_SECONDS=60 SIEGE_SEED=7)
# make gpu     on a machine with a GPU: try it, measure its speed, run the tests for it (ARGS="--seconds 480 --skip-tests")
PYTHON ?= python3
# Of the tests: many of them wait, so more than there are processors; each needs a gigabyte.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 2 ? 2 : n < 4 ? n + 1 : 4)))
# Or each of the many processes of the tests would compile the whole package and all tests anew.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# uv installs in half a minute what takes pip three. But it does not read pip's settings. So pip installs where these name
# another index, and where uv fails: then pip tries the same, and says what is wrong.
UV := $(BIN)/uv pip install --python $(BIN)/python --cache-dir $(VENV)/cache --system-certs --quiet -c constraints.txt
install = { ! $(BIN)/python -m pip config list | grep -qE '\.(index-url|no-index)=' && $(UV) $(1) 2>/dev/null; } || $(PIP) $(1)

.PHONY: train test siege lint ruff types test-types docs bench gpu clean

train: $(VENV)/.installed
	@set -x; run=runs/digits/$$(date +%Y-%m-%d_%H-%M-%S) && \
	$(BIN)/accel-train train digits --output-dir $$run && $(BIN)/accel-train evaluate $$run && \
	$(BIN)/accel-train report $$run

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(SLOW),-m "slow or not slow",$(if $(FULL),-m "not slow")) $(ARGS)

siege: $(VENV)/.installed-test
	SIEGE_SECONDS=$${SIEGE_SECONDS:-3600} $(BIN)/python -m pytest -n 3 --dist loadfile -m "ci or slow" tests/siege $(ARGS)

lint: ruff types test-types

ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy

test-types: $(VENV)/.installed-dev
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests

# No page may load anything from elsewhere.
docs: $(VENV)/.installed-docs docs/example_report.html
	$(BIN)/python tests/reference.py --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	! grep -rnoE '<(script|link|img|iframe)[^>]* (src|href)="https?:[^"]*"' site --include='*.html'

docs/example_report.html: | $(VENV)/.installed
	$(BIN)/python benchmarks/example_report.py

bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/compare.py $(ARGS)
	$(BIN)/python benchmarks/input.py $(ARGS)
	$(BIN)/python benchmarks/waiting.py
	$(BIN)/python benchmarks/scaling.py $(ARGS)

# Where there is no virtual environment, a Python that has the packages will do: borrowed machines are often offline.
gpu:
	@if [ ! -x $(BIN)/python ] && $(PYTHON) -c "import torch, torchvision, accelerate, timm, shtab, rich, pytest, hypothesis"; \
	then $(PYTHON) benchmarks/gpu.py $(ARGS); \
	else $(MAKE) --no-print-directory $(VENV)/.installed-bench $(VENV)/.installed-test && $(BIN)/python benchmarks/gpu.py $(ARGS); fi

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || echo "Creating $(VENV) and installing into it: this takes a minute or more the first time."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --only-binary uv uv || true
	@$(call install,-e '.[report]')
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(call install,-e '.[test]')
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@$(call install,-e '.[bench]')
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(call install,-e '.[docs]')
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(call install,-e '.[dev]')
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f docs/options.md docs/recipes.md docs/example_report.html
