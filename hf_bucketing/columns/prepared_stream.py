"""A stream with its bucket table and latent spec in one folder, as training reads it: a definition, no rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Image, IterableDataset

from ..buckets.assignment import AssignmentRule, count_rejections
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import BucketingError, MediaError, quoted
from ..files import complete_folder
from ..settings import names_of, not_default
from .buckets import BucketColumns
from .clips import SCENE_END, SCENE_START
from .faults import Faults, Report
from .metadata import SizedDataset, add_sizes
from .prepared import MANIFEST, MANIFEST_VERSION, STREAM, read_manifest, read_open_table
from .settings import SourceConfig, read_size_columns
from .stream_columns import CAPTION, MEDIA, name_of, named_cell, value_at
from .stream_source import (
    StreamSource,
    bytes_in,
    check_present,
    columns_of,
    find_caption_columns,
    find_media_column,
    first_rows,
    local_root,
    open_rows,
    root_of,
)

_USED = (
    *("dataset", "dataset_config_name", "split", "media_column", "caption_column", "sizes_from", "target_fps"),
    *(
        "caption_template",
        "size_columns",
        "clips",
        "clip_frames",
        "on_error",
        "on_caption_error",
        "bucket_tokens",
        "buckets",
        "table",
        "bucket_frames",
        "bucket_sizes",
        "aspect_step",
    ),
    *("first_frame_column", "last_frame_column", "control_column", "mask_column", "reference_column"),
    *("max_aspect_ratio", "max_frames", *(part.name for part in fields(AssignmentRule))),
)
"""Settings of a source that a stream takes; each of the others needs all rows."""

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSample:
    """What the first rows of a stream were like.

    Args:
        rows (`int`): Number of rows, or of clips.
        row_bytes (`int`): Bytes of an average row in memory, that of its files included.
        buckets (mapping of `int` to `int`): Rows of each bucket.
        sizes (list of lists of `int`): Frames, height and width of the usable rows, each once.
    """

    rows: int
    row_bytes: int
    buckets: Mapping[int, int]
    sizes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], columns: Columns) -> StreamSample:
        """Return what rows are like, by their arrays `num_frames`, `height`, `width` and `bucket_id`."""
        usable = columns["bucket_id"] >= 0
        sizes = np.stack([columns[name][usable] for name in ("num_frames", "height", "width")])
        return cls(
            rows=len(usable),
            row_bytes=sum(map(bytes_in, rows)) // len(rows),
            buckets=dict(sorted(Counter(columns["bucket_id"][usable].tolist()).items())),
            sizes=np.unique(sizes, axis=1).T.tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStream:
    """Describe a stream, and the tables that its columns are computed with.

    Args:
        source ([`StreamSource`]): What is read.
        table ([`BucketTable`]): Table of buckets.
        open_table ([`OpenTable`]): Sizes of the rows in packs.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Limits of the assignment of buckets.
        num_shards (`int`): Files, or parts of files, that processes and workers share out.
        sample ([`StreamSample`]): First rows, as they were when the stream was prepared.
    """

    source: StreamSource
    table: BucketTable
    open_table: OpenTable
    rule: AssignmentRule = field(default_factory=AssignmentRule)
    num_shards: int
    sample: StreamSample

    other_roots = ()
    column = MEDIA
    caption_column = CAPTION

    @property
    def root(self) -> str | None:
        """Folder that relative paths start from."""
        return root_of(self.source.dataset)

    @property
    def conditions(self) -> Mapping[str, str]:
        """Column of each condition."""
        return {name: name for name in self.source.conditions}

    @property
    def spec(self) -> LatentSpec:
        """Strides and patch of the model that the stream was prepared for."""
        return self.open_table.spec

    def open(self, *, packed: bool = False, shuffle_buffer: int = 0, seed: int = 0) -> IterableDataset:
        """Return the stream of rows with the columns of `StreamColumns`.

        Args:
            packed (`bool`): Whether `bucket_id` and `num_tokens` are those of the open table.
            shuffle_buffer (`int`): Rows among which each next one is drawn; 0 keeps the order of the files.
            seed (`int`): Seed of that draw.

        Raises:
            MediaError: If the files are gone.
        """
        buckets = BucketColumns(self.open_table, self.spec) if packed else self._bucket_columns()
        return self.source.open(buckets, shuffle_buffer=shuffle_buffer, seed=seed)

    def _bucket_columns(self) -> BucketColumns:
        return BucketColumns(self.table, self.spec, rule=self.rule)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder, replacing an earlier one; it gets its name only when it is complete.

        Raises:
            BucketingError: If the folder exists and is not such a folder.
        """
        local = local_root(self.source.dataset) is not None
        dataset = os.path.relpath(self.source.dataset, folder) if local else self.source.dataset
        manifest = {
            "version": MANIFEST_VERSION,
            "table": json.loads(self.table.to_json()),
            "open_table": asdict(self.open_table),
            STREAM: {
                "local": local,
                "source": {**asdict(self.source), "dataset": dataset},
                "rule": asdict(self.rule),
                "num_shards": self.num_shards,
                "sample": asdict(self.sample),
            },
        }
        with complete_folder(folder, marker=MANIFEST) as partial:
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PreparedStream:
        """Read what [`save`][PreparedStream.save] wrote.

        Raises:
            BucketingError: If the folder describes no stream, or a release wrote it whose folders differ.
        """
        manifest = read_manifest(Path(folder))
        if STREAM not in manifest:
            raise BucketingError(f"{folder} holds rows and describes no stream; prepare it with --streaming.")
        stream = manifest[STREAM]
        source, sample = stream["source"], stream["sample"]
        if stream["local"]:
            source["dataset"] = os.path.abspath(os.path.join(folder, source["dataset"]))
        return cls(
            source=StreamSource(**source),
            table=BucketTable.from_json(json.dumps(manifest["table"])),
            open_table=read_open_table(manifest["open_table"]),
            rule=AssignmentRule(**stream["rule"]),
            num_shards=stream["num_shards"],
            sample=StreamSample(
                **{**sample, "buckets": {int(key): count for key, count in sample["buckets"].items()}}
            ),
        )


def holds_stream(folder: str | os.PathLike[str]) -> bool:
    """Return whether a prepared folder describes a stream instead of holding rows.

    Raises:
        BucketingError: If it is not a prepared folder.
    """
    return STREAM in read_manifest(Path(folder))


def prepare_stream(
    config: SourceConfig,
    *,
    spec: LatentSpec,
    native_sizes: Sequence[tuple[int, int]] = (),
    say: Callable[[str], None] = print,
) -> tuple[PreparedStream, Columns]:
    """Check the first rows of a source and describe it as a stream; the other rows are not read.

    Args:
        config ([`SourceConfig`][hf_bucketing.columns.preparation.SourceConfig]): What to read, and its bucket table.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        native_sizes (sequence of pairs): The model's own sizes, `(height, width)` in pixels, for its table.
        say (callable): Called with each sentence about what was found.

    Returns:
        The stream, and the size and bucket columns of the first rows.

    Raises:
        BucketingError: If a setting needs all rows, the table does not suit the model, or none of the first rows is
            usable.
        MediaError: If there are no files, or files of the first rows cannot be read, unless `on_error` is `"reject"`.
        ColumnError: If columns cannot be found, or captions are not text.
        RowsError: If several of these are so.
    """
    if given := not_default(config, *(name for name in names_of(SourceConfig) if name not in _USED)):
        raise BucketingError(f"Omit {quoted(given)}: a stream reads only its first rows before it is trained from.")
    table = config.table.make(spec, native_sizes=native_sizes)
    texts = (config.media_column, config.caption_column)
    dataset = open_rows(config.dataset, split=config.split, config_name=config.dataset_config_name, texts=texts)
    rows = first_rows(dataset, name=config.dataset)
    clips = config.clip_rule(table.max_frames)
    source = StreamSource(
        dataset=os.path.abspath(config.dataset) if local_root(config.dataset) is not None else config.dataset,
        config_name=config.dataset_config_name,
        split=config.split,
        media_column=find_media_column(dataset, rows, config.media_column),
        caption_columns=find_caption_columns(rows, config.caption_column),
        caption_template=config.caption_template,
        target_fps=config.target_fps,
        clips=config.clips,
        clip_frames=None if clips is None else clips.frames,
        on_error=config.on_error,
        on_caption_error=config.on_caption_error,
        conditions=config.conditions,
    )
    check_present(rows, config.conditions)
    if config.clips == "scenes":
        check_present(rows, {f"scene {name}": name for name in (SCENE_START, SCENE_END)})
    say(
        f"{config.dataset}: a stream of {dataset.num_shards} shards; media column {source.media_column}, caption "
        f"column {', '.join(source.caption_columns)}"
    )
    batch = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    with Faults() as faults:
        sized = _sized(source, rows, features=dataset.features, config=config, report=faults.report)
        source = replace(source, sizes=dict(sized.columns))
        say(sized.origin)
        found = source.columns(BucketColumns(table, spec, rule=config.rule))(batch)
    columns = {name: np.array(found[name]) for name in ("num_frames", "height", "width", "bucket_id", "rejection")}
    if not (columns["bucket_id"] >= 0).any():
        reasons = ", ".join(f"{count} {label}" for label, count in count_rejections(columns["rejection"]).items())
        raise BucketingError(
            f"None of the first {len(rows)} rows of {config.dataset} can be trained: {reasons}; choose other buckets, "
            "or other columns (`media_column`, `caption_column`)."
        )
    prepared = PreparedStream(
        source=source,
        table=table,
        open_table=config.table.make_open(spec, table),
        rule=config.rule,
        num_shards=dataset.num_shards,
        sample=StreamSample.of(rows, columns),
    )
    return prepared, {**columns, "file": np.array([name_of(cell) for cell in found[MEDIA]], object)}


def _sized(
    source: StreamSource, rows: Sequence[Mapping[str, Any]], *, features: Any, config: SourceConfig, report: Report
) -> SizedDataset:
    """Compare the sizes that the first rows have with the headers of their files, as for a data set of rows.

    Unreadable files are not reported, because `StreamColumns` reads and reports them.
    """
    typed = type((features or {}).get(source.media_column)) is Image
    given = None if config.size_columns is None else read_size_columns(config.size_columns)
    usual = [name for name in ("width", "height", "num_frames", "fps") if all(name in row for row in rows)]
    present = columns_of(rows)
    names = dict.fromkeys([*usual, *(name for name in (given or {}).values() if name in present)])
    sample = Dataset.from_dict({
        MEDIA: [named_cell(value_at(row, source.media_column), row) for row in rows],
        **{name: [value_at(row, name) for row in rows] for name in names},
    })  # fmt: skip
    if typed:
        sample = sample.cast_column(MEDIA, Image(decode=False))
    return add_sizes(
        sample,
        source.metadata,
        sizes_from=config.sizes_from,
        size_columns=given,
        report=lambda error: None if isinstance(error, MediaError) else report(error),
    )
