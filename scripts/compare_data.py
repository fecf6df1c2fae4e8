r"""Say which rows of two prepared data sets differ, and in what; or of the data of a run and a prepared data set.

python scripts/compare_data.py demo/prepared demo/prepared-again

Compared are hashes that preparing and caching write, and that a run keeps in its output folder: of each row's file,
clip and sizes, captions and conditions. No media is read.
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.compare import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
