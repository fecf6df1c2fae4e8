"""Streams with their bucket table and latent spec in one folder, as training reads them: a definition, no rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset

from ..buckets.assignment import AssignmentRule, count_rejections
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import BucketingError
from ..files import complete_folder
from ..randomness import Purpose, integer_seed
from ..settings import build, flatten
from .apply import map_columns, undecoded
from .arrays import column_array
from .buckets import BucketColumns
from .faults import Faults, paths_of
from .layouts import SourceRequest, default_root, is_local
from .nested import with_nested
from .preparation import check_rows, load_described
from .prepared import MANIFEST, MANIFEST_VERSION, STREAM, read_manifest, read_open_table, read_root, root_from
from .settings import RowsConfig, SourceConfig
from .sources import bytes_in, find_rows
from .stream_columns import CAPTION, MEDIA, StreamColumns

_BATCH_ROWS = 8
"""Rows whose columns are computed at once, few because their files may be in memory."""

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
    def of(cls, rows: Dataset, *, stored: Dataset) -> StreamSample:
        """Return what rows are like that have sizes and buckets; `stored` are the rows that they were made of."""
        ids = column_array(rows, "bucket_id")
        sizes = np.stack([column_array(rows, name)[ids >= 0] for name in ("num_frames", "height", "width")])
        return cls(
            rows=len(rows),
            row_bytes=sum(map(bytes_in, undecoded(stored, stored.features))) // len(stored),
            buckets=dict(sorted(Counter(ids[ids >= 0].tolist()).items())),
            sizes=np.unique(sizes, axis=1).T.tolist(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStream:
    """Describe a stream, and the tables that its columns are computed with.

    Args:
        source ([`RowsConfig`]): What is read, with the names of all columns.
        root (`str`, *optional*): Folder or URL that relative paths start from.
        table ([`BucketTable`]): Table of buckets.
        open_table ([`OpenTable`]): Sizes of the rows in packs.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Limits of the assignment of buckets.
        num_shards (`int`): Files, or parts of files, that processes and workers share out.
        sample ([`StreamSample`]): First rows, as they were when the stream was prepared.
    """

    source: RowsConfig
    root: str | None
    table: BucketTable
    open_table: OpenTable
    rule: AssignmentRule = field(default_factory=AssignmentRule)
    num_shards: int
    sample: StreamSample

    other_roots = ()
    column = MEDIA
    caption_column = CAPTION

    @property
    def conditions(self) -> Mapping[str, str]:
        """Column of each condition."""
        return {name: name for name in self.source.conditions}

    @property
    def spec(self) -> LatentSpec:
        """Strides and patch of the model that the stream was prepared for."""
        return self.open_table.spec

    def open(self, *, packed: bool = False, shuffle_buffer: int = 0, seed: int = 0) -> IterableDataset:
        """Return the stream of rows with the columns of `StreamColumns`; no row is read yet.

        Args:
            packed (`bool`): Whether `bucket_id` and `num_tokens` are those of the open table.
            shuffle_buffer (`int`): Rows, or clips, among which each next one is drawn; 0 keeps the order of the files.
            seed (`int`): Seed of that draw.

        Raises:
            MediaError: If the files are gone, or datasets cannot read them.
            HubError: If the hub cannot be reached.
        """
        buckets = BucketColumns(self.table, self.spec, rule=self.rule)
        if packed:
            buckets = BucketColumns(self.open_table, self.spec)
        columns = StreamColumns.of(self.source, buckets, root=self.root)
        rows = find_rows(SourceRequest.of(self.source, streaming=True)).dataset
        assert isinstance(rows, IterableDataset), "the request is for a stream"
        present = list(rows.column_names or next(iter(rows)))
        nested = [name for name in columns.input_columns if "." in name and name not in present]
        rows = with_nested(rows, nested)
        if self.source.clips is None:  # before the map, as shuffling reads many shards at once, each by whole batches
            rows = _shuffled(rows, shuffle_buffer, seed)
        rows = rows.map(columns, batched=True, batch_size=_BATCH_ROWS, remove_columns=[*present, *nested])
        return rows if self.source.clips is None else _shuffled(rows, shuffle_buffer, seed)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder, replacing an earlier one; it gets its name only when it is complete.

        Raises:
            BucketingError: If the folder exists and is not such a folder.
        """
        manifest = {
            "version": MANIFEST_VERSION,
            "table": json.loads(self.table.to_json()),
            "open_table": asdict(self.open_table),
            STREAM: {
                **_written(self.source, self.root, folder),
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
        sample = stream["sample"]
        source, root = _read_source(stream, folder)
        return cls(
            source=source,
            root=root,
            table=BucketTable.from_json(json.dumps(manifest["table"])),
            open_table=read_open_table(manifest["open_table"]),
            rule=AssignmentRule(**stream["rule"]),
            num_shards=stream["num_shards"],
            sample=StreamSample(
                **{**sample, "buckets": {int(key): count for key, count in sample["buckets"].items()}}
            ),
        )


def _shuffled(rows: IterableDataset, buffer_size: int, seed: int) -> IterableDataset:
    return rows.shuffle(seed=integer_seed(Purpose.STREAM, seed), buffer_size=buffer_size) if buffer_size else rows


_FOLDERS = ("control_folder", "mask_folder")
"""Settings that name folders beside the data set."""


def _written(source: RowsConfig, root: str | None, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a source as a manifest holds it: local paths as they are seen from the prepared folder."""
    values = flatten(source)
    local = is_local(source.dataset)
    for name in ("dataset", *_FOLDERS):
        if values[name] is not None and (local or name in _FOLDERS):
            values[name] = os.path.relpath(values[name], folder)
    return {"local": local, "source": values, "root": root and root_from(root, Path(folder))}


def _read_source(stream: Mapping[str, Any], folder: str | os.PathLike[str]) -> tuple[RowsConfig, str | None]:
    """Return what [`_written`] wrote, or what releases wrote that had no settings of their own for files beside."""
    values = dict(stream["source"])
    if "caption_columns" in values:
        values |= {f"{name}_column": column for name, column in values.pop("conditions").items()}
        values |= {
            "dataset_config_name": values.pop("config_name"),
            "caption_column": ",".join(values.pop("caption_columns")),
            "sizes_from": "columns" if values["sizes"] else "headers",
            "size_columns": ",".join(f"{name}={column}" for name, column in values.pop("sizes").items()) or None,
        }
    if stream["local"]:
        values["dataset"] = os.path.abspath(os.path.join(folder, values["dataset"]))
    values |= {
        name: Path(os.path.abspath(os.path.join(folder, values[name]))) for name in _FOLDERS if values.get(name)
    }
    source = build(RowsConfig, values)
    if "root" not in stream:
        return source, default_root(source.dataset)
    return source, stream["root"] and read_root(stream["root"], Path(folder))


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
    """Check the first rows of a source as those of a data set of rows, and describe it as a stream.

    Args:
        config ([`SourceConfig`][hf_bucketing.columns.preparation.SourceConfig]): What to read, and its bucket table.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        native_sizes (sequence of pairs): The model's own sizes, `(height, width)` in pixels, for its table.
        say (callable): Called with each sentence about what was found.

    Returns:
        The stream, and the size and bucket columns of the first rows.

    Raises:
        BucketingError: If a setting needs all rows, the table does not suit the model, or none of the first rows is
            usable; and as `prepare`.
    """
    table = config.table.make(spec, native_sizes=native_sizes)
    loaded = load_described(config, streaming=True, say=say)
    assert loaded.first_rows is not None, "it is a stream"
    with Faults() as faults:
        rows, found = check_rows(config, loaded, faults, clips=config.clip_rule(table.max_frames), say=say)
    dataset = map_columns(rows.dataset, BucketColumns(table, spec, rule=config.rule), overwrite=True)
    names = ("num_frames", "height", "width", "bucket_id", "rejection")
    columns = {name: column_array(dataset, name) for name in names}
    if not (columns["bucket_id"] >= 0).any():
        reasons = ", ".join(f"{count} {label}" for label, count in count_rejections(columns["rejection"]).items())
        raise BucketingError(
            f"None of the first {len(dataset)} rows of {config.dataset} can be trained: {reasons}; choose other "
            "buckets, or other columns (`media_column`, `caption_column`)."
        )
    prepared = PreparedStream(
        source=found,
        root=rows.root,
        table=table,
        open_table=config.table.make_open(spec, table),
        rule=config.rule,
        num_shards=loaded.dataset.num_shards,
        sample=StreamSample.of(dataset, stored=loaded.first_rows),
    )
    files = paths_of(dataset, range(len(dataset)), rows.column)
    return prepared, {**columns, "file": np.array([file or "a row without a path" for file in files], object)}
