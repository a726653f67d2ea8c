# `make sweep` and `make test` set up what they need; a second call skips the set-up.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 5000
SETUP := pyproject.toml constraints.txt
# TORCH_INDEX=https://download.pytorch.org/whl/cpu: torch without CUDA, which takes gigabytes on Linux
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
INSTALL := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')

# pip would try an index that does not answer five times for each package, for minutes.
define CHECK_INDEX
import os, ssl, sys, urllib.error, urllib.request
url = sys.argv[1].rstrip("/") + "/torch/"
try:
    urllib.request.urlopen(url, timeout=20)
except (OSError, ValueError) as error:
    reason = getattr(error, "reason", error)
    known = not isinstance(reason, ssl.SSLError) and getattr(error, "code", 404) == 404
    local = url.startswith("file:") or os.path.isdir(sys.argv[1])
    if known and not local and "@" not in url:  # pip has certificates and passwords of its own
        sys.exit(f"TORCH_INDEX: got {sys.argv[1]}, which has no torch ({reason}), expected an index of CPU builds; try https://download.pytorch.org/whl/cpu, or leave it out")
endef
export CHECK_INDEX

define MAKE_VENV
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
@$(if $(TORCH_INDEX),$(PYTHON) -c "$$CHECK_INDEX" '$(TORCH_INDEX)')
$(PYTHON) -m venv .venv
endef

.PHONY: help setup sweep test test-all check docs schema bench ui clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: .venv/.run ## Make the virtual environment

sweep: .venv/.run ## Quantize with both frameworks, int8 and uint8, and compare
	$(BIN)/python run.py -m backend=onnx,torch dtype=int8,uint8

test: .venv/.dev ## Run the short tests, in several processes
	$(PYTEST) -m "not slow"

test-all: .venv/.dev ## Run every test, as CI does (CIFAR10_DIR and RESNET8_H5 name the real files)
	$(PYTEST)

check: .venv/.dev ## Format, lint, types, and which package imports which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.dev ## Build the documentation's site in build/site; a broken link is an error
	rm -rf build/docs && mkdir -p build/docs
	git ls-files -z -- ':!tests' | tar --null -T - -cf - | tar -xf - -C build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

schema: .venv/.dev ## Write docs/verdict.schema.json again, from the type of the verdict
	$(BIN)/python -c 'from resnet8ptq.results.document import to_schema; print(to_schema(), end="")' > docs/verdict.schema.json

bench: .venv/.dev ## Measure time beside the bare libraries (40 minutes): benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

ui: .venv/.run ## Browse the runs: MLflow on 127.0.0.1:$(PORT)
	@$(BIN)/python -m resnet8ptq ui port='$(PORT)' $(if $(STORE),uri='$(STORE)')

clean: ## Remove the virtual environment; runs and their store stay
	rm -rf .venv

.venv/.run: $(SETUP)
	$(MAKE_VENV)
	$(INSTALL) -e .
	@touch $@

# One call of pip, because each looks up the whole package. It compiles nothing: Python does so for
# the quarter of the modules that is imported.
.venv/.dev: $(SETUP)
	$(MAKE_VENV)
	$(INSTALL) --no-compile -e '.[dev]'
	@touch .venv/.run $@
