"""Streams with their bucket table and latent spec in one folder, as training reads them: a definition, no rows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset
from datasets.iterable_dataset import (
    CyclingMultiSourcesExamplesIterable,
    RandomlyCyclingMultiSourcesExamplesIterable,
)

from ..buckets.arrays import IntArray
from ..buckets.assignment import REJECTED_BUCKET, count_rejections
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable, union_of_tables
from ..conditions.audio import AUDIO, HAS_AUDIO, AudioRule
from ..conditions.condition import Condition, token_conditions
from ..conditions.references import REFERENCE_SIZES, ReferenceRule
from ..conditions.rows import ConditionRules, RowConditions
from ..errors import BucketingError, MediaError
from ..files import complete_folder
from ..media.remote import is_url
from ..randomness import Purpose, generator, integer_seed
from ..settings import build, flatten
from .arrays import column_array
from .buckets import BucketColumns
from .faults import paths_of
from .layouts import SourceRequest, default_root, is_local
from .merge import check_same_conditions
from .nested import with_nested
from .preparation import CheckedSource, check_sources, shared_audio, shared_rule
from .prepared import (
    MANIFEST,
    MANIFEST_VERSION,
    STREAM,
    check_places,
    read_manifest,
    read_open_table,
    read_root,
    read_rule,
    read_settings,
    root_from,
    root_of,
    write_settings,
)
from .settings import RowsConfig, SourceConfig
from .source_lists import normalized_shares
from .sources import SAMPLED_ROWS, bytes_in, find_rows
from .stream_columns import CAPTION, MEDIA, OneOfSources, StreamColumns

_BATCH_ROWS = 8
"""Rows whose columns are computed at once, few because their files may be in memory."""

_REPORTED = ("num_frames", "height", "width", "fps", "bucket_id", "rejection", REFERENCE_SIZES, HAS_AUDIO)

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSample:
    """What the first rows of a stream were like.

    Args:
        rows (`int`): Number of rows, or of clips.
        row_bytes (`int`): Bytes of an average row in memory, that of its files included.
        buckets (mapping of `int` to `int`): Rows of each bucket.
        sizes (list of lists of `int`): Frames, height and width of the usable rows, each once.
        references (list of lists of `int`): Sizes of the references of the usable rows, as they are stored, each once.
        audio_fps (`float`, *optional*): Lowest frame rate of a usable row with audio, whose audio is longest; None
            where none has some.
        fastest_audio_fps (`float`, *optional*): Highest one; None also of folders of versions that did not record it.
    """

    rows: int
    row_bytes: int
    buckets: Mapping[int, int]
    sizes: Sequence[Sequence[int]]
    references: Sequence[Sequence[int]] = ()
    audio_fps: float | None = None
    fastest_audio_fps: float | None = None

    @classmethod
    def of(cls, columns: Columns, *, row_bytes: int) -> StreamSample:
        """Return what rows are like, by their arrays `num_frames`, `height`, `width` and `bucket_id`.

        Where they have references, also by the array of lists `reference_sizes`; where they have audio, by `has_audio`
        and `fps`.
        """
        usable = columns["bucket_id"] >= 0
        sizes = np.stack([columns[name][usable] for name in ("num_frames", "height", "width")])
        references = columns.get(REFERENCE_SIZES, np.empty((len(usable), 0)))
        rates = columns["fps"][usable & columns[HAS_AUDIO]] if HAS_AUDIO in columns else np.zeros(0)
        return cls(
            rows=len(usable),
            row_bytes=row_bytes,
            buckets=dict(sorted(Counter(columns["bucket_id"][usable].tolist()).items())),
            sizes=np.unique(sizes, axis=1).T.tolist(),
            references=[[*cell] for cell in sorted({tuple(map(int, cell)) for cell in references[usable]})],
            audio_fps=float(rates.min()) if len(rates) else None,
            fastest_audio_fps=float(rates.max()) if len(rates) else None,
        )

    def conditions(self, rules: ConditionRules) -> RowConditions:
        """Return the conditions of the rows, those with audio at its lowest frame rate, as rules count them."""
        references = self.references or [[]]
        audio, fps = self.audio_fps is not None, self.audio_fps or 0.0
        count = len(references)
        columns = {REFERENCE_SIZES: references, HAS_AUDIO: [audio] * count, "fps": [fps] * count}
        return rules.rows(columns, num_rows=count)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """One source of a stream.

    Args:
        source ([`RowsConfig`]): What is read, with the names of all columns and of the source.
        root (`str`, *optional*): Folder or URL that relative paths start from.
        table ([`BucketTable`]): Table of its buckets.
    """

    source: RowsConfig
    root: str | None
    table: BucketTable

    def open(
        self,
        buckets: BucketColumns,
        *,
        references: ReferenceRule,
        shuffle_buffer: int = 0,
        seed: int = 0,
        reject: bool = False,
    ) -> IterableDataset:
        """Return the stream of the rows of the source; arguments as those of [`PreparedStream.open`]."""
        columns = StreamColumns.of(self.source, buckets, root=self.root, references=references)
        columns = columns.rejecting() if reject else columns
        rows = find_rows(SourceRequest.of(self.source, streaming=True)).dataset
        assert isinstance(rows, IterableDataset), "the request is for a stream"
        present = list(rows.column_names or next(iter(rows)))
        nested = [name for name in columns.input_columns if "." in name and name not in present]
        rows = with_nested(rows, nested)
        if self.source.clips is None:  # before the map, as shuffling reads many shards at once, each by whole batches
            rows = _shuffled(rows, shuffle_buffer, seed)
        rows = rows.map(columns, batched=True, batch_size=_BATCH_ROWS, remove_columns=[*present, *nested])
        return rows if self.source.clips is None else _shuffled(rows, shuffle_buffer, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStream:
    """Describe a stream of one or several sources, and the tables that its columns are computed with.

    Args:
        parts (`tuple` of [`StreamSource`]): Sources.
        table ([`BucketTable`]): Table of the buckets of all sources.
        open_table ([`OpenTable`]): Sizes of the rows in packs.
        num_shards (`int`): Files, or parts of files, that processes and workers share out.
        sample ([`StreamSample`]): First rows, as they were when the stream was prepared.
        references ([`ReferenceRule`][hf_bucketing.conditions.references.ReferenceRule]): How many references samples
            may have, and the sizes in which they are shown.
        audio ([`AudioRule`][hf_bucketing.conditions.audio.AudioRule], *optional*): Rule of the audio of the samples;
            None if they have none.
        token_conditions (`tuple` of [`Condition`][hf_bucketing.conditions.condition.Condition]): Conditions of the
            samples, beside references, that the model takes as tokens.
        settings (mapping): Settings of the script that made it, as a YAML file holds them: `save` writes them to
            config.yaml.
    """

    parts: tuple[StreamSource, ...]
    table: BucketTable
    open_table: OpenTable
    num_shards: int
    sample: StreamSample
    references: ReferenceRule = field(default_factory=ReferenceRule)
    audio: AudioRule | None = None
    token_conditions: tuple[Condition, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    column = MEDIA
    caption_column = CAPTION

    @property
    def root(self) -> str | None:
        """Folder or URL that relative paths start from."""
        return self.parts[0].root

    @property
    def other_roots(self) -> tuple[str, ...]:
        """Folders and URLs of the other sources, which their whole paths lead to."""
        return tuple(part.root for part in self.parts[1:] if part.root is not None)

    @property
    def conditions(self) -> Mapping[str, str]:
        """Column of each condition."""
        return {name: name for part in self.parts for name in part.source.conditions}

    @property
    def condition_rules(self) -> ConditionRules:
        """How conditions are counted for the model that the stream was prepared for."""
        return ConditionRules.of(
            self.conditions, references=self.references, audio=self.audio, taken=self.token_conditions
        )

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of what the samples have beside their media and captions: conditions, and audio."""
        return (*self.conditions, *([] if self.audio is None else [AUDIO]))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, if there are several."""
        return tuple(part.source.name or "" for part in self.parts) if len(self.parts) > 1 else ()

    @property
    def spec(self) -> LatentSpec:
        """Strides and patch of the model that the stream was prepared for."""
        return self.open_table.spec

    def open(
        self, *, packed: bool = False, shuffle_buffer: int = 0, seed: int = 0, reject: bool = False
    ) -> IterableDataset:
        """Return the stream of rows with the columns of `StreamColumns`; no row is read yet.

        Of several sources, the next row comes from each by its weight, or from all by turns, until a source ends; the
        others then continue alone, so that every row comes once.

        Args:
            packed (`bool`): Whether `bucket_id` and `num_tokens` are those of the open table.
            shuffle_buffer (`int`): Rows, or clips, among which each next one is drawn; 0 keeps the order of the files.
            seed (`int`): Seed of these draws.
            reject (`bool`): Whether rows whose file, clip or condition is at fault are rejected, also where preparing
                them would have been an error.

        Raises:
            MediaError: If the files are gone, or datasets cannot read them.
            HubError: If the hub cannot be reached.
        """
        open_columns = BucketColumns(self.open_table, self.spec)
        columns = [
            open_columns if packed else BucketColumns(part.table, self.spec, rule=part.source.rule)
            for part in self.parts
        ]
        if len(self.parts) == 1:
            return self.parts[0].open(
                columns[0], references=self.references, shuffle_buffer=shuffle_buffer, seed=seed, reject=reject
            )
        _, ids = union_of_tables([part.table for part in self.parts])
        streams = []
        for number, (part, buckets, new_ids) in enumerate(zip(self.parts, columns, ids, strict=True)):
            function = OneOfSources(
                number=number,
                name=(part.source.name or "") if number else "",
                root=part.root if number else None,
                conditions=tuple(self.conditions),
                bucket_ids=None if packed else tuple(new_ids.tolist()),
            )
            rows = part.open(buckets, references=self.references, reject=reject)
            streams.append(rows.map(function, batched=True, batch_size=_BATCH_ROWS))
        return _shuffled(_interleaved(streams, self.parts, seed), shuffle_buffer, seed)

    def read_first(self) -> Columns:
        """Read the first rows of the stream as training does, and return their sizes and buckets.

        Raises:
            MediaError: If there is no row, or as [`open`][PreparedStream.open].
            ColumnError: If a row is at fault, unless such rows are rejected.
        """
        first = [*islice(self.open(), SAMPLED_ROWS * len(self.parts))]
        if not first:
            raise MediaError("The stream has no rows any more; prepare it again with hf_bucketing prepare.")
        rows = Dataset.from_list([{name: row[name] for name in _REPORTED if name in row} for row in first])
        return {name: column_array(rows, name) for name in rows.column_names}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder, replacing an earlier one; it gets its name only when it is complete.

        Raises:
            BucketingError: If the folder exists and is not such a folder.
        """
        first, *others = (_written(part, folder) for part in self.parts)
        manifest = {
            "version": MANIFEST_VERSION,
            "table": json.loads(self.table.to_json()),
            "open_table": asdict(self.open_table),
            "references": self.references.settings,
            "audio": None if self.audio is None else self.audio.settings,
            "token_conditions": [condition.settings for condition in self.token_conditions],
            STREAM: {**first, "others": others, "num_shards": self.num_shards, "sample": asdict(self.sample)},
        }
        with complete_folder(folder, marker=MANIFEST) as partial:
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            write_settings(partial, self.settings)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PreparedStream:
        """Read what [`save`][PreparedStream.save] wrote.

        Raises:
            BucketingError: If the folder describes no stream, a release wrote it whose folders differ, or it was
                downloaded and reads files elsewhere.
        """
        manifest = read_manifest(Path(folder))
        if STREAM not in manifest:
            raise BucketingError(f"{folder} holds rows and describes no stream; prepare it with --streaming.")
        stream, audio = {"table": manifest["table"], **manifest[STREAM]}, manifest.get("audio")
        sample = stream["sample"]
        parts = [_read_source(part, folder) for part in (stream, *stream.get("others", []))]
        check_places([place for part in parts for place in _places_of(part)], Path(folder), manifest=MANIFEST)
        return cls(
            parts=tuple(replace(part, root=root_of(part.root, Path(folder), manifest=MANIFEST)) for part in parts),
            table=BucketTable.from_json(json.dumps(manifest["table"])),
            open_table=read_open_table(manifest["open_table"]),
            num_shards=stream["num_shards"],
            sample=StreamSample(
                **{**sample, "buckets": {int(key): count for key, count in sample["buckets"].items()}}
            ),
            references=read_rule(manifest),
            audio=None if audio is None else AudioRule(**audio),
            token_conditions=tuple(Condition(**values) for values in manifest.get("token_conditions", ())),
            settings=read_settings(Path(folder)),
        )


def _shuffled(rows: IterableDataset, buffer_size: int, seed: int) -> IterableDataset:
    return rows.shuffle(seed=integer_seed(Purpose.STREAM, seed), buffer_size=buffer_size) if buffer_size else rows


def _interleaved(streams: Sequence[IterableDataset], sources: Sequence[StreamSource], seed: int) -> IterableDataset:
    """Return one stream of several; `interleave_datasets` would read rows of each, to give captions one type."""
    iterables = [stream._ex_iterable for stream in streams]
    until = "all_exhausted_without_replacement"
    shares = normalized_shares([part.source.weight for part in sources])
    if shares is None:
        return IterableDataset(CyclingMultiSourcesExamplesIterable(iterables, stopping_strategy=until))
    return IterableDataset(
        RandomlyCyclingMultiSourcesExamplesIterable(
            iterables,
            generator=generator(Purpose.STREAM_SOURCES, seed),
            probabilities=shares.tolist(),
            stopping_strategy=until,
        )
    )


_FOLDERS = ("control_folder", "mask_folder", "face_folder", "reference_folder")
"""Settings that name folders beside the data set, one or several."""


def _written(source: StreamSource, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a source as a manifest holds it: local paths as they are seen from the prepared folder."""
    values = flatten(source.source)
    local = is_local(source.source.dataset)
    for name in ("dataset", *_FOLDERS) if local else _FOLDERS:
        values[name] = _with_paths(values[name], partial(os.path.relpath, start=folder))
    return {
        "local": local,
        "source": values,
        "root": source.root and root_from(source.root, Path(folder)),
        "table": json.loads(source.table.to_json()),
    }


def _read_source(entry: Mapping[str, Any], folder: str | os.PathLike[str]) -> StreamSource:
    """Return what [`_written`] wrote, or what releases wrote whose streams had other names for settings."""
    values = {**entry.get("rule", {}), **{name: entry[name] for name in ("name", "weight") if name in entry}}
    values |= entry["source"]
    if "caption_columns" in values:
        values |= {f"{name}_column": column for name, column in values.pop("conditions").items()}
        values |= {
            "dataset_config_name": values.pop("config_name"),
            "caption_column": ",".join(values.pop("caption_columns")),
            "sizes_from": "columns" if values["sizes"] else "headers",
            "size_columns": ",".join(f"{name}={column}" for name, column in values.pop("sizes").items()) or None,
        }
    for name in ("dataset", *_FOLDERS) if entry["local"] else _FOLDERS:
        values[name] = _with_paths(values.get(name), lambda path: os.path.abspath(os.path.join(folder, path)))
    root = default_root(values["dataset"])
    if "root" in entry:
        root = entry["root"] and read_root(entry["root"], Path(folder))
    return StreamSource(
        source=build(RowsConfig, values | {name: _with_paths(values[name], Path) for name in _FOLDERS}),
        root=root,
        table=BucketTable.from_json(json.dumps(entry["table"])),
    )


def _places_of(source: StreamSource) -> Iterator[str | None]:
    """Yield the folders and URLs that a source reads: its data set, unless the hub has it, and what lies beside it."""
    yield source.root
    if is_url(source.source.dataset) or is_local(source.source.dataset):
        yield source.source.dataset
    values = flatten(source.source)
    for folders in (values[name] for name in _FOLDERS):
        yield from map(str, folders if isinstance(folders, list) else filter(None, [folders]))


def _with_paths(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a path, or each of a list of paths, changed; None for none."""
    return list(map(change, value)) if isinstance(value, list) else value and change(value)


def holds_stream(folder: str | os.PathLike[str]) -> bool:
    """Return whether a prepared folder describes a stream instead of holding rows.

    Raises:
        BucketingError: If it is not a prepared folder.
    """
    return STREAM in read_manifest(Path(folder))


def prepare_stream(
    sources: SourceConfig | Sequence[SourceConfig],
    *,
    spec: LatentSpec,
    native_sizes: Sequence[tuple[int, int]] = (),
    taken: ReferenceRule | None = None,
    conditions: Iterable[Condition] = (),
    audio: AudioRule | None = None,
    say: Callable[[str], None] = print,
) -> tuple[PreparedStream, Columns]:
    """Check the first rows of sources as those of a data set of rows, and describe them as one stream.

    The arguments are those of [`check_sources`][hf_bucketing.columns.preparation.check_sources], `conditions`, all
    that the model takes as its recipe declares them, and `audio`, the rule of the model's audio, if it makes some.

    Returns:
        The stream, and the size and bucket columns of the first rows, those of the first source first.

    Raises:
        BucketingError: If a setting needs all rows, the table does not suit the model, or none of the first rows of a
            source is usable; and as `prepare`.
    """
    configs = [sources] if isinstance(sources, SourceConfig) else list(sources)
    normalized_shares([config.weight for config in configs])
    audio = shared_audio(configs, audio)
    checked = check_sources(
        sources, spec=spec, native_sizes=native_sizes, taken=taken, streaming=True, overwrite=True, say=say
    )
    check_same_conditions({name: source.config.conditions for name, source in checked.items()})
    table, ids = union_of_tables([source.table for source in checked.values()])
    by_source = [_columns_of(source, new_ids) for source, new_ids in zip(checked.values(), ids, strict=True)]
    names = dict.fromkeys(name for part in by_source for name in part)
    columns = {name: np.concatenate([part.get(name, _no_lists(part)) for part in by_source]) for name in names}
    first_rows = [source.loaded.first_rows for source in checked.values()]
    condition_names = [name for source in checked.values() for name in source.config.conditions]
    prepared = PreparedStream(
        parts=tuple(StreamSource(source.config, source.rows.root, source.table) for source in checked.values()),
        table=table,
        open_table=configs[0].table.make_open(spec, table),
        num_shards=min(source.loaded.dataset.num_shards for source in checked.values()),
        sample=StreamSample.of(columns, row_bytes=sum(map(_row_bytes, first_rows)) // len(first_rows)),
        references=shared_rule(configs, spec, taken),
        audio=audio,
        token_conditions=token_conditions(conditions, condition_names),
    )
    return prepared, columns


def _columns_of(source: CheckedSource, new_ids: IntArray) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of the first rows of a source, with the buckets of the table of all sources."""
    dataset = source.rows.dataset
    columns = {name: column_array(dataset, name) for name in _REPORTED if name in dataset.column_names}
    if not (columns["bucket_id"] >= 0).any():
        reasons = ", ".join(f"{count} {label}" for label, count in count_rejections(columns["rejection"]).items())
        raise BucketingError(
            f"None of the first {len(dataset)} rows of {source.config.dataset} can be trained: {reasons}; choose "
            "other buckets, or other columns (`media_column`, `caption_column`)."
        )
    columns["bucket_id"] = np.append(new_ids, REJECTED_BUCKET)[columns["bucket_id"]]
    files = paths_of(dataset, range(len(dataset)), source.rows.column)
    columns["file"] = np.array([file or "a row without a path" for file in files], object)
    return columns


def _no_lists(columns: Columns) -> npt.NDArray[Any]:
    """Return an empty list for each row, as the sizes of references of a source without any."""
    lists = np.empty(len(columns["bucket_id"]), object)
    lists[:] = [[] for _ in lists]
    return lists


def _row_bytes(rows: Dataset) -> int:
    return sum(map(bytes_in, rows)) // len(rows)
