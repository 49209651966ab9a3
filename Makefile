# make install | demo | rag | agent | check | fix | test | test-backends | eval | clean.  People, agents and CI use the same commands.
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
SERVERS := .venvs
METHODS := plain,hf,hf-lookup,economize,metasd

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := install
.PHONY: install demo rag agent check fix test backends test-backends eval clean

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

# Applications on the embedded model; their folders' READMEs say more.
rag: install
	$(BIN)/python -m integrations.rag.app

agent: install
	$(BIN)/python -m integrations.langgraph_agent.app

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict metasd_langchain $(wildcard evaluators integrations)
	$(BIN)/lint-imports --no-logo

fix: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test: install
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)

# Servers that traces are shown in, each in a venv of its own beside ours: 1.7 GB, for tests and a look, needed by nothing else.
# Phoenix is under the Elastic License 2.0, MLflow and Prometheus are under Apache 2.0.
backends: $(SERVERS)/phoenix/.installed $(SERVERS)/mlflow/.installed
	@integrations/system_packages.sh prometheus chromium

$(SERVERS)/phoenix/.installed: PACKAGE := arize-phoenix
$(SERVERS)/mlflow/.installed: PACKAGE := mlflow
$(SERVERS)/%/.installed: integrations/%/constraints.txt | $(STAMP)
	@echo "installing $(PACKAGE) into $(SERVERS)/$*; this takes minutes"
	$(BIN)/python -m venv --clear $(SERVERS)/$*
	$(SERVERS)/$*/bin/python -m pip install --quiet -c $< $(PACKAGE)
	@touch $@

# Starts each, sends it a run, reads it back, stops it; also the trace page in Chromium.
test-backends: install backends
	METASD_BACKENDS=1 $(BIN)/python -m pytest -q $(PYTEST_FLAGS) \
		$(sort $(wildcard tests/apps/test_backends*.py tests/apps/test_page*.py))
	@echo "test-backends: green with Phoenix, MLflow, Prometheus and Chromium; all of them are stopped"

# As in the README's table: long answers on mixed prompts, then Spec-Bench with its own ends.
eval: install
	@mkdir -p out
	$(BIN)/python -m evaluators speed --prompts "$(METASD_DATA)/peer_prompts.jsonl" --methods $(METHODS) \
		--max-tokens 128 --ignore-eos --cold --json out/peer_prompts.json $(EVAL_FLAGS)
	$(BIN)/python -m evaluators speed --prompts "$(METASD_DATA)/spec_bench_dev.jsonl" --methods $(METHODS) \
		--limit 48 --max-tokens 128 --cold --json out/spec_bench_dev.json $(EVAL_FLAGS)
	$(BIN)/python -m evaluators constrained --schemas 200 --json out/constrained.json $(EVAL_FLAGS)

# Keeps .venv and .venvs; `rm -r .venv .venvs` starts those afresh.
clean:
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -not -path "./$(SERVERS)/*" -prune -exec rm -rf {} +
