r"""Fine-tune a text-to-video transformer on images and videos of every size and length.

accelerate launch scripts/train_text_to_video.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
    --dataset_dir prepared --output_dir trained --batching pack --max_tokens 32768 --mixed_precision bf16
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.train import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
