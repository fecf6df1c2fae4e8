r"""Encode the latents and captions of a prepared data set once, for training that decodes and encodes nothing.

python scripts/cache_latents.py --dataset_dir demo/prepared --pretrained_model_name_or_path demo/tiny-wan \
    --cache_dir demo/cache --output_dir demo/cached

Also under `accelerate launch`: each process encodes its share. Run again, it encodes only what is missing or changed.
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.cache import INTERRUPTED, main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser, interrupted=INTERRUPTED)
