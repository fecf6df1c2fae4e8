"""Plans of this release, by their hashes, so that a changed order is a decision.

A plan that changes between releases makes saved states resume in another order. If that is meant, run
`python -m tests.plans.test_plan_golden` and write the change into CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from hf_bucketing.plans import EpochPlan
from tests.plans.plan_cases import LOSSY_PLANS, PLANS

GOLDEN = Path(__file__).with_name("golden_plans.json")
MAKERS = {**PLANS, **LOSSY_PLANS}


def hash_of(plan: EpochPlan) -> str:
    columns = (plan.indices, plan.offsets, plan.bucket_ids)
    digest = hashlib.sha256(str(plan.num_processes).encode())
    for column in columns:
        digest.update(column.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def hashes() -> dict[str, dict[str, str]]:
    """The first epoch, one on three processes, and what is left of it after a third of its rows."""
    return {
        name: {
            "1 process": hash_of(make(num_processes=1, epoch=0)),
            "3 processes": hash_of(make(num_processes=3)),
            "rest": hash_of(make(num_processes=2, consumed=make(num_processes=3).indices[:30])),
        }
        for name, make in MAKERS.items()
    }


def test_plans_are_those_of_the_last_release() -> None:
    assert hashes() == json.loads(GOLDEN.read_text()), __doc__


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_hash_tells_plans_apart(make) -> None:
    plans = [make(num_processes=n, epoch=epoch) for n in (1, 2, 3) for epoch in (0, 1)]
    assert len({hash_of(plan) for plan in plans}) == len(plans)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(hashes(), indent=2) + "\n")
