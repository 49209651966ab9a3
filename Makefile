# make install | demo | check | fix | test | eval | clean.  People, agents and CI use the same commands.
#
#   PYTHON=python3.12      which Python makes .venv (3.11 or newer; .venv is kept once made)
#   METASD_DATA=DIR        prompts for `make eval`
#   EVAL_FLAGS=--quick     more options for `make eval`
#   PYTEST_FLAGS='-k span' more options for `make test`

PYTHON ?= python3
METASD_DATA ?= ../shared/data
EVAL_FLAGS ?=
PYTEST_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
METHODS := plain,hf,hf-lookup,economize,metasd

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := install
.PHONY: install demo check fix test eval clean

install: $(STAMP)

# Old pips do not know dependency groups, so pip comes first. torch comes second and with an exact version: a range that
# pip resolves by itself may bring a build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=..."; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time this takes minutes"
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[all]" --group test --group check --group eval --group apps
	@touch $@

demo: install
	$(BIN)/metasd demo

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict metasd_langchain $(wildcard evaluators)
	$(BIN)/lint-imports --no-logo

fix: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: install
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

# As in the README's table: long answers on mixed prompts, then Spec-Bench with its own ends.
eval: install
	@mkdir -p out
	$(BIN)/python -m evaluators speed --prompts "$(METASD_DATA)/peer_prompts.jsonl" --methods $(METHODS) \
		--max-tokens 128 --ignore-eos --cold --json out/peer_prompts.json $(EVAL_FLAGS)
	$(BIN)/python -m evaluators speed --prompts "$(METASD_DATA)/spec_bench_dev.jsonl" --methods $(METHODS) \
		--limit 48 --max-tokens 128 --cold --json out/spec_bench_dev.json $(EVAL_FLAGS)

# Keeps .venv; `rm -r .venv` starts that afresh.
clean:
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
