"""Any run can be recounted from its logs, and a line that is lost, doubled or moved is always found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_bucketing import BucketingError, BucketTable, CostModel, LatentSpec, Size
from hf_bucketing.adapters.settings import SETTINGS
from hf_bucketing.loaders import BucketBatchSampler, LengthBatchSampler, PackBatchSampler
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.recount import recount
from hf_bucketing.runs.review import review_run
from hf_bucketing.runs.run_log import RunLog, log_path, write_status

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(9, 64, 64)), base=0)
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
IDS = np.random.default_rng(0).integers(-1, 3, 41)
TOKENS = np.random.default_rng(1).integers(0, 40, 41)


def buckets(**options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(IDS, table=TABLE, **{"batch_size": 2, **options})


def packs(**options: Any) -> PackBatchSampler:
    cost = {"cost_model": CostModel(linear=1, quadratic=0.1), "balance": "cost"}
    return PackBatchSampler(TOKENS, max_tokens=90, strip_length=1, **cost, **options)


def lengths(**options: Any) -> LengthBatchSampler:
    return LengthBatchSampler(TOKENS, max_tokens=120, num_buckets=3, **options)


class PretendedRun:
    """Log what the training loop logs of a sampler's plans, without a model.

    Args:
        folder (`Path`): Output folder.
        make (callable): Makes the sampler for a number of processes.
        accumulation (`int`): Batches per optimizer step.
        replaced (set of `int`): Rows that cannot be read, each replaced by the next one.
        skipped (tuple of `int`): Optimizer steps that change no weights.
    """

    def __init__(
        self,
        folder: Path,
        make: Callable[..., Any] = buckets,
        *,
        accumulation: int = 1,
        replaced: frozenset[int] = frozenset(),
        skipped: tuple[int, ...] = (),
    ) -> None:
        self.folder, self.make, self.accumulation = folder, make, accumulation
        self.replaced, self.skipped = replaced, skipped
        self.state: Any = None
        self.keep: dict[str, int] | None = None
        self.global_step = 0

    def train(self, processes: int, *, epochs: int = 2, stop: int | None = None, status: Any = "finished") -> Path:
        """Train from the start or from the last call's checkpoint to the end or an optimizer step."""
        logs = [
            RunLog(self.folder, process_index=process, num_processes=processes, keep=self.keep)
            for process in range(processes)
        ]
        sampler = self.make(num_processes=processes)
        if self.state is not None:
            sampler.load_state_dict(self.state)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            plan = sampler.plan()
            if sampler.first_step == 0:
                logs[0].write_plan(epoch, plan.summary())
            if self._epoch(logs, plan, sampler, stop=stop):
                break
        if status is not None:
            end = {"global_step": self.global_step, "max_train_steps": stop if status == "finished" and stop else 1000}
            if status == "finished" and not stop:
                end["max_train_steps"] = self.global_step
            write_status(self.folder, status, **end, lines=logs[0].state_dict())
        for log in logs:
            log.close()
        return self.folder

    def _epoch(self, logs: list[RunLog], plan: Any, sampler: Any, *, stop: int | None) -> bool:
        """Log the steps of an epoch; return whether the run stops in it."""
        window = samples = 0
        for step in range(sampler.first_step, plan.num_steps):
            for process, log in enumerate(logs):
                position = step * len(logs) + process
                rows, bucket = plan.batch(position).tolist(), int(plan.bucket_ids[position])
                index = [row + 1000 if row in self.replaced else row for row in rows]
                bucket_id = bucket if bucket >= 0 else (0 if self.make is buckets else None)
                if bucket < 0 and self.make is buckets:
                    bucket_id = int(IDS[rows[0]])
                loss = [1.0] * len(rows)
                log.write_samples(
                    epoch=sampler.epoch, step=step, bucket_id=bucket_id, index=index, loss=loss, planned=rows
                )
                samples += len(rows)
            window += 1
            if window < self.accumulation and step < plan.num_steps - 1:
                continue
            self.global_step += 1
            entry = {"train_loss": 2.0 / self.global_step, "samples": samples, "busy_batches": window, "seconds": 0.5}
            if self.global_step in self.skipped:
                entry["skipped"] = True
                logs[0].write_step("skipped", self.global_step, {"index": []})
            logs[0].write_step("losses", self.global_step, {**entry, "epoch": sampler.epoch})
            window = samples = 0
            if self.global_step == stop:
                self.keep, self.state = logs[0].state_dict(), sampler.state_dict(step=step + 1)
                return True
        return False


def stream(folder: Path, *, ids: list[list[list[int]]], began: list[int]) -> Path:
    """Log a stream on two processes; `ids` are the rows of each epoch, step and process in turn."""
    logs = [RunLog(folder, process_index=process, num_processes=2) for process in range(2)]
    global_step = 0
    for epoch, (steps, start) in enumerate(zip(ids, began, strict=True)):
        logs[0].write_plan(epoch, {"num_processes": 2, "pass_began": start})
        for step in range(len(steps) // 2):
            pair = steps[2 * step : 2 * step + 2]
            for log, index in zip(logs, pair, strict=True):
                log.write_samples(epoch=epoch, step=step, bucket_id=0, index=index, loss=[1.0] * len(index))
            global_step += 1
            entry = {"train_loss": 1 / global_step, "samples": sum(map(len, pair)), "busy_batches": 1, "epoch": epoch}
            logs[0].write_step("losses", global_step, entry)
    end = {"global_step": global_step, "max_train_steps": global_step}
    write_status(folder, "finished", **end, lines=logs[0].state_dict())
    return folder


def elastic(folder: Path, make: Callable[..., Any] = buckets, **options: Any) -> Path:
    """Train on two processes, go on with three in mid-epoch and with one in the same, and end on two."""
    run = PretendedRun(folder, make, **options)
    for processes, stop in ((2, 3), (3, 4), (1, 6), (2, None)):
        run.train(processes, stop=stop)
    return folder


def resumed(folder: Path, *, at_end_of_epoch: bool) -> Path:
    run = PretendedRun(folder)
    steps = buckets(num_processes=2).plan(0).num_steps
    stop = steps if at_end_of_epoch else 4
    run.train(2, stop=stop)
    run.train(2 if not at_end_of_epoch else 3)
    return folder


def killed(folder: Path, *, processes: int = 1, **options: Any) -> Path:
    """A run that was resumed after it had logged more than its checkpoint holds."""
    run = PretendedRun(folder, **options)
    run.train(2, stop=5, status="running")
    state = run.state, run.keep, 5
    run.train(2, stop=9, status="running")
    run.state, run.keep, run.global_step = state
    run.train(processes)
    return folder


ROWS = [[0, 1], [2, 3], [4, 5], [6], [7], []]
RUNS: dict[str, Callable[[Path], Path]] = {
    "buckets": lambda folder: PretendedRun(folder).train(2),
    "packs": lambda folder: PretendedRun(folder, packs).train(3),
    "lengths": lambda folder: PretendedRun(folder, lengths).train(2),
    "accumulation": lambda folder: PretendedRun(folder, accumulation=3).train(2),
    "max_train_steps": lambda folder: PretendedRun(folder, accumulation=2).train(2, stop=6),
    "one epoch, cut": lambda folder: PretendedRun(folder).train(2, stop=3),
    "replaced": lambda folder: PretendedRun(folder, replaced=frozenset({3, 7, 8})).train(2),
    "skipped": lambda folder: PretendedRun(folder, skipped=(2, 5)).train(2),
    "repeated rows": lambda folder: PretendedRun(folder, lambda **o: buckets(remainder="repeat", **o)).train(2),
    "weights": lambda folder: PretendedRun(folder, lambda **o: buckets(weights={0: 2.0, 1: 0.5}, **o)).train(2),
    "catch-all": lambda folder: PretendedRun(folder, lambda **o: buckets(remainder="catch_all", **o)).train(2),
    "elastic": elastic,
    "elastic packs": lambda folder: elastic(folder, packs, accumulation=2),
    "elastic weights": lambda folder: elastic(folder, lambda **o: buckets(weights={0: 2.0, 1: 0.5}, **o)),
    "elastic repeats": lambda folder: elastic(folder, lambda **o: buckets(remainder="repeat", **o)),
    "resumed": lambda folder: resumed(folder, at_end_of_epoch=False),
    "resumed at the end of an epoch": lambda folder: resumed(folder, at_end_of_epoch=True),
    "killed and resumed": killed,
    "stream": lambda folder: stream(folder, ids=[ROWS, ROWS[::-1]], began=[0, 1]),
    "stream in short epochs": lambda folder: stream(folder, ids=[ROWS[:2], ROWS[2:], ROWS[:4]], began=[0, 0, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_correct_run_passes(name: str, tmp_path: Path) -> None:
    review = review_run(Logs(RUNS[name](tmp_path)))
    assert review.passed, str(review)
    assert recount(Logs(tmp_path)).faults == []


def lines_of(folder: Path) -> dict[Path, list[str]]:
    logs = {path: path.read_text().splitlines() for path in sorted((folder / "logs").glob("*.jsonl"))}
    return {path: lines for path, lines in logs.items() if lines}


def mutations(lines: list[str]) -> list[list[str]]:
    """Return the lines with each lost, doubled at once and at the end, or swapped, and in other orders or cut."""
    rng = np.random.default_rng(len(lines))
    places = range(len(lines))
    changed = [[*lines[:at], *lines[at + 1 :]] for at in places]
    changed += [[*lines[: at + 1], *lines[at:]] for at in places]
    changed += [[*lines, lines[at]] for at in places]
    changed += [[*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]] for at in places[:-1]]
    changed += [[lines[at] for at in rng.permutation(len(lines))] for _ in range(5)]
    changed += [lines[: int(rng.integers(len(lines)))] for _ in range(3)]
    return [mutation for mutation in changed if mutation != lines]


@pytest.mark.parametrize("name", RUNS)
def test_every_line_that_is_lost_doubled_or_moved_is_reported(name: str, tmp_path: Path) -> None:
    folder = RUNS[name](tmp_path)
    missed, total = [], 0
    for path, lines in lines_of(folder).items():
        for mutation in mutations(lines):
            path.write_text("".join(f"{line}\n" for line in mutation))
            total += 1
            try:
                if review_run(Logs(folder)).passed:
                    missed.append((path.name, len(lines), len(mutation)))
            except BucketingError:
                assert not mutation  # a log without a line
        path.write_text("".join(f"{line}\n" for line in lines))
    assert total > 50
    assert missed == []


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    folder = elastic(tmp_path)
    path = log_path(folder, "samples", 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], *lines[3:], ""]))
    assert recount(Logs(folder)).faults[0].startswith("line 3 of samples-1.jsonl is batch ")
    assert "expected was batch 2 of epoch 0, step 2" in recount(Logs(folder)).faults[0]
    assert "FAILED  the logs are not those of whole steps: line 3 of samples-1.jsonl" in str(review_run(Logs(folder)))
    path.unlink()
    assert "line 1 of samples-1.jsonl is missing, expected was batch 0" in str(review_run(Logs(folder)))


def test_steps_of_two_experts_are_counted_and_must_come_evenly(tmp_path: Path) -> None:
    folder = PretendedRun(tmp_path).train(2)
    path = log_path(folder, "losses")
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def faults(experts: str) -> list[str]:
        names = {"h": {"expert": "transformer"}, "l": {"expert": "transformer_2"}, "-": {}}
        steps = zip(lines, experts * len(lines), strict=False)
        path.write_text("".join(json.dumps({**line, **names[expert]}) + "\n" for line, expert in steps))
        return recount(Logs(folder)).faults

    assert len(lines) >= 12
    assert faults("llhlhllh") == []
    counted = recount(Logs(folder)).experts
    assert sum(counted.values()) == len(lines)
    assert counted["transformer_2"] > counted["transformer"]
    assert f"{counted['transformer']} of transformer" in str(review_run(Logs(folder)))
    assert "do not take turns evenly: the rarer one after 1 to 6 steps" in faults("lhhllll")[0]
    assert faults("llhll-")[0].endswith("optimizer steps name no expert, though others do")


def test_rows_that_differ_from_the_plan_are_reported(tmp_path: Path) -> None:
    folder = PretendedRun(tmp_path).train(2)
    path = log_path(folder, "samples", 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    def passes(line: int, **values: object) -> bool:
        changed = [*lines[:line], {**lines[line], **values}, *lines[line + 1 :]]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in changed))
        return review_run(Logs(folder)).passed

    assert passes(0)
    assert not passes(0, index=lines[1]["index"])  # a row twice, another never
    assert not passes(0, index=[*lines[0]["index"], 99])
    assert not passes(0, bucket_id=(lines[0]["bucket_id"] + 1) % 3)
    assert not passes(len(lines) - 1, epoch=7)


def test_an_interrupted_run_is_said_to_be_one(tmp_path: Path) -> None:
    run = PretendedRun(tmp_path)
    review = review_run(Logs(run.train(2, stop=7, status="interrupted")))
    assert str(review.checks[0]) == "  FAILED  7 of 1000 optimizer steps, interrupted"
    assert [check.holds for check in review.checks[1:]].count(False) == 0
    assert "7 optimizer steps, too few to compare tenths" in str(review)
    planned = buckets(num_processes=2).plan(0).num_steps
    assert f"in 1 of 1 epochs, as far as they go: 7 of {planned} steps in the last" in str(review)
    finished = review_run(Logs(run.train(2)))
    assert finished.passed
    assert str(finished.checks[0]).startswith("  holds   ")
    assert str(finished.checks[0]).endswith("optimizer steps, finished")


def test_what_a_killed_run_logged_after_its_last_optimizer_step_is_named_and_not_counted(tmp_path: Path) -> None:
    folder = PretendedRun(tmp_path, accumulation=2).train(2, stop=8, status="running")
    path = log_path(folder, "losses")
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines()[:-1]))
    review = review_run(Logs(folder))
    assert "7 of 1000 optimizer steps, still running or killed" in str(review)
    assert "and 2 after the last optimizer step that are not counted" in str(review)
    (folder / "logs" / "status.json").unlink()
    assert "7 optimizer steps, its end was not logged" in str(review_run(Logs(folder)))


def test_replaced_and_skipped_samples_are_named(tmp_path: Path) -> None:
    folder = PretendedRun(tmp_path, replaced=frozenset(np.flatnonzero(IDS >= 0)[:2].tolist()), skipped=(2, 5)).train(2)
    said = str(review_run(Logs(folder)))
    assert recount(Logs(folder)).replaced in (3, 4)  # in two epochs, of each of which one row at most is dropped
    assert "unreadable samples were replaced" in said
    assert "; 2 changed no weights, as loss or gradients were not finite: 2, 5" in said


def test_replaced_samples_are_those_that_were_trained_also_after_a_resume(tmp_path: Path) -> None:
    replaced = {"replaced": frozenset(range(0, 41, 3))}
    at_once = recount(Logs(PretendedRun(tmp_path / "at once", **replaced).train(2))).replaced
    assert recount(Logs(killed(tmp_path / "killed", processes=2, **replaced))).replaced == at_once > 10


def test_dropped_remainders_pass_where_they_were_asked_for(tmp_path: Path) -> None:
    folder = PretendedRun(tmp_path, lambda **o: buckets(remainder="drop", **o)).train(2)
    assert not review_run(Logs(folder)).passed
    (folder / SETTINGS).write_text(json.dumps({"remainder": "drop"}))
    assert review_run(Logs(folder)).passed
    assert 'dropped per epoch, as `remainder="drop"` asks for' in str(review_run(Logs(folder)))


@pytest.mark.parametrize(("ids", "began", "message"), [
    ([[[0], [1], [0], [2]]], [0], "began in epoch 0 holds 1 rows twice"),
    ([[[0], [1]], [[2], [0]]], [0, 0], "began in epoch 0 holds 1 rows twice"),
    ([[[0], [1]], [[0], [2]], [[0], [1]]], [0, 1, 2], "began in epoch 1 holds other rows than the one before"),
    ([[[0], [1]], [[0], [2]]], [0, 1], "began in epoch 1 holds other rows than the one before"),
])  # fmt: skip
def test_a_pass_over_a_stream_holds_each_row_once_and_the_same_rows(ids, began, message: str, tmp_path: Path) -> None:
    review = review_run(Logs(stream(tmp_path, ids=ids, began=began)))
    assert message in str(review)
    assert not review.passed
