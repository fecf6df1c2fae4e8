"""The page of other trainers: every row that speaks of one links a file of it, in a commit."""

from __future__ import annotations

import re
from itertools import chain

from tests.docs.pages import PAGES

PAGE = PAGES["docs/compared-with.md"]
PEERS = {
    "SimpleTuner": "bghira/SimpleTuner",
    "ai-toolkit": "ostris/ai-toolkit",
    "OneTrainer": "Nerogar/OneTrainer",
    "musubi-tuner": "kohya-ss/musubi-tuner",
    "diffusion-pipe": "tdrussell/diffusion-pipe",
    "LTX-2 trainer": "Lightricks/LTX-2",
    "finetrainers": "a-r-r-o-w/finetrainers",
}
FILES = dict(re.findall(r"^\[([\w-]+)\]: https://github\.com/([\w./#-]+)$", PAGE.whole, re.MULTILINE))
CHOICES = [row.strip("| ").split(" | ") for row in PAGE.table("## Who should use which?")]
SIZES = [row.strip("|").split("|") for row in PAGE.table("## What becomes of sizes and lengths?")]


def linked(text: str) -> set[str]:
    """Return the repositories whose files a text links."""
    return {"/".join(FILES[name].split("/")[:2]) for name in re.findall(r"\]\[([\w-]+)\]", text)}


def named(text: str) -> set[str]:
    return {repository for name, repository in PEERS.items() if name in text}


def test_each_link_is_a_file_in_a_commit() -> None:
    assert {"/".join(file.split("/")[:2]) for file in FILES.values()} == {*PEERS.values()}
    one_commit = {tuple(file.split("/")[:4]) for file in FILES.values()}
    assert len(one_commit) == len(PEERS)
    assert all(re.match(r"[\w.-]+/[\w.-]+/blob/[0-9a-f]{40}/.+", file) for file in FILES.values())
    assert {*FILES} == {*re.findall(r"\]\[([\w-]+)\]", PAGE.whole)}, "each is used"


def test_each_trainer_that_is_recommended_is_so_by_one_of_its_files() -> None:
    for you, use, since in CHOICES:
        assert named(use) <= linked(since), you
    assert set(chain.from_iterable(named(use) for _, use, _ in CHOICES)) == {*PEERS.values()}


def test_each_claim_about_sizes_and_lengths_links_a_file() -> None:
    rows = {trainer.strip(): cells for trainer, *cells in SIZES}
    assert {*rows} == {*PEERS, "hf_bucketing"}
    for trainer, repository in PEERS.items():
        for cell in rows[trainer]:
            assert not cell.strip() or repository in linked(cell), f"{trainer}: {cell}"
