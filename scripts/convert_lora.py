r"""Convert LoRA weights of diffusers, ComfyUI or another trainer to those of diffusers or ComfyUI.

python scripts/convert_lora.py kohya.safetensors lora.safetensors --to comfyui \
    --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.convert import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
