"""Write a small data set of generated videos and images, with captions.

python scripts/make_demo_dataset.py --output_dir demo/media
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.demo_data import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
