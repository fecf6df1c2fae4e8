r"""Fine-tune a text-to-video transformer on images and videos of every size and length.

accelerate launch scripts/train_text_to_video.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
    --dataset_dir prepared --output_dir trained --batching pack --capacity 32768 --mixed_precision bf16
"""

import argparse
import logging

from hf_bucketing.errors import exit_with_message


def main() -> None:
    from transformers import HfArgumentParser  # here, as each worker of the loader imports this file, too

    from hf_bucketing.training import TrainingConfig, train

    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    parser = HfArgumentParser(
        TrainingConfig, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    (config,) = parser.parse_args_into_dataclasses()
    train(config)


if __name__ == "__main__":
    exit_with_message(main)
