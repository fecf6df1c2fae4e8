r"""Read the sizes of a data set's images and videos, assign buckets, and save all that training needs.

python scripts/prepare_dataset.py --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan \
    --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25 --output_dir demo/prepared
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.prepare import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
