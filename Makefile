PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test venv bench fuzz chaos clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then train and serve a drafter for a small real model (about 15 minutes on 2 cores)"
	@echo "make test    set up, then run every test"
	@echo "make venv    only set up: $(VENV)"
	@echo "make bench   run the benchmarks, one JSON object each"
	@echo "make fuzz    a million inputs at the wire decoder"
	@echo "make chaos   kill and cut everything, many times, and count the samples"

venv: $(VENV)/.complete

$(VENV)/.complete: requirements/cpu.txt requirements/gpu.txt pyproject.toml scripts/make-venv
	scripts/make-venv $(VENV) $(PYTHON)

demo: venv
	$(BIN)/torchspec-lite train configs/demo.yaml

test: venv
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis
