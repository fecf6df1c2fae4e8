"""Data sets of several files that are read as streams."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars

from tests.columns.formats import write_tar


def samples_of(media_dir: Path) -> list[dict[str, Any]]:
    """Return the videos of a generated folder: `file_name` and `caption`."""
    rows = map(json.loads, (media_dir / "metadata.jsonl").read_text().splitlines())
    return [row for row in rows if row["file_name"].endswith(".mp4")]


def write_tars(folder: Path, media_dir: Path, *, shards: int, captions: Mapping[int, object] | None = None) -> Path:
    """Write webdataset tars of mp4 and json, one sample after the other into each; some captions may be replaced."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        members = []
        for number, row in list(enumerate(samples_of(media_dir)))[shard::shards]:
            caption = (captions or {}).get(number, row["caption"])
            members.append((f"{number:04d}.mp4", (media_dir / row["file_name"]).read_bytes()))
            members.append((f"{number:04d}.json", json.dumps({"caption": caption}).encode()))
        write_tar(folder / f"{shard:05d}.tar", members)
    return folder


def write_parquet(folder: Path, media_dir: Path, *, shards: int) -> Path:
    """Write parquet files of bytes and texts."""
    disable_progress_bars()
    folder.mkdir(parents=True)
    rows = [
        {"video": {"bytes": (media_dir / row["file_name"]).read_bytes(), "path": None}, "text": row["caption"]}
        for row in samples_of(media_dir)
    ]
    for shard in range(shards):
        Dataset.from_list(rows[shard::shards]).to_parquet(folder / f"{shard}.parquet")
    return folder


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
