"""Recount of a run: whether its logs are whole, and what the samples of each epoch add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise, zip_longest
from typing import Any, NamedTuple

from ..errors import BucketingError
from .logs import Line, Logs


class Leg(NamedTuple):
    """Steps that one plan covers; an epoch that was resumed on other numbers of processes has several legs.

    Attributes:
        plan (mapping): The plan's line in the log; of a stream, without a number of steps.
        start (`int`): First batch, counted over the whole run.
        steps (`int`): Steps that were trained.
        different (`int`): Different rows in them that the epoch did not hold before; views, where all views are rows.
        samples (`int`): Samples in them.
        mixed_steps (`int`): Steps in which the processes held different buckets.
        has_buckets (`bool`): Whether the batches have buckets.
    """

    plan: Line
    start: int
    steps: int
    different: int
    samples: int
    mixed_steps: int
    has_buckets: bool

    @property
    def complete(self) -> bool:
        """Whether all steps of the plan were trained; those of a stream are not known."""
        return self.steps == self.plan.get("num_steps", self.steps)


class Recount(NamedTuple):
    """What the logs of a run add up to.

    Attributes:
        status (mapping): How the run ended, with its steps; empty if that was not logged.
        steps (`int`): Optimizer steps.
        batches (`int`): Batches of each process in them.
        unfinished (`int`): Batches after the last optimizer step, which are not counted.
        skipped (list of `int`): Optimizer steps that changed no weights.
        experts (mapping of `str` to `int`): Optimizer steps of each transformer, where a run trains two.
        replaced (`int`): Unreadable samples that were replaced.
        epochs (mapping of `int` to list of [`Leg`]): Legs of each epoch.
        faults (list of `str`): What is wrong with lines or counts.
    """

    status: Line
    steps: int
    batches: int
    unfinished: int
    skipped: list[int]
    experts: dict[str, int]
    replaced: int
    epochs: dict[int, list[Leg]]
    faults: list[str]


def recount(logs: Logs) -> Recount:
    """Go through the logs of a run line by line.

    Optimizer steps, batches and plans are numbered without a gap, each batch has one line of every process that took
    part, each optimizer step holds as many samples as the lines of its batches, plans follow one another as epochs and
    their legs do, and a run that ended has noted how many lines it wrote. So a line that is lost, doubled or moved is
    always found. Of a run that was killed, nothing says where its logs ended: what follows its last optimizer step is
    not counted.

    Raises:
        BucketingError: If the run left no logs, or those of an earlier release.
    """
    if not logs.losses or not logs.plans or any("busy_batches" not in line for line in logs.losses):
        raise BucketingError(
            f"The logs in {logs.folder} cannot be recounted: there is no optimizer step or no plan yet, or an earlier "
            "release wrote them."
        )
    batches = sum(line["busy_batches"] for line in logs.losses)
    legs: list[Leg] = []
    faults = list(_misnumbered(logs))
    if not faults:
        legs, faults = _legs(logs, batches)
        faults += _missing(logs, legs, batches)
    if not faults:
        faults = [*_unlike_losses(logs), *_uneven_experts(logs), *_unlike_plans(legs), *_unlike_passes(logs, legs)]
    counted = [line for line in logs.batches if line["batch"] < batches]
    return Recount(
        status=logs.status,
        steps=len(logs.losses),
        batches=batches,
        unfinished=max(map(len, logs.samples)) - batches,
        skipped=[line["global_step"] for line in logs.losses if line.get("skipped")],
        experts={name: len(lines) for name, lines in logs.by_expert.items()},
        replaced=count_replaced(counted),
        epochs={epoch: list(group) for epoch, group in groupby(legs, lambda leg: int(leg.plan["epoch"]))},
        faults=faults,
    )


def count_replaced(lines: Iterable[Line]) -> int:
    """Return how many samples of lines of batches took the place of unreadable ones."""
    return sum(row != planned for line in lines for row, planned in zip(line["index"], _planned(line), strict=True))


def _has_ended(logs: Logs) -> bool:
    """Return whether the run has said how it ended; others may have been killed at any line."""
    return bool(logs.status.get("status", "running") != "running")


def _misnumbered(logs: Logs) -> Iterator[str]:
    """Yield what is wrong with the numbers of lines, and with how many there are of each log."""
    numbers = {
        "losses.jsonl": ([line["global_step"] for line in logs.losses], range(1, len(logs.losses) + 1)),
        "plans.jsonl": ([line.get("leg", leg) for leg, line in enumerate(logs.plans)], range(len(logs.plans))),
        "samples-0.jsonl": ([line["batch"] for line in logs.samples[0]], range(len(logs.samples[0]))),
    }
    for name, (numbers_of_lines, wanted) in numbers.items():
        for line, (number, right) in enumerate(zip(numbers_of_lines, wanted, strict=True), 1):
            if number != right:
                yield f"line {line} of {name} has number {number} instead of {right}"
                break
    steps = [line["global_step"] for line in logs.losses if line.get("skipped")]
    if steps != [line["global_step"] for line in logs.skipped]:
        yield "losses.jsonl and skipped.jsonl name different steps"
    if _has_ended(logs):
        lines = {"losses": logs.losses, "plans": logs.plans, "samples": logs.samples[0]}
        for name, wanted_lines in logs.status.get("lines", {}).items():
            if name in lines and len(lines[name]) != wanted_lines:
                yield f"the run wrote {wanted_lines} lines of {name}, and {len(lines[name])} are left"


def _legs(logs: Logs, batches: int) -> tuple[list[Leg], list[str]]:
    """Return the legs of a run by the lines of process 0, which takes part in all; and what no plan explains."""
    lines = [line for line in logs.samples[0] if line["batch"] < batches]
    by_batch: dict[int, list[Line]] = {}
    for line in logs.batches:
        by_batch.setdefault(line["batch"], []).append(line)
    legs: list[Leg] = []
    start, seen = 0, Counter[tuple[int, int]]()
    for plan in logs.plans:
        stop = start
        while stop < len(lines) and _place(lines[stop]) == (plan["epoch"], stop - start):
            stop += 1
        if not legs or legs[-1].plan["epoch"] != plan["epoch"]:
            seen = Counter()
        together = [line for batch in range(start, stop) for line in by_batch[batch]]
        rows = Counter(sample for line in together for sample in _samples(line))
        has_buckets = all(line["bucket_id"] is not None for line in together)
        new = len(rows.keys() - seen.keys())
        legs.append(Leg(plan, start, stop - start, new, rows.total(), _mixed(together), has_buckets))
        seen += rows
        start = stop
    if start == len(lines):
        return legs, []
    epoch, step = _place(lines[start])
    return legs, [f"no plan leads to batch {start}, of epoch {epoch} and step {step}"]


def _missing(logs: Logs, legs: Sequence[Leg], batches: int) -> Iterator[str]:
    """Yield which processes lack batches, or have others than those of the legs in which they took part."""
    processes = max(leg.plan["num_processes"] for leg in legs)
    if len(logs.samples[0]) < batches:
        yield f"the optimizer steps took {batches} batches, but samples-0.jsonl has {len(logs.samples[0])}"
    for process in range(max(processes, len(logs.samples))):
        wanted = [
            (leg.start + step, leg.plan["epoch"], step)
            for leg in legs
            if process < leg.plan["num_processes"]
            for step in range(leg.steps)
        ]
        lines = logs.samples[process] if process < len(logs.samples) else []
        places = [(line["batch"], *_place(line)) for line in lines]
        rest = places[len(wanted) :]
        if places[: len(wanted)] != wanted or [batch for batch, *_ in rest] != [*range(batches, batches + len(rest))]:
            pairs = enumerate(zip_longest(places, wanted, fillvalue=None))
            first, (got, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
            yield f"line {first + 1} of samples-{process}.jsonl is {_named(got)}, expected was {_named(right)}"
        elif rest and logs.status.get("status") == "finished":
            yield f"samples-{process}.jsonl has {len(rest)} batches after the last optimizer step"


def _unlike_losses(logs: Logs) -> Iterator[str]:
    """Yield the first optimizer step that counted other samples than the lines of its batches hold."""
    if _has_ended(logs) and len(logs.losses) != logs.status["global_step"]:
        yield f"the run ended after {logs.status['global_step']} optimizer steps, and {len(logs.losses)} are logged"
    samples = Counter[int]()
    for line in logs.batches:
        samples[line["batch"]] += len(line["index"])
    first = 0
    for line in logs.losses:
        window = range(first, first := first + line["busy_batches"])
        counted = sum(samples[batch] for batch in window)
        epochs = {logs.samples[0][batch]["epoch"] for batch in window}
        if counted != line["samples"] or epochs != {line["epoch"]}:
            yield (
                f"optimizer step {line['global_step']} of epoch {line['epoch']} counted {line['samples']} samples, "
                f"the lines of its batches hold {counted} of epoch {', '.join(map(str, sorted(epochs)))}"
            )
            return


def _uneven_experts(logs: Logs) -> Iterator[str]:
    """Yield whether some steps name no expert, or the rarer one does not come at even distances."""
    places = [[line["global_step"] for line in lines] for lines in logs.by_expert.values()]
    if not places:
        return
    if missing := len(logs.losses) - sum(map(len, places)):
        yield f"{missing} optimizer steps name no expert, though others do"
    rarer = min(places, key=len)
    distances = {later - earlier for earlier, later in pairwise(rarer)}
    if distances and max(distances) - min(distances) > 1:
        yield f"the experts do not take turns evenly: the rarer one after {min(distances)} to {max(distances)} steps"


def _unlike_plans(legs: Sequence[Leg]) -> Iterator[str]:
    """Yield where plans do not follow one another, or end before the next epoch."""
    before: Leg | None = None
    taken, repeats = 0, False
    for leg in legs:
        epoch, consumed = leg.plan["epoch"], leg.plan.get("consumed", 0)
        if before is None or before.plan["epoch"] != epoch:
            if before is not None and not before.complete:
                of = f"{before.steps} of {before.plan['num_steps']} steps"
                yield f"epoch {before.plan['epoch']} ended after {of}, though another epoch followed"
            if consumed or epoch != (0 if before is None else before.plan["epoch"] + 1):
                yield f"the plan of epoch {epoch} after {consumed} of its samples stands at a wrong place"
            taken, repeats = 0, False
        elif consumed > taken or (consumed < taken and not repeats):
            yield f"a leg of epoch {epoch} was planned after {consumed} samples, but {taken} were taken before it"
        if leg.steps > leg.plan.get("num_steps", leg.steps):
            yield f"epoch {epoch} has {leg.steps} steps, planned were {leg.plan['num_steps']}"
        taken, repeats = taken + leg.samples, repeats or bool(leg.plan.get("repeated"))
        before = leg


def _unlike_passes(logs: Logs, legs: Sequence[Leg]) -> Iterator[str]:
    """Yield the passes over a stream that hold a row twice, or other readable rows than a whole pass before."""
    unreadable = {line["index"] for line in logs.unreadable}
    rows_of_pass: set[int] | None = None
    streamed = [leg for leg in legs if "pass_began" in leg.plan]
    last = streamed[-1].plan["pass_began"] if streamed else None
    for began, group in groupby(streamed, lambda leg: int(leg.plan["pass_began"])):
        spans = [range(leg.start, leg.start + leg.steps) for leg in group]
        batches = range(spans[0].start, spans[-1].stop)
        rows = Counter(i for line in logs.batches if line["batch"] in batches for i in line["index"])
        if rows.total() != len(rows):
            yield f"the pass over the stream that began in epoch {began} holds {rows.total() - len(rows)} rows twice"
        readable = rows.keys() - unreadable
        if rows_of_pass is not None and not (readable <= rows_of_pass if began == last else readable == rows_of_pass):
            yield f"the pass over the stream that began in epoch {began} holds other rows than the one before"
        rows_of_pass = readable if rows_of_pass is None else rows_of_pass


def _place(line: Line) -> tuple[int, int]:
    return line["epoch"], line["step"]


def _named(batch: tuple[int, int, int] | None) -> str:
    return "missing" if batch is None else "batch {} of epoch {}, step {}".format(*batch)


def _planned(line: Line) -> Sequence[int]:
    """Return the rows that were planned, where others replaced some of them."""
    rows: Sequence[int] = line["planned"] if "planned" in line else line["index"]
    return rows


def _samples(line: Line) -> Iterable[tuple[int, int]]:
    """Return the planned rows, each with the cached view that it stands for, 0 where views are no rows."""
    rows = _planned(line)
    return zip(rows, line.get("views", [0] * len(rows)), strict=True)


def _mixed(lines: Iterable[Line]) -> int:
    """Return in how many steps processes held different buckets."""
    buckets: dict[int, set[Any]] = {}
    for line in lines:
        buckets.setdefault(line["batch"], set()).add(line["bucket_id"])
    return sum(len(ids) > 1 for ids in buckets.values())
