# `make demo` and `make test` do all the set-up they need on a machine with Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1

.PHONY: demo test check docs bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/shoal demo

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

check: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/mypy
	$(BIN)/python tools/check_words.py

# The generated pages: docs/settings.md (with experiment/settings.py), blocks of docs/methods/*.md, docs/glossary.md.
docs: $(VENV)/.installed
	$(BIN)/python -m shoal.experiment.settings_page
	$(BIN)/python -m shoal.experiment.method_pages
	$(BIN)/python tools/glossary.py

# Peers in an environment of their own: about half an hour in all, and 25 GB of disk for a while.
# A benchmark that fails does not end the others. `make bench-gate` runs one of them; its options go into ARGS.
bench: $(VENV)-bench/.installed
	$(VENV)-bench/bin/python benchmarks/suite.py $(ARGS)

bench-%: benchmarks/%.py $(VENV)-bench/.installed
	$(VENV)-bench/bin/python $< $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned: an unpinned one brings gigabytes of CUDA.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a few minutes)"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,flower,serve,onnx]'
	touch $@

$(VENV)-bench/.installed: benchmarks/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)-bench/bin/python -m pip install --quiet -c constraints.txt -e '.[flower,serve]' -r benchmarks/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench .cache runs
