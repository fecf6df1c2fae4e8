r"""Run the notebooks and store their outputs in them, or check the texts that they store.

python scripts/tools/update_notebooks.py notebooks/01_buckets.ipynb

Results, prints and figures are stored, warnings and logs are not. The check does not compare figures, nor numbers such
as 2.5e-07, which are differences of rounding: both depend on the machine.
"""

import argparse
import difflib
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from hf_bucketing import BucketingError
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SHOWN = ("text/html", "image/png")
"""Forms of a result that replace its text."""
ROUNDING = re.compile(r"\b\d\.\de-\d\d\b|\b0\.0e\+00\b")


def executed(path: Path) -> NotebookNode:
    """Return a notebook after a run from top to bottom, in an empty folder that it must leave empty.

    Raises:
        BucketingError: If the notebook leaves files.
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook,
            timeout=1000,
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources=resources,
            record_timing=False,
        ).execute()
        if left := os.listdir(folder):
            raise BucketingError(f"{path.name} leaves {', '.join(left)}; a notebook cleans up after itself.")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [stored(output) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def stored(output: NotebookNode) -> NotebookNode:
    """Return an output without the text that describes its HTML or its picture."""
    if output.output_type != "stream" and any(form in output.data for form in SHOWN):
        output.data = {form: value for form, value in output.data.items() if form in SHOWN}
    return output


def texts_of(notebook: NotebookNode) -> list[str]:
    """Return the lines of prints, tables and results, with … for numbers such as 2.5e-07 and 0.0e+00."""
    lines = []
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            data = {"text/plain": output.text} if output.output_type == "stream" else output.data
            text = "\n".join(value for form, value in data.items() if form.startswith("text/"))
            lines += [f"cell {number}: {line}" for line in ROUNDING.sub("…", text).splitlines()]
    return lines


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, help="Files to run; all by default.")
    parser.add_argument("--check", action="store_true", help="Change nothing; fail if a stored text is out of date.")
    return parser


def main(args: argparse.Namespace) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for path in args.notebooks:
        notebook = executed(path)
        if not args.check:
            with complete_file(path) as partial:
                nbformat.write(notebook, partial)
            print(f"Wrote {path}, {path.stat().st_size // 1000} kB.")
        elif changes := list(difflib.unified_diff(texts_of(nbformat.read(path, 4)), texts_of(notebook), lineterm="")):
            sys.exit(
                "\n".join([*changes, f"{path} stores other outputs; run python scripts/tools/update_notebooks.py."])
            )
        else:
            print(f"{path} is up to date.")


if __name__ == "__main__":
    run_script(main, make_parser)
