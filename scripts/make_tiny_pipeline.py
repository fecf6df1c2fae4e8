"""Save a pipeline with small random weights, to try the training script without a hub.

python scripts/make_tiny_pipeline.py --output_dir demo/tiny-wan
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.demo_pipeline import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
