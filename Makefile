# Every target sets up what it needs: a virtual environment in .venv with the versions in
# constraints.txt. Only Python 3.10 or newer, make and git have to be there.

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -q
# CUDA builds of torch bring a Triton of their own; this one goes beside the CPU build.
TRITON := triton==3.6.0
# Beside it, for the test that kernels compile with the others too.
TRITONS := 3.7.1 3.8.0 3.9.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.PHONY: docs wheel help demo test builds tritons audit lint bench report gallery clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(READY) ## run attention here: checked, reproduced bit for bit, timed
	@$(BIN)/lockstep demo

# Python keeps what it compiles, whatever the environment says: without, to read the tests takes
# half as long again, in every process.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --maxprocesses=4 \
  --dist=loadfile --no-loadscope-reorder

test: $(READY) ## run the tests, all but those of `make builds`
	$(PYTEST) -m 'not builds' $(ARGS)

builds: $(READY) ## compile the other GPU kernels that tests look at, and read their machine code
	$(PYTEST) -m builds $(ARGS)

tritons: $(READY) ## install other versions of Triton, 3 GB, for the tests that compile with them
	@test "$$(uname)" != Linux || for version in $(TRITONS); do \
	  to=$(VENV)/tritons/$$version; test -d $$to && continue; rm -rf $$to.part; \
	  $(PIP) --no-deps --target $$to.part triton==$$version && mv $$to.part $$to || exit 1; \
	done

audit: $(READY) ## check problems of all kinds for a minute, and the code of constant-time GPU builds of all kinds
	OMP_NUM_THREADS=2 $(BIN)/lockstep audit exact --device cpu --minutes 1 --seed 0
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/constant_time_code.py --jobs 2 --out build/audit

lint: $(READY) ## check style, types, and the tables in the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m lockstep.bench.tables --check

docs: $(READY) ## build the documentation as a site in build/site; broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q && echo "build/site/index.html"

wheel: $(READY) ## build the wheel, install it into an environment of its own, and try it there
	@bash .ci/wheel

bench: $(READY) ## time the CPU path against PyTorch
	@$(BIN)/lockstep bench cpu $(ARGS)

report: $(READY) ## write one HTML page of the ladder, lockstep-report.html
	@$(BIN)/lockstep report $(ARGS)

gallery: report ## take the picture in README from it; needs Chromium
	$(BIN)/python tests/report/gallery.py lockstep-report.html docs/gallery.png

clean: ## remove the environment, caches and compiled kernels
	rm -rf $(VENV) build .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	  $$python -c 'import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
	    2>/dev/null && exec $$python -m venv $(VENV); \
	done; \
	echo "Lockstep needs Python 3.10 to 3.14 with its venv module (on Debian and Ubuntu:" >&2; \
	echo "apt install python3-venv). Found: $$(python3 --version 2>&1 || true)." >&2; exit 1

# PyPI's torch for Linux comes with 2 GB of CUDA libraries. Where there is no NVIDIA driver, the
# CPU build does; if PyTorch's server cannot be reached, the next step takes PyPI's.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (a minute or two, once)"
	@test -e /dev/nvidiactl || $(PIP) --no-deps --retries 1 --timeout 15 -c constraints.txt \
	  --index-url $(CPU_WHEELS) torch 2>/dev/null || echo "No CPU build of torch: taking PyPI's"
	@$(PIP) -c constraints.txt torch
	@test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	@$(PIP) -c constraints.txt -e '.[dev,docs,gpu,hf]'
	@touch $@
