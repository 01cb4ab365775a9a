# make demo   the main job on a real model, with a table      make test   lint, types and tests
# make test-all  tests on every family and model as well
# make bench  decode benchmark                                make families  docs/families.md: every family against stock
# make test-habana  models of optimum-habana, beside a stand-in for Intel's plugin
# make sanitize  the C++ kernels under ASan and UBSan        make clean     remove what the others made
#
# Only Python 3.10+ and a C++ compiler are needed; everything else goes into .venv.

PYTHON      ?= python3
VENV        ?= .venv
VENV_OLDEST ?= .venv-transformers-5.17
VENV_HABANA ?= .venv-habana
# Pinned, and installed first and alone: a range lets pip fetch the newest build, which may come with gigabytes of CUDA.
TORCH       ?= torch==2.13.0
PYTEST_ARGS ?= -n 2
HABANA_ARGS ?= -n 2
DEMO_ARGS   ?=
BENCH_ARGS  ?=

BIN        := $(VENV)/bin
BIN_OLDEST := $(VENV_OLDEST)/bin
BIN_HABANA := $(VENV_HABANA)/bin
PIP_FLAGS  := --disable-pip-version-check
# What knows nothing of transformers (operators, masks as formulas), or is about one version of it (families), is left out.
CORE_TESTS := tests --ignore-glob='tests/test_ops_*' $(patsubst %,--ignore=tests/test_%.py,packaging examples demo linear \
              masks pieces ring_policy families)

.PHONY: help demo test test-all lint bench sanitize families test-transformers-5.17 test-habana clean
.DELETE_ON_ERROR:

help:
	@sed -n '1,8p' Makefile

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	|| { echo "Python 3.10 or newer is needed, but PYTHON=$(PYTHON) is older or missing. Run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install $(PIP_FLAGS) "$(TORCH)"
endef

$(VENV)/.torch:
	$(call new_venv,$(VENV))
	@touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml setup.py constraints.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev,demo]"
	@touch $@

$(VENV)/.tests: $(VENV)/.ready
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e ".[torchao]"
	@touch $@

$(VENV_OLDEST)/.torch:
	$(call new_venv,$(VENV_OLDEST))
	@touch $@

# transformers 5.17 needs an older huggingface-hub, so both pins are left out of the constraints.
$(VENV_OLDEST)/.ready: $(VENV_OLDEST)/.torch pyproject.toml setup.py constraints.txt
	grep -v -e '^transformers==' -e '^huggingface-hub==' constraints.txt > $(VENV_OLDEST)/constraints.txt
	$(BIN_OLDEST)/python -m pip install $(PIP_FLAGS) -c $(VENV_OLDEST)/constraints.txt transformers==5.17.0 -e ".[dev,demo]"
	@touch $@

$(VENV_HABANA)/.torch:
	$(call new_venv,$(VENV_HABANA))
	@touch $@

# optimum-habana needs transformers 4.55, so it has an environment of its own; swa_pass comes into it without what it requires.
HABANA_PINS := tests/habana/constraints.txt
$(VENV_HABANA)/.ready: $(VENV_HABANA)/.torch pyproject.toml setup.py $(HABANA_PINS) tests/habana/requirements-no-deps.txt
	$(BIN_HABANA)/python -m pip install $(PIP_FLAGS) -r $(HABANA_PINS)
	$(BIN_HABANA)/python -m pip install $(PIP_FLAGS) --no-deps -r tests/habana/requirements-no-deps.txt
	$(BIN_HABANA)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/swa-pass demo $(DEMO_ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint $(VENV)/.tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: lint $(VENV)/.tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m ""

test-transformers-5.17: $(VENV_OLDEST)/.ready
	$(BIN_OLDEST)/python -m pytest $(CORE_TESTS) $(PYTEST_ARGS)

# Real optimum-habana on CPU; only Intel's plugin is stood in for (tests/habana/stub).
test-habana: $(VENV_HABANA)/.ready
	PATH="$(abspath $(BIN_HABANA)):$$PATH" $(BIN_HABANA)/python -m pytest tests/habana $(HABANA_ARGS)

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/decode.py $(BENCH_ARGS)

# Out-of-bounds reads and undefined behaviour in the C++ kernels; python itself is not built for it, hence the preload.
SANITIZE := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: $(VENV)/.ready
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 SWA_PASS_CXXFLAGS="$(SANITIZE)" SWA_PASS_CACHE_DIR=build/sanitize \
	$(BIN)/python -m pytest tests/test_ops_meaning.py tests/test_ops_quant.py tests/test_ops_errors.py tests/test_ops_listed.py \
		tests/test_linear.py \
		-k "not torch and not device and not triton" -x

families: $(VENV)/.ready
	$(BIN)/python tests/families.py --write docs/families.md

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_HABANA) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
