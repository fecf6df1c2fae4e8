r"""Write the figures of README.md and docs/ from the JSON files of the benchmarks, or check that they are up to date.

python scripts/tools/update_docs.py

A figure in Markdown is `<!-- figure: FILE KEY FORMAT -->0.97<!-- end -->`, and a table is the same with `table:`
around its lines. FILE is a file of scripts/benchmarks/results, KEY a path such as `mixes.0.fill`, whose names may hold
blanks, and FORMAT, which may be omitted, Python's format of floats, such as `.1%`; texts are written as they are, and
whole numbers as counts, but for a single figure in percent. The value of a table is a list of its rows, each a JSON
object with the same names. No line of prose may start with a figure, as Markdown ends the paragraph there.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_bucketing import BucketingError
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file
from hf_bucketing.report.markdown import figure_text, markdown_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "benchmarks" / "results"
MARKED = re.compile(r"<!-- (figure|table): (\S+) ([^>]+?)(?: ([.,+]\S+))? -->(.*?)<!-- end -->", re.DOTALL)


@functools.cache
def figures_of(file: str) -> Any:
    if not (RESULTS / file).is_file():
        raise BucketingError(f"{RESULTS / file} does not exist; figures come from files of that folder.")
    return json.loads((RESULTS / file).read_text())


def value_at(file: str, key: str) -> Any:
    """Return the value at a path of names and positions, `a.0.b`."""
    value = figures_of(file)
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BucketingError(f"{file} has no {key!r}: nothing at {part!r}.") from error
    return value


def filled(text: str) -> str:
    """Return Markdown with the figures that its files hold now."""

    def replace(match: re.Match[str]) -> str:
        kind, file, key, form, _ = match.groups()
        value = value_at(file, key)
        if kind == "figure" and form is not None and form.endswith("%") and type(value) is int:
            value = float(value)  # a share of 0 or 1
        content = figure_text(value, form) if kind == "figure" else f"\n\n{markdown_table(value, form)}\n\n"
        start = match[0].partition("-->")[0]
        return f"{start}-->{content}<!-- end -->"

    return MARKED.sub(replace, text)


def documents() -> Iterator[Path]:
    """Yield the files that hold figures."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--check", action="store_true", help="Change nothing; fail if a file is out of date.")
    return parser


def main(args: argparse.Namespace) -> None:
    outdated = [path for path in documents() if filled(path.read_text()) != path.read_text()]
    names = ", ".join(str(path.relative_to(ROOT)) for path in outdated)
    if args.check and outdated:
        sys.exit(f"Figures are out of date in {names}; run python scripts/tools/update_docs.py.")
    for path in outdated:
        with complete_file(path) as partial:
            partial.write_text(filled(path.read_text()))
    print(f"Updated: {names}" if outdated else "All figures are up to date.")


if __name__ == "__main__":
    run_script(main, make_parser)
