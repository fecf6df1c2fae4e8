r"""Check training runs by their logs (every sample seen, equal steps, a falling loss); show and draw their losses.

python scripts/report_training.py demo/bucket demo/pack --figure demo/loss.png --html demo/run.html
"""

from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.report_run import main, make_parser

if __name__ == "__main__":
    run_script(main, make_parser)
