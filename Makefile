PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
FUZZ ?= -runs=1000000
CHAOS_ROUNDS ?= 10
CHAOS_SEED ?= $(shell date +%s)
# Where NVIDIA's tool answers, set-up installs vLLM's GPU build, and the demo's three roles share a GPU.
DEMO_GPU = $(if $(shell nvidia-smi -L 2>/dev/null),capture.gpus=0.3 capture.gpu_memory_utilization=0.3 \
	trainer.gpus=0.3 serve.gpus=0.3 serve.gpu_memory_utilization=0.3)

.PHONY: help demo test venv bench fuzz chaos clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then train and serve a drafter for a small real model (about 15 minutes on 2 cores)"
	@echo "make test    set up, then run the tests (all but make chaos; they want chromium)"
	@echo "make venv    only set up: $(VENV)"
	@echo "make bench   the benchmarks that need no drafter, one JSON object each"
	@echo "make fuzz    a million inputs at the wire decoder and the control messages"
	@echo "make chaos   kill and stop every kind of process, break connections, fill the disk, and count the samples"

venv: $(VENV)/.complete

$(VENV)/.complete: requirements/cpu.txt requirements/gpu.txt pyproject.toml scripts/make-venv
	scripts/make-venv $(VENV) $(PYTHON)

demo: venv
	$(BIN)/torchspec-lite train configs/demo.yaml $(DEMO_GPU) name=$$([ -e runs/demo ] && date +demo-%m%d-%H%M%S || echo demo)

test: venv
	$(BIN)/python -m pytest

bench: venv
	for name in train_step capture stream backpressure; do $(BIN)/python -m benchmarks.$$name --json; done

fuzz: venv
	$(BIN)/python -m pip install --quiet --requirement requirements/fuzz.txt
	mkdir -p .cache
	$(BIN)/python -m tests.fuzz.fuzz_wire -max_len=4096 -artifact_prefix=.cache/ $(FUZZ)

chaos: venv
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest -o addopts= -s tests/chaos

clean:
	rm -rf $(VENV) .cache .pytest_cache .hypothesis
