# `make demo` and `make test` do all their own set-up: a virtual environment with pinned requirements in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Real processes are mostly waited for: three tests at a time keep two cores busy. The faults of the chaos suite are timed, and
# run alone.
SIDE_BY_SIDE := --numprocesses 3 --dist worksteal

# Where RESULTS names a folder, it keeps how long each test took: a file for each call of pytest.
PYTEST = $(BIN)/python -m pytest -q $(if $(RESULTS),--durations 10 --durations-min 1 --junitxml $(RESULTS)/$$$$.xml)
# MEASURED=1 leaves out those that `make coverage` has run.
UNIT_TESTS = $(PYTEST) --numprocesses 2 --dist worksteal tests/unit $(if $(MEASURED),$(CORE_ROOMS:%=--ignore tests/unit/%))
# The slice of the integration tests that `make test` runs: each process and each way of the bytes, and a kill of each.
SLICE := channel/test_channel channel/operations/test_channel_operations channel/versions/test_mapping \
	control/test_control_socket coordinator/test_coordinator coordinator/test_hosts sidecar/test_sidecar \
	supervisor/shim/test_frames_of_pairs supervisor/shim/test_supervisor_torchrun supervisor/test_end_to_end \
	supervisor/test_supervisor_kills supervisor/test_supervisor_lifecycle
# The rooms whose unit tests reach the core; all others reach nothing more of it.
CORE_ROOMS := core testing control supervisor/fleet supervisor/shim

# Measured in one process each, not in all that tests start; a test may fork, so each process has a file of its own.
COVERAGE := $(VENV)/coverage
COVERED = $(BIN)/coverage run --parallel-mode --data-file $(COVERAGE)/data
COVERAGE_REACHED := 98

# With the peers' environment, which sees .venv too, the benchmarks have all that they compare with.
BENCH_PYTHON = $(or $(wildcard $(VENV)/peers/bin/python),$(BIN)/python)

# The GPU tests run on the machine's own Python, which has torch for its GPU, with the project's pinned packages beside it.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS ?= gpu-wheels
GPU_SITE := .gpu-site
GPU_RUN = PYTHONPATH=$(CURDIR)/$(GPU_SITE):$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON)
# No plugins but those named: an image has many. Its warnings are shown, and do not fail a test. No test of that name: no failure.
GPU_PYTEST = GPU_TESTS=real PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_RUN) -m pytest -q -p anyio -p pytest_timeout -p xdist \
	-W default --durations 10
GPU_DONE := || test $$? -eq 5
# These count the memory of the GPU, so nobody else may use it; all others run side by side.
GPU_ALONE := tests/gpu/test_faults.py tests/gpu/test_founding.py tests/gpu/test_owners.py
GPU_SIDE_BY_SIDE ?= 3

# Without compiled files each of the many processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-cluster demo-archive test slice test-all test-turn test-lowest test-versions unit integration properties chaos \
	chaos-links chaos-nodes chaos-tree scene coverage gpu gpu-wheels environments test-engines field demo-llm check format \
	bench test-browser screenshots bench-engines bench-peers diagrams docs-reference clean board dist docs engine-campaign

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "replicas needs Python 3.11 or newer, and '$(PYTHON)' is not: name one with make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "'$(PYTHON)' has no venv module: install it (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt hatch_build.py replicas/weights/copies/streaming.c | $(BIN)/python
	@echo "Installing replicas and the demo's requirements into $(VENV) (torch is large: a minute or more)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt hatch_build.py replicas/weights/copies/streaming.c | $(BIN)/python
	@echo "Installing replicas and its development requirements into $(VENV) (torch is large: a minute or more)"
	@$(PIP) --editable '.[demo,dev]'
	@touch $@ $(VENV)/.demo

$(BIN)/promtool $(BIN)/prometheus: | $(BIN)/python
	@if command -v $(@F) > /dev/null; then ln -s "$$(command -v $(@F))" $@; else tests/support/fetch_prometheus.sh $(BIN); fi

$(VENV)/.docs: pyproject.toml constraints.txt docs/constraints.txt | $(VENV)/.dev
	@echo "Installing what builds the handbook into $(VENV)"
	@$(PIP) --constraint docs/constraints.txt --editable '.[docs]'
	@touch $@

demo: $(VENV)/.demo ## run a small RLHF loop: one trainer, two rollout replicas, one of them killed on the way
	@$(BIN)/python examples/grpo/demo.py $(ARGS)

demo-cluster: $(VENV)/.demo ## three machines (namespaces, as root), a killed supervisor, a machine that is switched off: a minute
	@$(BIN)/python examples/cluster/cluster_demo.py $(ARGS)

demo-archive: $(VENV)/.demo ## train at one site, evaluate at another, an archive between them whose writer is killed: twenty seconds
	@$(BIN)/python examples/two_sites/sites_demo.py $(ARGS)

test: $(VENV)/.dev ## run the fast tests, a slice of the real processes, and some rounds of chaos: some 8 minutes
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory slice

slice: $(VENV)/.dev
	@$(PYTEST) $(SIDE_BY_SIDE) $(SLICE:%=tests/integration/%.py)
	@CHAOS_WORLD=exec CHAOS_SECONDS=8 $(PYTEST) tests/chaos/test_chaos.py tests/chaos/test_supervisor.py

test-all: $(VENV)/.dev ## run all tests, those on released engines too: over an hour, and 5 GB in .venv-engines
	@$(UNIT_TESTS)
	@FRAMES=1000 $(PYTEST) $(SIDE_BY_SIDE) --timeout 600 tests/integration tests/gpu
	@$(PYTEST) tests/chaos
	@$(MAKE) --no-print-directory test-engines field MARKS=

# Of the slow suites, what fits into an hour beside all else: the part of their files whose turn it is, TURN=2/3.
test-turn: $(VENV)/.dev
	@$(PYTEST) $(SIDE_BY_SIDE) --timeout 600 --turn $(TURN) $(SLICE:%=--ignore tests/integration/%.py) tests/integration tests/gpu
	@$(PYTEST) --turn $(TURN) tests/chaos
	@$(MAKE) --no-print-directory test-engines field MARKS= ARGS="--turn $(TURN)"

# The lowest torch that pyproject.toml allows comes from PyPI with 4 GB of CUDA. Where those are too many, name a build for
# the CPU (.ci/run takes the pinned one): make test-lowest LOWEST_TORCH=2.10.0+cpu PIP_EXTRA_INDEX_URL=URL-of-such-builds
test-lowest: | $(BIN)/python ## run the unit tests and some others with the lowest versions that pyproject.toml allows, on Python 3.11
	@$(BIN)/python -m tests.support.versions lowest

test-versions: | $(BIN)/python ## the same, and with the newest versions on each Python that is here (PYTHONS="3.12 3.13")
	@$(BIN)/python -m tests.support.versions lowest; lowest=$$?; \
	  $(BIN)/python -m tests.support.versions newest $(PYTHONS) && exit $$lowest

$(VENV)/axe.min.js: | $(VENV)/.dev
	@$(BIN)/python -m tests.support.browser.fetch_axe $@

test-browser: $(VENV)/.docs $(VENV)/axe.min.js ## the page and the handbook in a real Chromium, which is installed where there is none (as root, by apt-get): a minute
	@tests/support/browser/need_chromium.sh
	@$(PYTEST) --timeout 300 tests/browser $(ARGS)

screenshots: $(VENV)/.dev ## take the pictures of the page in docs/images anew; ARGS=report.html of make demo takes that one too
	@tests/support/browser/need_chromium.sh
	@$(BIN)/python -m tests.support.browser.screenshots docs/images $(ARGS)

ENGINES := .venv-engines
environments: | $(BIN)/python ## make the environments of test-lowest and test-engines, and run nothing
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@$(BIN)/python -m tests.support.versions prepare

# Tests marked long (minutes each, or the second case of a kind) are left to test-all, and to their turn in .ci/run.
MARKS = -m "not long"

test-engines: ## run the tests on released engines and trainers, some 27 minutes, and 5 GB in .venv-engines
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@$(ENGINES)/bin/python -m pytest -q -W default --timeout 600 --durations 10 tests/engines $(MARKS) $(ARGS)

# Tests of docs/field.md that are those of other suites, too.
FIELD_ALSO := tests/integration/channel/versions/test_containers.py \
  tests/integration/supervisor/cleanup/test_slow_deaths.py tests/integration/supervisor/shim/test_helpers.py \
  tests/integration/supervisor/test_inherited.py tests/unit/config/test_config_places.py \
  tests/unit/coordinator/test_needs.py tests/unit/common/test_helpers.py

field: $(VENV)/.dev ## put on again what users of other systems reported (docs/field.md): some 4 minutes, and 5 on released engines
	@$(PYTEST) $(SIDE_BY_SIDE) --timeout 400 --ignore tests/field/engines tests/field $(FIELD_ALSO) $(ARGS)
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@$(ENGINES)/bin/python -m pytest -q -W default --timeout 900 --durations 10 tests/field/engines $(MARKS) $(ARGS)

engine-campaign: ## sampled answers of two vLLM servers under kills and freezes: make engine-campaign ANSWERS=10000 FAULTS=50 SEED=1
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@CAMPAIGN_ANSWERS=$(or $(ANSWERS),1000) CAMPAIGN_FAULTS=$(or $(FAULTS),6) CAMPAIGN_SEED=$(or $(SEED),1) \
	  CAMPAIGN_MODES="$(or $(MODES),keep wait abort)" \
	  $(ENGINES)/bin/python -m pytest -q -s -W default tests/engines/campaign $(ARGS)

demo-llm: ## teach a small language model to add: TRL's trainer, two vLLM servers, one of them killed on the way (10 to 20 minutes)
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@HF_HUB_OFFLINE=1 $(ENGINES)/bin/python examples/grpo_llm/llm_demo.py $(ENGINES)/model $(ARGS)

unit: $(VENV)/.dev ## run the fast tests only
	@$(UNIT_TESTS)

integration: $(VENV)/.dev
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration

properties: $(VENV)/.dev ## look for histories that break an invariant of the core or show a reader of mirror half a version, and calls that do more than fail: make properties TIMES=20 SEED=3
	@PROPERTY_TIMES=$(or $(TIMES),5) PROPERTY_SEED=$(or $(SEED),1) \
	  $(PYTEST) $(SIDE_BY_SIDE) tests/integration/core/test_properties.py tests/integration/channel/test_calls.py \
	  tests/integration/cli/test_mirror_histories.py

chaos: $(VENV)/.dev ## run the seeded chaos suite for longer: make chaos ROUNDS=500 SEED=3
	@CHAOS_ROUNDS=$(or $(ROUNDS),40) CHAOS_SEED=$(or $(SEED),1) $(PYTEST) -s --timeout 0 \
	  $(or $(FILES),tests/chaos/test_chaos.py tests/chaos/test_link_chaos.py)

chaos-links: $(VENV)/.dev ## every broken, slow and lossy link between hosts, one after the other (needs root): make chaos-links ONLY="host A"
	@CHAOS_LINKS="$(or $(ONLY),all)" $(PYTEST) -s tests/chaos/test_links.py

chaos-nodes: $(VENV)/.dev ## agents, nodes, links and the supervisor of a run over four hosts (needs root): make chaos-nodes ROUNDS=200 SEED=3
	@CHAOS_ROUNDS=$(or $(ROUNDS),30) CHAOS_SEED=$(or $(SEED),1) CHAOS_NODE_ONLY="$(ONLY)" CHAOS_PAIRS="$(PAIRS)" \
	  $(PYTEST) -s --timeout 0 tests/chaos/test_nodes.py

chaos-tree: $(VENV)/.dev ## the same for the supervisor alone: make chaos-tree ROUNDS=300 SEED=3
	@CHAOS_ROUNDS=$(or $(ROUNDS),100) CHAOS_SEED=$(or $(SEED),1) CHAOS_AT_ONCE=$(or $(AT_ONCE),3) \
	  $(PYTEST) -s --timeout 0 tests/chaos/test_supervisor.py

scene: $(VENV)/.dev ## a training run under an operator who does anything at any time: make scene MINUTES=30 SEED=2
	@SCENE_MINUTES=$(or $(MINUTES),5) SCENE_SEED=$(or $(SEED),1) $(PYTEST) -s --timeout 0 tests/chaos/test_scene.py

coverage: $(VENV)/.dev ## branch coverage of the pure core by unit and property tests; fails below what is reached
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@$(COVERED) -m pytest -q $(CORE_ROOMS:%=tests/unit/%) & tests=$$!; \
	  printf '%s\n' "channel 200" "lives 100" "peers 150" "raising_peers 60" | \
	  xargs -L 1 $(COVERED) -m tests.support.properties; machines=$$?; wait $$tests && exit $$machines
	@$(BIN)/coverage combine -q --data-file $(COVERAGE)/all $(COVERAGE)/data.*
	@$(BIN)/coverage report --data-file $(COVERAGE)/all --show-missing --skip-covered --fail-under $(COVERAGE_REACHED)

gpu: ## on a machine with one GPU, without network: run its tests and its benchmark (tests/gpu/README.md)
	@$(GPU_PYTHON) tests/gpu/prepare.py --site $(GPU_SITE) --wheels $(GPU_WHEELS)
	@$(GPU_PYTEST) --numprocesses $(GPU_SIDE_BY_SIDE) --dist worksteal $(addprefix --ignore ,$(GPU_ALONE)) tests/gpu $(ARGS) $(GPU_DONE)
	@$(GPU_PYTEST) $(GPU_ALONE) $(ARGS) $(GPU_DONE)
	@$(GPU_RUN) bench/bench_gpu.py

gpu-wheels: $(BIN)/python ## on a machine with a network: download what `make gpu` needs beside torch (GPU_PYTHON_VERSION=3.12)
	@$(BIN)/python -m pip --disable-pip-version-check download --quiet --only-binary :all: --no-deps --implementation cp \
	  --python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --constraint constraints.txt --requirement tests/gpu/requirements.txt --dest $(GPU_WHEELS)
	@du -sh $(GPU_WHEELS)

check: $(VENV)/.dev ## lint, check types, and those of the public names as a user's checker sees them
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/yamllint --strict .github services .pre-commit-config.yaml
	@$(BIN)/mypy
	@$(BIN)/python -m tests.support.public_types

format: $(VENV)/.dev ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev ## run the benchmarks, in short with QUICK=1; tables to the terminal, JSON to bench-results/
	@failed=; for file in bench/bench_*.py; do \
	  echo "== $$file"; $(BENCH_PYTHON) $$file $(if $(QUICK),--quick) $(ARGS) || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

bench-engines: ## a sync of a trainer and two released vLLM servers, beside vLLM's reload of a checkpoint
	@$(PYTHON) tests/engines/install.py $(ENGINES)
	@$(ENGINES)/bin/python -m bench.bench_engines $(ENGINES)/model $(ARGS)

bench-peers: $(VENV)/.dev ## install what the benchmarks compare with (torchft, Ray, supervisord, circus) into an environment beside .venv
	@$(BIN)/python -m bench.peers

diagrams: $(VENV)/.dev ## write the state tables of the code into docs/protocol.md
	@$(BIN)/python -m tests.support.diagrams

docs-reference: $(VENV)/.dev ## write docs/reference from the code: config keys, metrics, events, errors, commands, public names
	@$(BIN)/python -m tests.support.reference

dist: $(VENV)/.dev ## build sdist and wheel, install the wheel, and check all that a user gets: dist/
	@$(BIN)/python -m tests.support.release

board: $(VENV)/.dev ## write the Grafana board of services/grafana from its panels in tests/support/board
	@$(BIN)/python -m tests.support.board

docs: $(VENV)/.docs ## build the handbook into docs/_build/html; a broken link, or a name that the reference lacks, is an error
	@$(BIN)/sphinx-build -q -E -W --keep-going -b html -c docs . docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove the virtual environment and what runs left
	@rm -rf $(VENV) demo-output bench-results docs/_build $(GPU_SITE) .mypy_cache .ruff_cache
