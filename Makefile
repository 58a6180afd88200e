# make serve [MODEL=...] [ARGS="--port 9000"] [TORCH=cpu|cuda]   installs if needed, then serves
# make serve DEMO=split                                          a demo whose experts are chosen unevenly
# make quick                                                     while you work: lint, unit tests, one generation
# make test                                                      the suite; make test-long for what takes longer
# make test-clients [CLIENTS=...]                                real clients, each in its own environment
# make test-oracles                                              tiny GGUF files through llama.cpp and through our engine
# make test-routers                                              vllm-router, dynamo's indexer, smg and litellm over services
# make pictures                                                  the README's pictures, from a demo that runs meanwhile
# make gpu [PYTHON=python3] [OUT=DIR]                             on a GPU: the three below, one after the other
# make gpu-test [TESTS=...] | gpu-bench | gpu-decode              kernels' tests, kernels, decode steps: ten minutes each
# make gpu-serve [ONLY="start load"]                             on a GPU: a service, right and fast, within nine minutes
# make venv                                                      just installs; .venv/bin/moeserve is the command then
# sudo make install MODEL=owner/name:Q4_K_M [PREFIX=...]         a systemd service, settings and keys in /etc/moeserve; again: an upgrade

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Empty: the build of torch that pip prefers, which is the CPU build where an index offers it.
TORCH ?=
TORCH_REQUIREMENT_cpu := 'torch==2.13.0+cpu'
TORCH_REQUIREMENT_cuda := 'torch===2.13.0'
ifneq ($(TORCH),)
ifeq ($(filter $(TORCH),cpu cuda),)
$(error TORCH is cpu or cuda, not $(TORCH))
endif
endif
comma := ,
# Where the GPU targets write their tables.
OUT ?= docs/benchmarks
# Tests of one process each run side by side, with two threads so that parallel code is run in parallel. A part of the
# unit tests waits for processes.
SIDE_BY_SIDE := -n $(shell nproc) --dist worksteal
UNIT := -n $(shell cores=$$(nproc); echo $$((cores + (cores + 1) / 2))) --dist worksteal
FEW_THREADS := OMP_NUM_THREADS=2 GOMP_SPINCOUNT=0
# Hundreds of short processes import the same modules: they are compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
TIMED := TIMEFORMAT='-- took %0R s'; time

.PHONY: serve venv install quick test checks lint unit cpu kernels behaviour e2e pictures test-clients test-oracles test-routers openapi openapi-long emulator test-long kernels-long gpu gpu-test gpu-bench gpu-decode gpu-serve clean

RIGHT_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "moeserve needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }

serve: venv
	@exec $(VENV)/bin/moeserve serve $(if $(DEMO),demo-$(DEMO),$(MODEL)) $(ARGS)

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt constraints-cuda.txt requirements-demo.txt
	@$(RIGHT_PYTHON)
	@echo "Installing into $(VENV): about 2.4 GB with the CPU build of torch, more with CUDA."
	@if command -v uv >/dev/null; then \
	  test -x $(RUN) || uv venv --python $(PYTHON) $(VENV); \
	  install="uv pip install --python $(RUN)"; \
	else \
	  test -x $(RUN) || $(PYTHON) -m venv $(VENV); \
	  $(RUN) -m pip install --quiet --upgrade 'pip>=25.1'; \
	  install="$(RUN) -m pip install --progress-bar=off"; \
	fi; \
	set -e; \
	constraints=constraints.txt; \
	if test "$(TORCH)" = cuda; then \
	  constraints=$(VENV)/constraints.txt; \
	  grep -v '^triton==' constraints.txt | cat - constraints-cuda.txt > $$constraints; \
	fi; \
	$$install --constraint $$constraints --group dev --group e2e $(TORCH_REQUIREMENT_$(TORCH)) --editable .; \
	$$install --no-deps --requirement requirements-demo.txt
	@touch $@

# A service of this machine for systemd. What an operator may have changed, settings and keys, stays as it is.
PREFIX ?= /opt/moeserve
install:
	@$(RIGHT_PYTHON)
	@test -n "$(MODEL)" -o -e $(DESTDIR)/etc/moeserve/moeserve.toml || \
	  { echo "Name the model that is served: sudo make install MODEL=owner/name:Q4_K_M" >&2; exit 1; }
	@echo "Installing into $(PREFIX): about 2.4 GB with the CPU build of torch, more with CUDA."
	@set -e; root=$(DESTDIR)$(PREFIX) etc=$(DESTDIR)/etc; \
	$(PYTHON) -m venv $$root/.venv; rm -rf build; \
	$$root/.venv/bin/pip install --progress-bar=off --constraint constraints.txt $(TORCH_REQUIREMENT_$(TORCH)) .; \
	install -D -m 644 examples/moeserve.service $$etc/systemd/system/moeserve.service; \
	sed -i 's|/opt/moeserve/|$(PREFIX)/|' $$etc/systemd/system/moeserve.service; \
	if ! test -e $$etc/moeserve/moeserve.toml; then \
	  install -D -m 644 examples/moeserve.toml $$etc/moeserve/moeserve.toml; \
	  sed -i 's|^# model = .*|model = "$(MODEL)"|' $$etc/moeserve/moeserve.toml; \
	fi; \
	test -e $$etc/moeserve/keys || install -m 600 /dev/null $$etc/moeserve/keys; \
	install -d $(DESTDIR)/usr/local/bin && ln -sf $(PREFIX)/.venv/bin/moeserve $(DESTDIR)/usr/local/bin/moeserve; \
	if test -z "$(DESTDIR)"; then systemctl daemon-reload; fi
	@echo "Next: keys in /etc/moeserve/keys (moeserve key new NAME...), then systemctl enable --now moeserve."

# Torch-free tests but the slow ones; beside them, in a process that imports torch, ranks and one model that generates,
# which is busy where others wait.
GENERATION := 'tests/cpu/test_token_engine.py::test_greedy_tokens_equal_those_of_transformers[mixtral]'
quick: lint
	@echo "-- unit tests, contracts, ranks and one generation"
	@export OMP_NUM_THREADS=1; $(TIMED) ( \
	  $(RUN) -m pytest -m 'not slow and not long' tests/cpu/test_rank*.py $(GENERATION) & \
	  $(RUN) -m pytest $(UNIT) -m 'not slow and not long' tests/unit tests/contracts; unit=$$?; wait $$! && exit $$unit )

# mypy computes where unit tests wait for processes.
checks: venv
	@$(MAKE) --no-print-directory lint & \
	  $(MAKE) --no-print-directory unit; unit=$$?; wait $$! && exit $$unit

test: checks cpu kernels e2e
	@$(RUN) -m tests.support.checked_kernels --record

# A fresh clone begins with what mypy has found in another one: it compares contents, of libraries above all.
FOUND := $(or $(MOESERVE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/moeserve)/mypy
lint: venv
	@echo "-- ruff and mypy"
	@test -d .mypy_cache || cp -r $(FOUND) .mypy_cache 2>/dev/null || true
	@$(TIMED) { $(RUN) -m ruff check . && $(RUN) -m ruff format --check . && $(RUN) -m mypy; }
	@test $(FOUND) -nt constraints.txt || { new=$(FOUND).$$$$; mkdir -p $(dir $(FOUND)) && cp -r .mypy_cache $$new && \
	  rm -rf $(FOUND) && mv -T $$new $(FOUND); } || true

unit: venv
	@echo "-- unit tests and contracts (no torch)"
	@export OMP_NUM_THREADS=1; $(TIMED) $(RUN) -m pytest $(UNIT) tests/unit tests/contracts

cpu: venv
	@echo "-- tests of the model on a CPU"
	@export $(FEW_THREADS); $(TIMED) $(RUN) -m pytest -m "$(MARKS)" $(SIDE_BY_SIDE) tests/cpu

# Tests that take long in the interpreter, or compile for an absent GPU, run where the code of the GPU path is not that of
# the record, which is written when all has passed.
KERNELS_ARE_DUE := $(shell $(PYTHON) -m tests.support.checked_kernels || echo due)
MARKS := not long and not gpu$(if $(KERNELS_ARE_DUE),, and not kernel_change)
# What a module prepares, ranks of their own for example, is made by one process.
KERNEL_TESTS := -n $(shell nproc) --dist loadscope --no-loadscope-reorder tests/kernels
kernels: venv
	@echo "-- Triton kernels, in the interpreter where there is no GPU$(if $(KERNELS_ARE_DUE),: all of them$(comma) the code of the GPU path has changed)"
	@export $(FEW_THREADS); $(TIMED) $(RUN) -m pytest -m "$(MARKS)" $(KERNEL_TESTS)

# It pins its own threads, and runs two things at once. `e2e` runs it too.
behaviour: venv
	@echo "-- tokens, bits and plans are those recorded"
	@$(TIMED) $(RUN) -m pytest -m "$(MARKS)" tests/behaviour

# Tests wait for their services half of the time. The recorded behaviour takes longest, and comes first; its services are
# forked from the process that has imported what all of them need.
FEW := $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
E2E_TESTS := tests/behaviour tests/e2e
e2e: venv
	@echo "-- tokens, bits and plans as recorded; end-to-end tests over HTTP"
	@$(TIMED) $(RUN) -m pytest -m "$(MARKS)" -n $(FEW) --dist worksteal $(E2E_TESTS)

kernels-long: venv
	@export $(FEW_THREADS); $(TIMED) $(RUN) -m pytest -m 'not long and not gpu' $(KERNEL_TESTS)
	@$(TIMED) $(RUN) -m pytest -m 'kernel_change' -n $(FEW) --dist worksteal $(E2E_TESTS) tests/cpu
	@$(RUN) -m tests.support.checked_kernels --record

# Installs real clients and runs them against the demo; docs/clients.md says what CLIENTS may be.
test-clients: venv
	@$(TIMED) $(RUN) -m tests.clients $(if $(filter --%,$(CLIENTS)),$(CLIENTS),$(if $(CLIENTS),--only $(CLIENTS)))

# Installs llama.cpp and compares what it computes out of GGUF files with what we do.
test-oracles: venv
	@$(TIMED) $(RUN) -m pytest -n 0 -m long tests/oracles

# Installs routers of others, each in an environment of its own, and runs them over two services.
test-routers: venv
	@$(TIMED) $(RUN) -m pytest -n 0 -m long tests/routers

# Chat and dashboard of a running demo, and a plot of what docs/benchmarks/README.md has. It needs a Chromium.
pictures: venv
	@$(RUN) -m tests.support.pictures

# A hundred requests to each operation of /openapi.json, or a thousand.
openapi: venv
	@export EXAMPLES=100; $(TIMED) $(RUN) -m tests.clients --only schemathesis

openapi-long: venv
	@export EXAMPLES=1000; $(TIMED) $(RUN) -m tests.clients --only schemathesis

# A compiler and an emulator for another kind of processor; tests that need them are skipped where they are not.
EMULATOR := g++-aarch64-linux-gnu qemu-user
emulator:
	@command -v qemu-aarch64 >/dev/null || { test $$(id -u) = 0 && command -v apt-get >/dev/null && apt-get update -q && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(EMULATOR); } >/dev/null || \
	  echo "no emulator: $(EMULATOR) cannot be installed here"

test-long: venv emulator kernels-long openapi-long
	@$(TIMED) $(RUN) -m pytest $(UNIT) --hypothesis-profile=thorough tests/unit
	@$(TIMED) $(RUN) -m pytest -m long --ignore tests/routers --ignore tests/oracles tests

# These need torch, Triton, numpy, safetensors, transformers, msgpack and pytest alone. Each ends within ten minutes: for
# machines that are lent for as long. What is measured by then is written.
GPU_PYTHON = $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))
TESTS ?= tests/kernels
WITHIN := timeout --kill-after=5 590

gpu-test:
	@$(TIMED) $(WITHIN) $(GPU_PYTHON) -m tests.support.side_by_side $(TESTS)

gpu-bench:
	@$(TIMED) $(WITHIN) $(GPU_PYTHON) -m benchmarks.kernels --out-dir $(OUT)

gpu-decode:
	@$(TIMED) $(WITHIN) $(GPU_PYTHON) -m benchmarks.steps --out-dir $(OUT)

# A service needs more packages: docs/benchmarks/gpu.md says which, and how they are carried to a machine without them.
gpu-serve:
	@$(TIMED) $(WITHIN) $(GPU_PYTHON) -m benchmarks.gpu_serve --out-dir $(OUT) $(addprefix --only ,$(ONLY))

# What fails does not keep the rest from being measured.
gpu:
	@failed=0; for part in gpu-test gpu-bench gpu-decode; do $(MAKE) --no-print-directory $$part || failed=1; done; \
	exit $$failed

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
