"""The collator of a run: from a cache, or from files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..buckets.open_table import OpenTable
from ..buckets.table import BucketTable
from ..caching.collator import CachedCollator
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..configuration.run import TrainingConfig
from ..loaders.collators import BucketCollator, PackCollator
from ..loaders.faults import Replacements
from ..loaders.random_resize import RandomResize
from ..runs.run_log import log_path


def make_collator(
    config: TrainingConfig,
    prepared: PreparedDataset,
    *,
    table: BucketTable | OpenTable,
    resize: RandomResize | None,
) -> BucketCollator | PackCollator | CachedCollator:
    """Return the collator of rows: that of a cache, or of files with replacements for unreadable ones."""
    if prepared.cache is not None:
        return CachedCollator(
            prepared.cache,
            caption_column=prepared.caption_column,
            seed=config.seed,
            first_view=config.batches.cached_views == "first",
            null_texts="" in config.preservation.captions or config.objective.caption_dropout > 0,
            sources=prepared.sources,
        )
    replacements = config.faults.replacements(prepared.dataset, log=unreadable_log(config))
    return media_collator(config, prepared, table=table, resize=resize, replacements=replacements)


def media_collator(
    config: TrainingConfig,
    prepared: PreparedDataset | PreparedStream,
    *,
    table: BucketTable | OpenTable,
    resize: RandomResize | None = None,
    replacements: Replacements | None = None,
) -> BucketCollator | PackCollator:
    """Return the collator that decodes the files of rows: packs for an open table, else stacks."""
    options: dict[str, Any] = {
        "column": prepared.column,
        "caption_column": prepared.caption_column,
        "captions": config.captions,
        "root": prepared.root,
        "other_roots": prepared.other_roots,
        "conditions": prepared.conditions,
        "references": prepared.references,
        "audio": prepared.audio,
        "sources": prepared.sources,
        "views": config.views,
        "seed": config.seed,
        "replacements": replacements,
    }
    if isinstance(table, OpenTable):
        return PackCollator(table, resize=resize, **options)
    return BucketCollator(table, **options)


def unreadable_log(config: TrainingConfig) -> Path:
    """Return the path of the log of a run's unreadable samples."""
    return log_path(Path(config.output_dir), "unreadable")
