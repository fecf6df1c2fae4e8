"""What the trainers that `--compare` names would do with the rows of a report, measured as its own ways are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import numpy.typing as npt

from ...buckets.open_table import open_table
from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ...columns.toml_tables import read_tables
from ...errors import BucketingError, did_you_mean
from ...plans.rows import epoch_occurrences
from ..compare import Report
from ..measure import SizeColumns, Sizes, read_sizes
from ..text import align, percent, short_number
from .diffusion_pipe import DiffusionPipe
from .musubi_tuner import MusubiTuner
from .short_rules import AIToolkit, DiffusersExamples, LTXTrainer, NovelAI
from .simple_tuner import SimpleTuner
from .views import Peer, Views

_STRETCHED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What a trainer makes of the rows of a data set in an epoch; means of nothing are NaN.

    Attributes:
        name (`str`): Name of the trainer, or of the way of this project.
        rule (`str`): What is compared: the class that holds the rule with its settings; empty for this project.
        kept (`int`): Rows that give a sample, each as often as it occurs in an epoch, before incomplete batches are
            dropped.
        skipped (mapping of `str` to `int`): All other rows, by reason.
        samples (`int`): Samples that they give; a row may give several.
        kept_area (`float`): Mean kept area of the samples: the share of the resized frame that the crop leaves.
        kept_frames (`float`): Mean over kept rows of the share of their frames that a sample shows.
        enlarged (`int`): Samples whose sides are scaled up.
        stretched (`int`): Samples whose aspect ratio the resize changes by more than 1 %; more than rounding does.
        retimed (`int`): Samples whose frames are spread over another duration than they had.
        tokens_per_sample (`float`): Mean tokens of a sample, without text.
        batches (`int`): Batches of all processes.
        dropped (`int`): Samples in none of them.
        repeated (`int`): Samples that are drawn again to fill batches.
        note (`str`): What else happens, as a sentence.
    """

    name: str
    rule: str = ""
    kept: int
    skipped: Mapping[str, int]
    samples: int
    kept_area: float
    kept_frames: float
    enlarged: int
    stretched: int
    retimed: int
    tokens_per_sample: float
    batches: int
    dropped: int
    repeated: int
    note: str = ""


def compare_peers(
    columns: SizeColumns, report: Report, peers: Mapping[str, Peer], *, weights: npt.ArrayLike | None = None
) -> tuple[PeerReport, ...]:
    """Measure what this project's buckets and packs do with rows, and what each peer would do.

    Args:
        columns ([`SizeColumns`]): Sizes of all rows, those of the report.
        report ([`Report`]): Report about them; its batch size and processes hold for all peers.
        peers (mapping of `str` to [`Peer`]): Rule of each trainer by its name.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch, those of the report;
            peers take a row as often.
    """
    sizes = read_sizes(columns)
    times = epoch_occurrences(weights, num_rows=len(sizes.frames), seed=report.config.seed)
    usable = np.minimum(np.minimum(*sizes[:2]), sizes.widths) >= 1
    unreadable = int(times[~usable].sum())
    rows = sizes.select(np.repeat(np.arange(len(times)), np.where(usable, times, 0)))
    measured = [_measure_peer(name, peer, rows, unreadable, report) for name, peer in peers.items()]
    return (*_project_ways(report), *measured)


def _project_ways(report: Report) -> list[PeerReport]:
    """Return this project's buckets and packs, as the report measured them."""
    ways = []
    for way in report.strategies:
        if way.name == "padding":
            continue
        skipped = {reason: count for reason, count in way.dropped.items() if reason != "remainder"}
        remainder = way.num_dropped - sum(skipped.values())
        kept = way.kept + remainder
        ways.append(
            PeerReport(
                name=f"here, {way.name}",
                kept=kept,
                skipped=skipped,
                samples=kept,
                kept_area=way.kept_area,
                kept_frames=way.kept_frames,
                enlarged=sum(bucket.enlarged for bucket in report.buckets.buckets) if way.name == "bucketing" else 0,
                stretched=0,
                retimed=0,
                tokens_per_sample=way.tokens_per_sample - report.config.text_tokens,
                batches=way.num_steps * report.config.num_processes,
                dropped=remainder,
                repeated=0,
            )
        )
    return ways


def _measure_peer(name: str, peer: Peer, sizes: Sizes, unreadable: int, report: Report) -> PeerReport:
    views, skipped = peer.views(sizes)
    config = report.config
    _, bucket = np.unique(views.buckets, return_inverse=True)
    counts = np.bincount(bucket, views.clips).astype(np.int64)
    batches = peer.batches(counts, batch_size=config.batch_size, num_processes=config.num_processes)
    _, heights, widths = sizes.select(views.rows)
    down, across = views.resized_heights / heights, views.resized_widths / widths
    kept_area = views.sizes.heights * views.sizes.widths / (views.resized_heights * views.resized_widths)
    used_frames = np.zeros(len(sizes.frames))
    np.maximum.at(used_frames, views.rows, views.used_frames)
    used = used_frames > 0
    return PeerReport(
        name=name,
        rule=repr(peer),
        kept=int(np.count_nonzero(used)),
        skipped={**({"unreadable": unreadable} if unreadable else {}), **skipped},
        samples=int(views.clips.sum()),
        kept_area=_mean(np.minimum(kept_area, 1), views.clips),
        kept_frames=_mean((used_frames / sizes.frames)[used]),
        enlarged=_count(np.maximum(down, across) > 1, views),
        stretched=_count(np.abs(np.log(across / down)) > _STRETCHED, views),
        retimed=_count(views.retimed, views),
        tokens_per_sample=_mean(_tokens(views.sizes, report.spec), views.clips),
        batches=batches.number,
        dropped=batches.dropped,
        repeated=batches.repeated,
        note=batches.note,
    )


def _count(mask: npt.NDArray[np.bool_], views: Views) -> int:
    return int(views.clips[mask].sum())


def _mean(values: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None) -> float:
    return float(np.average(values, weights=weights)) if len(values) else math.nan


def _tokens(sizes: Sizes, spec: LatentSpec) -> npt.NDArray[np.int64]:
    """Return the tokens of sizes, as the model of the report counts them."""
    table = open_table(spec)
    return table.num_tokens(table.assign(*sizes).bucket_id, spec=spec)


READING = (
    "Enlarged, stretched (by more than 1 %) and retimed count samples. Dropped samples are in no batch of the epoch; "
    "repeated ones fill batches. All take the batch size and the processes of this report, and frames at the frame "
    "rate that the rows were prepared with."
)


def describe_peers(peers: Sequence[PeerReport]) -> str:
    """Return a table with a line per trainer, and why rows are skipped."""
    notes = (fill(text, 118) for text in [*peer_notes(peers), READING])
    return "\n".join([align(peer_cells(peers)), *notes])


def peer_cells(peers: Sequence[PeerReport]) -> list[tuple[str, ...]]:
    """Return a table of trainers, its titles first."""
    head = (
        "trainer", "rows", "skipped", "samples", "kept area", "kept frames", "enlarged", "stretched", "retimed",
        "tokens", "batches", "dropped", "repeated",
    )  # fmt: skip
    rows = [
        (
            peer.name,
            f"{peer.kept:,}",
            f"{sum(peer.skipped.values()):,}",
            f"{peer.samples:,}",
            percent(peer.kept_area),
            percent(peer.kept_frames),
            f"{peer.enlarged:,}",
            f"{peer.stretched:,}",
            f"{peer.retimed:,}",
            short_number(peer.tokens_per_sample),
            f"{peer.batches:,}",
            f"{peer.dropped:,}",
            f"{peer.repeated:,}",
        )
        for peer in peers
    ]
    return [head, *rows]


def peer_notes(peers: Sequence[PeerReport]) -> list[str]:
    """Return why trainers skip rows, and what else they do, a sentence each."""
    skipped = [
        f"{peer.name} skips " + ", ".join(f"{count:,} ({reason})" for reason, count in peer.skipped.items()) + "."
        for peer in peers
        if peer.skipped
    ]
    return skipped + [f"{peer.name}: {peer.note}" for peer in peers if peer.note]


PEERS: Mapping[str, Any] = {
    "novelai": NovelAI,
    "musubi-tuner": MusubiTuner,
    "diffusion-pipe": DiffusionPipe,
    "simpletuner": SimpleTuner,
    "ai-toolkit": AIToolkit,
    "ltx-trainer": LTXTrainer,
    "diffusers": DiffusersExamples,
}
"""Rules of trainers by name, in the order of their tables."""


def choose_peers(text: str, *, table: BucketTable, spec: LatentSpec) -> dict[str, Peer]:
    """Return the peers that a text names, separated by commas, each with its file after an equals sign or without.

    Args:
        text (`str`): `"all"`, or names such as `"musubi-tuner=dataset.toml,diffusion-pipe"`.
        table ([`BucketTable`][hf_bucketing.BucketTable]): Table whose area and frames a peer without a file has.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.

    Raises:
        BucketingError: If a name is unknown, a file is given to a trainer whose files are not read, or it lacks a
            setting.
        MediaError: If a file cannot be read.
    """
    peers: dict[str, Peer] = {}
    parts = [*PEERS] if text == "all" else text.split(",")
    for name, equals, path in (part.strip().partition("=") for part in parts):
        kind = PEERS.get(name)
        if kind is None:
            known = ", ".join(PEERS)
            raise BucketingError(f"--compare takes {known} or all, not {name!r}{did_you_mean(name, PEERS)}")
        if not equals:
            peers[name] = kind.like(table, spec)
            continue
        if not hasattr(kind, "read"):
            raise BucketingError(f"--compare reads no file of {name}; name it alone, to compare its defaults.")
        tables = read_tables(path)
        try:
            peers[name] = kind.read(tables, table, spec)
        except BucketingError as error:
            raise BucketingError(f"{path}: {error}") from error
        except (TypeError, ValueError) as error:
            raise BucketingError(f"{path}: a setting of {name} has another type ({error}); correct it.") from error
    return peers
