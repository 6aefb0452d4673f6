# Everything runs in .venv, made on first use with the Python named here (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= outputs/demo-$(shell date +%Y%m%d-%H%M%S)
STAMP := $(VENV)/.installed

.PHONY: help install demo demo-pretrain demo-rl test check format clean

help:
	@echo "make demo      train a small Qwen3-MoE on this machine, from nothing to weights"
	@echo "make demo-pretrain  pretrain one on the standard library's sources, and print samples"
	@echo "make demo-rl   lift a half-trained one from a third of its answers right to most, by RL"
	@echo "make test      the whole CPU test suite"
	@echo "make check     linters, types, import layers: all that CI runs besides the tests"
	@echo "make format    let ruff mend what it can"
	@echo "make install   only make $(VENV) and install into it"
	@echo "make clean     remove $(VENV) and caches (not outputs/)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/install.sh
	@touch $@

demo: $(STAMP)
	$(BIN)/trainer sft @ configs/sft/demo.toml --output-dir "$(DEMO_DIR)"

demo-pretrain: $(STAMP)
	$(BIN)/trainer pretrain @ configs/pretrain/demo.toml --output-dir "$(DEMO_DIR)-pretrain"

demo-rl: $(STAMP)
	$(BIN)/python scripts/demo_rl.py --out "$(DEMO_DIR)-rl"

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf "$(VENV)" .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
