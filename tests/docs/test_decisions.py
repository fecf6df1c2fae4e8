"""Every decision of docs/decisions has its reason and the tests that show it, and names files that exist."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES

DECISIONS = {
    f"{name}: {section.partition(chr(10))[0]}": section
    for name, page in PAGES.items()
    if name.startswith("docs/decisions/")
    for section in page.whole.split("\n## ")[1:]
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_has_a_reason_and_tests(name: str) -> None:
    assert "\n**Why.** " in DECISIONS[name]
    (tests,) = re.findall(r"\n\*\*Tests\.\*\* (.*)", DECISIONS[name], re.DOTALL)
    assert re.search(r"`tests/\w+/test_\w+\.py`|`tests/test_\w+\.py`", tests)


@pytest.mark.parametrize("name", [*DECISIONS, "ARCHITECTURE.md"])
def test_a_decision_names_files_that_exist(name: str) -> None:
    text = DECISIONS.get(name) or (ROOT / name).read_text()
    for path in re.findall(r"`([\w/]+/(?:\w+\.(?:py|json))?)`", text):
        assert (ROOT / path).exists() or (ROOT / "hf_bucketing" / path).exists(), path


def test_the_architecture_leads_to_every_page_of_decisions() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert {name.partition(":")[0] for name in DECISIONS} == set(re.findall(r"\]\((docs/decisions/\w+\.md)\)", text))
