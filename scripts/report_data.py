r"""Show the rows of a prepared data set as a page: what a model will see of each, and what changed in them.

python scripts/report_data.py demo/prepared --html demo/data.html

Beside the page, a folder of its name holds its rows and pictures; both open from a disk, without a server.
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.report_data import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
