"""Save the small pipeline of Wan's classes that the demo fine-tunes; its weights come with the package.

python scripts/make_demo_pipeline.py --output_dir demo/tiny-wan
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.demo_trained import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
