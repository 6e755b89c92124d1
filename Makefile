# make run     stream one answer of the demo model, print its speed, exit
# make serve   leave the demo model serving
# make setup   only install
# make test    run the test suite
# make test-fast  the tests without devices, browsers and servers (CONTRIBUTING.md)
# make test-mutation  change the scheduler and the KV manager in small ways; their tests must notice
# make test-cuda  run the CUDA kernels and their device on the CPU (docs/gpu-without-gpu.md)
# make check   what CI runs

VENV ?= .venv
PYTHON := $(VENV)/bin/python
# What an editable install depends on; Python sources are used in place.
INSTALL_INPUTS := pyproject.toml hatch_build.py $(shell find rpc/proto -name '*.proto')

.PHONY: run serve setup test test-fast test-mutation test-cuda check clean
.DEFAULT_GOAL := run

run: setup
	@$(PYTHON) -m perf.demo

serve: setup
	@$(PYTHON) -m perf.demo --serve

setup: $(VENV)/.installed-run

test: $(VENV)/.installed-test
	$(PYTHON) -m pytest -q -m "not cuda"

FAST := request text kv schedule serving grammar engine models test_cases.py test_package.py test_rooms.py

test-fast: $(VENV)/.installed-test
	$(PYTHON) -m pytest -q -m "not slow" $(FAST:%=tests/%)

test-mutation: $(VENV)/.installed-test
	$(PYTHON) -m pytest -q -m mutation tests/mutation

test-cuda: $(VENV)/.installed-test-cuda
	$(PYTHON) -m pytest -q -m cuda

check:
	.ci/run

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.installed-run: EXTRAS := demo,cpu
$(VENV)/.installed-test: EXTRAS := demo,cpu,test
$(VENV)/.installed-test-cuda: EXTRAS := demo,cpu,test,test-cuda
$(VENV)/.installed-run $(VENV)/.installed-test $(VENV)/.installed-test-cuda: $(INSTALL_INPUTS) | $(PYTHON)
	@echo "Installing engine-llm[$(EXTRAS)] into $(VENV)"
	@if command -v uv >/dev/null; then uv pip install --quiet --compile-bytecode --python $(PYTHON) -e '.[$(EXTRAS)]'; \
	else $(PYTHON) -m pip install --quiet -e '.[$(EXTRAS)]'; fi
	@$(PYTHON) -m engine.devices.cpu.warmup
	@touch $@

$(PYTHON):
	@if command -v uv >/dev/null; then uv venv --quiet --python '>=3.11' $(VENV); else \
	for p in python3 python3.14 python3.13 python3.12 python3.11; do \
		if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			exec $$p -m venv $(VENV); fi; \
	done; echo "Python 3.11 or newer is needed, or uv: https://docs.astral.sh/uv" >&2; exit 1; fi
