"""The collator of a run: from a cache, or from files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..caching.collator import CachedCollator
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..configuration.run import TrainingConfig
from ..loaders.faults import Replacements
from ..loaders.random_resize import RandomResize
from .way import Batching, Collator


def make_collator(
    way: Batching[Any], config: TrainingConfig, prepared: PreparedDataset, *, resize: RandomResize | None, log: Path
) -> Collator | CachedCollator:
    """Return the collator of rows: that of a cache, or of files with replacements for unreadable ones.

    `log` is the file that names unreadable rows.
    """
    if prepared.cache is not None:
        return CachedCollator(
            prepared.cache,
            caption_column=prepared.caption_column,
            seed=config.seed,
            first_view=config.batches.cached_views == "first",
            null_texts="" in config.preservation.captions or config.objective.caption_dropout > 0,
            sources=prepared.sources,
        )
    replacements = config.faults.replacements(prepared.dataset, log=log)
    return media_collator(way, config, prepared, resize=resize, replacements=replacements)


def media_collator(
    way: Batching[Any],
    config: TrainingConfig,
    prepared: PreparedDataset | PreparedStream,
    *,
    resize: RandomResize | None = None,
    replacements: Replacements | None = None,
) -> Collator:
    """Return the collator that decodes the files of rows."""
    return way.collator(
        way.table(prepared),
        resize=resize,
        column=prepared.column,
        caption_column=prepared.caption_column,
        captions=config.captions,
        root=prepared.root,
        other_roots=prepared.other_roots,
        conditions=prepared.conditions,
        references=prepared.references,
        audio=prepared.audio,
        sources=prepared.sources,
        views=config.views,
        seed=config.seed,
        replacements=replacements,
    )
