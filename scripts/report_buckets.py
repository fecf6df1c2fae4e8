r"""Report what a bucket table does to a data set, and compare padding, bucketing and packing on it.

python scripts/report_buckets.py demo/prepared --batch_size 3 --num_processes 2 --max_tokens 640 --strip_length 16 \
    --json demo/report.json --figures demo/report --html demo/report.html
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.report_buckets import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
