r"""Check on your own model that packing computes the same as running its samples one by one.

python scripts/verify_packing.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers --sizes 5,8,12 1,16,6 3,10,10 --device cuda

Where the model takes references, the second sample has one, the third two, and so on.
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.verify import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
