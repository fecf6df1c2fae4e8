r"""Plan the memory of a training run from a pipeline's configurations: what does not fit, and what makes it fit.

No weight is loaded and no GPU is needed. Memory is in GiB, per process.

python scripts/plan_memory.py Wan-AI/Wan2.1-T2V-14B-Diffusers --gpu_memory 24 --lora_rank 16 --figure memory.png
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.plan import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
