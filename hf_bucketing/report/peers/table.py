"""What trainers do with rows, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from ..text import align, percent, short_number
from .outcome import PeerReport

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
        "trainer", "rows", "skipped", "samples", "area cropped", "frames cut", "enlarged", "stretched", "retimed",
        "tokens", "batches", "dropped", "repeated",
    )  # fmt: skip
    rows = [
        (
            peer.name,
            f"{peer.kept:,}",
            f"{sum(peer.skipped.values()):,}",
            f"{peer.samples:,}",
            percent(peer.cropped_area),
            percent(peer.cropped_frames),
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
