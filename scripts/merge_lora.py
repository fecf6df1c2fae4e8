r"""Merge adapters into the transformer of a pipeline, and save a pipeline that needs no adapters.

python scripts/merge_lora.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers runs/lora merged
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.merge import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
