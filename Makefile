# The two commands: `make demo` and `make test`. Both make .venv themselves and reuse it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo
TWO := --numprocesses 2 --dist worksteal --durations 20
LAUNCH := ACCELERATE_USE_CPU=true $(BIN)/hf_bucketing launch --multi_gpu --num_processes 2 --num_machines 1 \
	--mixed_precision no --dynamo_backend no
TRAIN := $(LAUNCH) train --pretrained_model_name_or_path $(DEMO)/tiny-wan \
	--dataset_dir $(DEMO)/prepared --learning_rate 5e-4 --lr_scheduler cosine --lr_warmup_steps 10 \
	--num_train_epochs 20 --max_sequence_length 32 --caption_dropout 0.1 --dataloader_num_workers 1

.PHONY: demo test test-slow test-every test-gpu docs docs-serve notebooks quality style clean

demo: $(VENV)/installed
	rm -rf $(DEMO)
	$(BIN)/hf_bucketing demo data --output_dir $(DEMO)/media --num_samples 95
	$(BIN)/hf_bucketing demo trained --output_dir $(DEMO)/tiny-wan
	$(BIN)/hf_bucketing prepare --dataset $(DEMO)/media --output_dir $(DEMO)/prepared \
		--pretrained_model_name_or_path $(DEMO)/tiny-wan --target_fps 4 \
		--bucket_tokens 100,150,260 --bucket_frames 1,5,9
	$(TRAIN) --output_dir $(DEMO)/bucket --batching bucket --train_batch_size 3
	$(TRAIN) --output_dir $(DEMO)/pack --batching pack --max_tokens 1000 --strip_length 16
	$(BIN)/hf_bucketing report buckets $(DEMO)/prepared --batch_size 3 --num_processes 2 --max_tokens 1000 \
		--strip_length 16 --html $(DEMO)/report.html
	$(BIN)/hf_bucketing report run $(DEMO)/bucket $(DEMO)/pack --min_fall 0.1 --figure $(DEMO)/loss.png \
		--html $(DEMO)/run.html
	$(BIN)/python scripts/tools/show_demo.py --before $(DEMO)/tiny-wan --after $(DEMO)/bucket $(DEMO)/pack \
		--figure $(DEMO)/before_after.png --min_recognised 2

test: $(VENV)/tested
	$(BIN)/python -m pytest $(TWO) -m "not slow and not every"

test-slow: $(VENV)/tested
	$(BIN)/python -m pytest $(TWO) -m "slow and not every"

test-every: $(VENV)/tested
	$(BIN)/python -m pytest $(TWO) -m every

test-gpu: $(VENV)/tested # on one device
	$(BIN)/python -m pytest --numprocesses 8 --dist worksteal --durations 20 -m gpu

# mkdocs-material prints at each start that a future MkDocs 2 will not work with it; setup.cfg excludes that.
docs: $(VENV)/tested
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/tested
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

notebooks: $(VENV)/installed
	$(BIN)/python scripts/tools/update_notebooks.py

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(DEMO) build dist site *.egg-info

$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hf_bucketing needs Python 3.10 or newer, this is " + sys.version.split()[0] \
		+ "; name another with make PYTHON=python3.11") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# What only tests need; and three packages apart, which other libraries import wherever they are installed: torchcodec,
# at which datasets fails if it finds no FFmpeg, torchao, at which diffusers prints lines about kernels that it lacks, and
# bitsandbytes, with which peft takes two seconds more to import. It takes steps on CPUs from 0.50 on.
$(VENV)/tested: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--upgrade --target $(VENV)/torchcodec torchcodec
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--upgrade --target $(VENV)/torchao torchao
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps \
		--upgrade --target $(VENV)/bitsandbytes "bitsandbytes>=0.50"
	touch $@
