r"""Fine-tune a text-to-video transformer on images and videos of every size and length.

%(prog)s --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
    --dataset_dir prepared --output_dir trained --batching pack --max_tokens 32768 --mixed_precision bf16
"""

from __future__ import annotations

import argparse
import logging
from functools import partial

from ..command_line.config_file import TRAIN
from ..command_line.flags import FlagParser, from_flags
from ..command_line.script import run_script


def make_parser() -> FlagParser:
    from ..placement.conflicts import OF_THE_LAUNCH, conflicting_settings
    from ..settings import names_of
    from ..training import TrainingConfig
    from .script_settings import TRAINED_ON, settings_of_scripts

    parser = FlagParser(__doc__, TrainingConfig)
    parser.name_conflicts(conflicting_settings([*names_of(TrainingConfig), *OF_THE_LAUNCH]))
    parser.add_config(TRAIN, others=settings_of_scripts, names={"dataset_dir": TRAINED_ON})
    return parser


def main(args: argparse.Namespace) -> None:
    from ..training import TrainingConfig, train
    from .script_settings import settings_kept

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    file = args.config
    kept = None if file is None else partial(settings_kept, file)
    train(from_flags(TrainingConfig, args), file=file, kept=kept)


if __name__ == "__main__":
    run_script(main, make_parser)
