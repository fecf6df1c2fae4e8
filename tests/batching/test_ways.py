"""A way of batching is one module: nothing else asks which way a run takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import hf_bucketing
from hf_bucketing.batching import way_of
from hf_bucketing.batching.ways import WAYS
from hf_bucketing.configuration.batches import BatchConfig
from hf_bucketing.plans.ways import CachedAs, WayName, stacks
from hf_bucketing.settings import marked

PACKAGE = Path(hf_bucketing.__file__).parent
NAMES = "|".join(get_args(WayName))
KINDS = "(?:Bucket|Pack|Length)(?:Step|Grouping|BatchSampler)"
ASKS = re.compile(rf'batching (?:==|!=|in) [("]|[!=]= "(?:{NAMES})"|isinstance\([^)]*\b{KINDS}\b')
NAMED_BY = {
    "configuration/batches.py",  # strips are those of packs
    "plans/ways.py",  # the names themselves
}


def test_every_way_is_one_that_settings_name_and_stacks_as_its_name_says() -> None:
    assert list(WAYS) == [*get_args(WayName)]
    for name, way in WAYS.items():
        assert type(way_of(BatchConfig(batching=name, max_tokens=64))) is way  # type: ignore[arg-type]
        assert way.stacks is stacks(name)  # type: ignore[arg-type]
        assert way.cached_as in get_args(CachedAs)
        assert stacks(way.cached_as) is way.stacks, "a cache holds the sizes of its way"


def test_settings_of_some_ways_name_ways_that_there_are() -> None:
    of_some = marked(BatchConfig, "batching")
    assert of_some
    for ways in of_some.values():
        assert isinstance(ways, tuple)
        assert {*ways} < {*get_args(WayName)}


def test_few_modules_outside_of_batching_name_a_way() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "batching" not in path.relative_to(PACKAGE).parts[:1] and ASKS.search(path.read_text())
    }
    strategies = {"plans/lengths.py"}  # whose `strategy` may be "bucket" too
    assert found - strategies == NAMED_BY
