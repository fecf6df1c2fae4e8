"""Every measured number of README.md and docs/ comes from a JSON file of a benchmark, and is up to date."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import ROOT, run_script_here
from tests.docs.pages import PAGES, Page

MEASURED = re.compile(
    r"(?<![\w.×/-])\d[\d,.]*(?: (?:million|billion))?"
    r"(?:\s?(?:%|×(?!\s?\d))|\s?[KMGT]i?B\b| (?:per cent|times|bytes|ms|s|seconds?|minutes?|hours?|\w+/s)\b"
    r"|(?: \w+)? per (?:second|minute|hour)\b)"
)

NOT_MEASURED = re.compile(r"\d+ frames per second|GPUs? (?:of|with) \d+ GiB")
"""Frame rates of files and models, and sizes of devices."""

# Other numbers that nobody measured, as the prose of a page has them (without code), and where they come from.
GIVEN = {
    "apart (8 % by default)": "default of `aspect_step`",
    "by at most (10 %)": "default of `tolerance`",
    "where padding is below 90 %": "advice, not a result",
    "lies at 0 seconds": "the time of an image's frame",
    "(their notes are 6.2 to 7.5 s)": "published: stage1.py of Open-Sora, also in open_sora.json",
    "less than 1 % of discrepancy, and 2 to 3 times the speed": "published: the paper of KnapFormer",
    "up to 2.1 times the speed": "published: VideoSys",
    "a limit of 1.02 ×": "setting of scripts/benchmarks/benchmark_knapformer.py",
    "a frame and 10 seconds": "setting of scripts/benchmarks/benchmark_durations.py",
    "at 5 s and at 10 s": "sizes in scripts/benchmarks/benchmark_durations.py",
    "cut to 5 s, and in packs up to 10 s": "the same",
    "for one 24 GB card": "the memory of the GPU that a recipe is for",
    "One 24 GB card": "the memory of the GPU that the page is for",
    "| 16 GB | 24 GB | 80 GB | preset": "the memory of GPUs",
    "some 6 GB with CUDA": "seen once: torch 2.11 for CUDA 13 and its libraries, 4.5 GB, and all else, some 1.5 GB",
    "a constant of 1 GiB": "what `planner/` adds to each plan",
    "at most 60 seconds": "setting of scripts/benchmarks/benchmark_lengths.py",
    "30 % images": "what scripts/benchmarks/benchmark_sampling.py draws",
    "Once they fill 2.5 MB": "limit of `runs/page.py`",
    "whether 24, 48 and 80 GiB hold it": "columns of the page of `hf_bucketing report buckets`",
    "cut off 22.6% of the frames": "an example of a verdict",
    "unless it is over 5 %": "`LIMIT` of `report/verdict.py`",
    "more than 5 % of the rows": "`MOST_DROPPED` of `planner/suggestion.py`",
    "in a stack | 12 % | 8 %": "measured on one H100, `MEASURED` of `planner/gpus.py`",
    "stacked and packed | 24 to 31 % | 16 to 22 %": "the same",
    "stacked and packed | 38 to 45 % | 27 to 32 %": "the same",
    "the range is 12 to 31 %, from there on 24 to 45 %": "the same",
    "NVIDIA publishes 176 TFLOP/s per H100": "published: NVIDIA's DFM, in `planner/gpus.py`",
    "up to 48.2 % of the peak": "published: the paper of NeMo VFM, arXiv 2503.12964",
    "count at 20 GB/s": "a guess, of `planner/suggestion.py`",
    "takes 0.5 GiB, a guess of 2 GiB": "what `planner/host.py` adds to each plan",
    "decoding process 0.1 GiB": "the same",
    "of at most 2,048 tokens (47 seconds)": "positions of sound in Kandinsky 6, by the rate of its audio VAE",
}


def numbers(page: Page) -> list[str]:
    """Return the numbers with units of measurement in a page's prose, with the words around them."""
    prose = NOT_MEASURED.sub("", page.prose)
    for phrase in GIVEN:
        prose = prose.replace(phrase, "")
    return [prose[max(0, match.start() - 30) : match.end() + 20] for match in MEASURED.finditer(prose)]


PEERS = {
    "videosys": ("batches", ("their sizes",), ("limit",)),
    "durations": ("batches", ("one size",), ("data set",)),
}
"""By file: the column that names the ways, how those of others begin, and the columns that two rows must share."""


def test_results_compare_with_others_at_their_best() -> None:
    """Each pair of README's table from rows of one file: no other way of theirs does better on the same data."""
    compared = set()
    for row in PAGES["README.md"].table("## Results"):
        cells = re.findall(r"figure: (\w+)\.json rows\.(\d+)\.(.+?) \.\d[%f] -->", row)
        if not cells:
            continue
        (file, before, measure), (same_file, after, same_measure) = cells
        assert (file, measure) == (same_file, same_measure), row
        rows = json.loads((ROOT / "scripts" / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]
        theirs, ours = rows[int(before)], rows[int(after)]
        name, beginnings, shared = PEERS[file]
        assert theirs[name].startswith(beginnings)
        assert not ours[name].startswith(beginnings)
        others = [
            peer
            for peer in rows
            if peer[name].startswith(beginnings) and all(peer[column] == ours[column] for column in shared)
        ]
        assert theirs in others, "on the same data"
        assert theirs[measure] == max(peer[measure] for peer in others), row
        compared.add(file)
    assert compared == set(PEERS)


def test_figures_in_the_documentation_are_up_to_date() -> None:
    run_script_here("tools/update_docs.py", "--check")


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_prose_begins_with_a_figure(name: str) -> None:
    """Markdown takes a line that begins with a comment for HTML, and ends the paragraph there."""
    assert not re.findall(r"^<!-- figure.*", PAGES[name].text, re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_measured_numbers_come_from_a_file(name: str) -> None:
    found = numbers(PAGES[name])
    assert not found, "write these by a marker of update_docs.py, or list them in GIVEN with a reason"


def test_every_given_number_stands_on_a_page() -> None:
    prose = " ".join(page.prose for page in PAGES.values())
    assert not [phrase for phrase in GIVEN if phrase not in prose]


@pytest.mark.parametrize(
    "text",
    ["3.1 GiB of memory", "4.9× faster", "12 % less", "28 times as fast", "a peak of 300 MB", "in 8 seconds",
     "3,000 per second", "12 rows/s", "5 clips per second", "takes 0.3 s on a core"],
)  # fmt: skip
def test_a_measured_number_is_noticed(text: str) -> None:
    assert numbers(Page("x.md", f"It is {text}."))


@pytest.mark.parametrize(
    "text",
    ["clips of 480×832", "`--max_upscale 2` and `8 %`", "81×480×832 clips", "batches of 8 samples", "Python 3.10",
     "<!-- figure: a.json b .1% -->3.3%<!-- end -->", "a GPU of 80 GiB", "24 frames per second"],
)  # fmt: skip
def test_other_numbers_are_not_measured(text: str) -> None:
    assert not numbers(Page("x.md", f"It is {text}."))
