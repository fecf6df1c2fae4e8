"""Logs as a run writes them: cut where a checkpoint was made, and begun anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.runs.run_log import RunLog


def test_logs_are_cut_where_the_checkpoint_was_and_never_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"batch": {batch}, "text": "é"}}\n' for batch in range(5)]
    for name in ("samples-0", "samples-1", "losses", "plans"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / f"{name}.jsonl").write_text("".join(lines) + '{"batch": 5, "cut o')

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    log = RunLog(tmp_path, process_index=0, num_processes=1, keep={"samples": 3, "losses": 3, "plans": 0})
    log.write_step("losses", 9, {})
    log.close()
    kept = {path.stem: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept["samples-0"] == kept["samples-1"] == "".join(lines[:3])
    assert kept["losses"] == "".join(lines[:3]) + '{"global_step": 9}\n'
    assert kept["plans"] == ""
    assert "resumes" not in kept, "until there is something to write"
    with pytest.raises(BucketingError, match="has 4 lines, but the checkpoint was made after 6"):
        RunLog(tmp_path, process_index=0, num_processes=1, keep={"samples": 3, "losses": 6})


def test_a_new_run_forgets_the_resumes_of_an_earlier_one(tmp_path: Path) -> None:
    for keep, lines in (({"samples": 0}, 1), ({"samples": 0, "resumes": 1}, 2), (None, 0)):
        log = RunLog(tmp_path, process_index=0, num_processes=1, keep=keep)
        if keep is not None:
            log.write_step("resumes", 3, {})
        log.close()
        assert len((tmp_path / "logs" / "resumes.jsonl").read_text().splitlines()) == lines
