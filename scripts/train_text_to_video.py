r"""Fine-tune a text-to-video transformer on images and videos of every size and length.

accelerate launch scripts/train_text_to_video.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
    --dataset_dir prepared --output_dir trained --batching pack --max_tokens 32768 --mixed_precision bf16
"""

import argparse
import logging

from hf_bucketing.command_line.flags import FlagParser, from_flags
from hf_bucketing.command_line.script import run_script


def make_parser() -> FlagParser:
    from hf_bucketing.placement.conflicts import OF_THE_LAUNCH, conflicting_settings
    from hf_bucketing.settings import names_of
    from hf_bucketing.training import TrainingConfig
    from hf_bucketing.training.script_settings import TRAINED_ON, settings_of_scripts

    parser = FlagParser(__doc__, TrainingConfig)
    parser.name_conflicts(conflicting_settings([*names_of(TrainingConfig), *OF_THE_LAUNCH]))
    parser.add_config("train_text_to_video", others=settings_of_scripts, names={"dataset_dir": TRAINED_ON})
    return parser


def main(args: argparse.Namespace) -> None:
    from hf_bucketing.training import TrainingConfig, train

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    train(from_flags(TrainingConfig, args), file=args.config)


if __name__ == "__main__":
    run_script(main, make_parser)
