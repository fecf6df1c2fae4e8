"""The logs of a run as they are read, while it trains too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.report import render_page
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.page import run_page
from hf_bucketing.runs.review import loss_charts
from tests.report.test_page import check_complete
from tests.runs.test_page import STEPS, write_run


def test_half_a_line_of_a_run_that_still_trains_is_not_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("losses", "samples-1"):
        log = run / "logs" / f"{name}.jsonl"
        log.write_text(log.read_text()[:-5])
    page = check_complete(render_page(run_page([run])))
    assert ["steps", f"{STEPS - 1}"] in page.tables["Runs"]


def test_logs_without_samples_and_times_are_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "losses.jsonl").write_text(json.dumps({"train_loss": 1.0, "samples": 2}) + "\n")
    with pytest.raises(BucketingError, match=r"losses.jsonl holds no samples and seconds"):
        loss_charts([Logs(tmp_path)])
