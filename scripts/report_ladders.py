r"""Print the kept area of token ladders of different steps, that of all reports, and how many buckets they take.

The last line tells what NovelAI's buckets keep.

python scripts/report_ladders.py --bucket_tokens 8190,32760 --bucket_frames 1,17,49,81 \
    --bucket_sizes "480,832;720,1280"
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.report_ladders import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
