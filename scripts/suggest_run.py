r"""Suggest runs that fit: bucket table, buckets or packs, tokens per step, memory options, and how long they take.

python scripts/suggest_run.py --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan --target_fps 8 \
    --gpu_memory 24 --output_dir demo/suggested

Headers are read once, no weight is loaded, and no GPU is needed. The best three runs are written as config files,
which scripts/prepare_dataset.py, cache_latents.py and train_text_to_video.py take with --config.
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.suggest import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
