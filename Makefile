# make demo · make test · make bench-swap: each sets up all it needs.   make demo TOKENS=300000 runs without a terminal and ends in one line of JSON.

# The first of these Pythons that runs and has venv; PYTHON=/path/to/python names another one.
PYTHON ?= $(shell for version in 3.13 3.12 3.14 3.11; do \
	python$$version -c '$(SUPPORTED)' 2>/dev/null && command -v python$$version && exit; done; command -v python3)
SUPPORTED := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
BIN := .venv/bin
TOKENS ?=
MIRRORS ?=
PORT ?=
QUICK ?=
HOSTS ?=

.PHONY: setup wheel demo test test-worker test-fast test-all audit bench-swap bench-gpu bench-site bench-frontend bench-text study-exchange study-exchange-cuda study-speedup study-architectures drill-exchange drill-strangers bench-floods bench-reach drill-mirrors bench-mirrors lint clean

setup: .venv/.installed frontend/dist/.built build/wheel/.built

# PyTorch's build for Linux: `cpu` (0.2 GB) or `cuda` (3 GB), which is the default where an NVIDIA GPU is.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /usr/lib/wsl/lib/nvidia-smi),cuda,cpu)
TORCH_CPU_BUILDS := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# An environment that works stays, unless PYTHON names another version; one that is half made does not.
IS_MADE := $(BIN)/python -c 'import pip; $(SUPPORTED)' 2>/dev/null
ifneq ($(origin PYTHON),file)
IS_MADE += && test "`$(BIN)/python -V`" = "`$(PYTHON) -V 2>/dev/null`"
endif

.venv/.installed: requirements.txt worker/pyproject.toml
	@{ $(IS_MADE); } || $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
	echo "Barnraise needs Python 3.11 to 3.14 with its module venv, and $(or $(PYTHON),python3) is none. Install one, for example with"; \
	echo "    uv python install 3.13"; \
	echo "and name it: make PYTHON=\"\$$(uv python find 3.13)\""; exit 1; }
	@{ $(IS_MADE); } || $(PYTHON) -m venv --clear .venv
	@test $(TORCH) != cpu || test "`uname -s`" != Linux || \
	$(PIP) --retries 0 --timeout 10 --no-deps --index-url $(TORCH_CPU_BUILDS) "`sed -n 's/^\(torch==[^ ]*\).*/\1+cpu/p' requirements.txt`" 2>/dev/null || \
	echo "$(TORCH_CPU_BUILDS) has no build of PyTorch for CPUs: the default build, of 3 GB, follows."
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable worker
	@touch $@

FRONTEND := $(shell find frontend -type f -not -path '*/node_modules/*' -not -path '*/dist/*' -not -path '*/templates/*' 2>/dev/null)

frontend/dist/.built: .venv/.installed $(FRONTEND)
	$(BIN)/python frontend/build.py
	@touch $@

# The worker as a wheel, which a site offers at /download/ with its digest.
wheel: build/wheel/.built

build/wheel/.built: .venv/.installed $(shell find worker -name '*.py' -not -path '*/build/*' 2>/dev/null) worker/pyproject.toml $(wildcard .git/logs/HEAD .git/refs/tags .git/packed-refs)
	@$(BIN)/python platform/coordinator/web/build_wheel.py
	@touch $@

# PORT=9000: another port than 8000. MIRRORS=3: three sites that replace each other, in a state folder of their own.
demo: setup
	@$(if $(MIRRORS),BARNRAISE_STATE=.state/mirrors-$(MIRRORS) BARNRAISE_NAME="Mirror 1") $(BIN)/python manage.py demo $(if $(MIRRORS),--mirrors $(MIRRORS)) $(if $(TOKENS),--tokens $(TOKENS)) $(if $(PORT),--port $(PORT)) $(if $(NEW),--new)

# Everything but what is marked slow: about 10 minutes on two cores. The last lines list the time of each suite.
test: setup
	@$(BIN)/python tests/helpers/browser/chromium.py
	@$(BIN)/python tests/helpers/run_suites.py default

# The worker's unit tests: a minute on two cores, without the site, a database or a browser.
test-worker: .venv/.installed
	@$(BIN)/python tests/helpers/run_suites.py worker

# Unit and contract tests without the check of types: 3 minutes on two cores.
test-fast: setup
	@$(BIN)/python tests/helpers/run_suites.py fast

# Style, format, types and imports of all Python files, in a minute.
lint: .venv/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright --level error
	@PYTHONPATH=platform:worker $(BIN)/lint-imports

# With long drills, exhaustive properties and thousands of API requests: 45 minutes on two cores.
test-all: setup
	@$(BIN)/python tests/helpers/browser/chromium.py
	@$(BIN)/python tests/helpers/run_suites.py all

# Measure the swap engine against its targets: 40 minutes; QUICK=1: 5 minutes. Leave the machine alone meanwhile.
bench-swap: .venv/.installed
	@$(BIN)/python benchmarks/swap/bench_swap.py $(if $(QUICK),--quick)

# The planner's programs before and after, by today's prices, and these next to what was measured: docs/benchmarks/plans.md, 3 minutes.
.PHONY: bench-plans
bench-plans: .venv/.installed
	@PYTHONPATH=worker:tests $(BIN)/python benchmarks/swap/bench_plans.py --write

# Several devices over one host copy of the state: exactness, speed, memory and the planner's choice, 25 minutes. QUICK=1: 5 minutes.
.PHONY: bench-devices
bench-devices: .venv/.installed
	@PYTHONPATH=worker:tests $(BIN)/python benchmarks/swap/bench_devices.py $(if $(QUICK),--quick)

# Crews of processes: one machine's bits, memory, speed against the sum of both, kills, a slow line (as root on Linux); 45 minutes. QUICK=1: 6.
.PHONY: bench-crew
bench-crew: .venv/.installed
	@PYTHONPATH=worker:tests:benchmarks/shared:benchmarks/field:benchmarks/swap $(BIN)/python benchmarks/crew/bench_crew.py $(if $(QUICK),--quick)

# What a GPU says about the swap engine, in nine minutes; CALL=second: 2.7B and other plans; CALL=third: the study with 32 M
# parameters; CALL=twice: one card used as several; CALL=two: two cards against one, and ranks on them against FSDP2. A bare
# checkout on a machine with torch needs no make: python3 benchmarks/swap/gpu_first.py
CALL ?= first
bench-gpu: .venv/.installed
	@$(BIN)/python benchmarks/swap/gpu_first.py --call $(CALL)

# What one site bears with 2,000 workers and 2,000 watchers, 15 minutes. QUICK=1: a tenth, 3 minutes. HOSTS=2: on two hosts
# with a web process each.
bench-site: setup
	@PYTHONPATH=platform:worker $(BIN)/python benchmarks/site/bench_site.py $(if $(QUICK),--quick) $(if $(HOSTS),--hosts $(HOSTS) --only load)

# What the pages cost a reader: time, main thread, memory, JavaScript, layout shifts, axe; 8 minutes. QUICK=1: 4 minutes.
bench-frontend: setup
	@$(BIN)/python tests/helpers/browser/chromium.py
	@PYTHONPATH=platform:worker $(BIN)/python benchmarks/frontend/bench_frontend.py $(if $(QUICK),--quick)

# What a volunteer notices of a worker: pauses, memory, other programs, rules; 75 minutes. QUICK=1: five. ONLY=soak: a part.
.PHONY: bench-worker
bench-worker: .venv/.installed
	@PYTHONPATH=worker $(BIN)/python benchmarks/worker/bench_worker.py $(if $(QUICK),--quick) $(ONLY)

# How fast text becomes tokens, against the plain tokenizers library, and in what memory; 15 minutes. QUICK=1: 2 minutes.
bench-text: .venv/.installed
	@PYTHONPATH=worker $(BIN)/python benchmarks/text/bench_text.py $(if $(QUICK),--megabytes 200)

# How fast a new mirror takes in 100,000 events, how late the others are at 50 changes a second, what a worker's day adds to
# the log; 6 minutes. QUICK=1: a tenth of it, 2 minutes.
bench-mirrors: setup
	@PYTHONPATH=platform:worker $(BIN)/python benchmarks/mirrors/bench_mirrors.py $(if $(QUICK),--quick)

# Whether the worker installs on every Python and platform that README.md names: 10 minutes, mostly downloads.
.PHONY: check-pythons
check-pythons: setup
	@$(BIN)/python tests/helpers/check_pythons.py

# Upgrade a site of the newest release while an old and a new worker train; 5 minutes. It needs the repository's history.
# BASELINE=v0.1.0: another release, or a commit.
.PHONY: drill-upgrade
BASELINE ?=
drill-upgrade: setup
	@$(BIN)/python benchmarks/upgrade/drill_upgrade.py $(if $(BASELINE),--baseline $(BASELINE))

# Known weaknesses of what we build on; says so where a registry does not answer. CI runs it with `make test`, as a warning.
audit: setup
	@$(BIN)/python tests/helpers/dependency_audit.py

# What this version is made of: build/sbom.json (CycloneDX) and the licences of all packages, build/licences.md.
.PHONY: sbom
sbom: .venv/.installed
	@$(BIN)/python tests/helpers/sbom.py

# Test what the exchange survives: kills, partitions, flipped bits, hostile peers, poison. 15 minutes; QUICK=1: five.
drill-exchange: .venv/.installed
	@$(BIN)/python benchmarks/drills/drill_exchange.py $(if $(QUICK),--quick)

# Measure against DDP, pipelines, decent-dp, hivemind and torchft on shaped lines: 90 minutes, 110 in slow hours; as root on Linux. QUICK=1: ten.
# It installs the external systems into build/field. DOCS=1 writes the plots of docs/benchmarks/exchange.md.
.PHONY: bench-exchange
bench-exchange: .venv/.installed
	@PYTHONPATH=worker $(BIN)/python benchmarks/field/bench_exchange.py $(if $(QUICK),--quick) $(if $(DOCS),--docs) $(if $(ONLY),--only $(ONLY))

# What floods of a stranger do to honest updates and to memory; 7 minutes. QUICK=1: two.
bench-floods: .venv/.installed
	@$(BIN)/python benchmarks/strangers/bench_floods.py $(if $(QUICK),--quick)

# Whether peers behind routers reach each other: in network namespaces (root on Linux, nftables, miniupnpd), and a simulation of
# a thousand peers; 15 minutes. QUICK=1: three.
bench-reach: .venv/.installed
	@PYTHONPATH=worker $(BIN)/python benchmarks/reach/bench_reach.py $(if $(QUICK),--quick)

# Test what strangers can do to a run and a site: liars, floods, isolation, false mirrors. 19 minutes; QUICK=1: six.
drill-strangers: setup
	@PYTHONPATH=platform:worker $(BIN)/python benchmarks/strangers/drill_strangers.py $(if $(QUICK),--quick)

# What a site of three mirrors survives, some 15 minutes; as root on Linux, where a mirror can be cut off. QUICK=1: five.
drill-mirrors: setup
	@PYTHONPATH=platform:worker $(BIN)/python benchmarks/mirrors/drill_mirrors.py $(if $(QUICK),--quick)

# Measure what the exchange costs in loss and saves in bytes: 75 minutes on two cores. An interrupted study continues where
# it stopped. KNOWN=1: train only what docs/benchmarks/exchange_study.jsonl lacks. QUICK=1: three minutes.
study-exchange: .venv/.installed
	@$(BIN)/python benchmarks/study/study_exchange.py $(if $(QUICK),--quick) $(if $(KNOWN),--known)

# Measure how much sooner a run ends with more machines, at the same loss: two nights. KNOWN=1: train only what
# docs/benchmarks/speedup.jsonl lacks. QUICK=1: five minutes.
study-speedup: .venv/.installed
	@$(BIN)/python benchmarks/study/study_speedup.py $(if $(QUICK),--quick) $(if $(KNOWN),--known)

# Compare the loss of GPT-2's and Llama's architecture at equal parameters; a night on two cores. QUICK=1: a minute.
study-architectures: .venv/.installed
	@$(BIN)/python benchmarks/study/study_architectures.py $(if $(QUICK),--quick)

# The same study with 32 M parameters and only the long trainings; for a GPU.
study-exchange-cuda: .venv/.installed
	@BARNRAISE_STUDY=large $(BIN)/python benchmarks/study/study_exchange.py $(if $(QUICK),--quick) $(if $(KNOWN),--known)

clean:
	rm -rf .venv .state build frontend/dist frontend/node_modules
