"""A data set with its columns, bucket table and latent spec in one folder, as training reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, load_from_disk

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import AssignmentRule
from ..buckets.open_table import ImageSizes, OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..command_line.config_file import CONFIG_FILE, read_config_file, write_config
from ..conditions.audio import AudioRule
from ..conditions.condition import Condition
from ..conditions.names import REFERENCE, all_columns
from ..conditions.references import Lists, ReferenceRule
from ..conditions.rows import ConditionRules, RowConditions
from ..errors import BucketingError, ColumnError, MediaError, explains_arguments
from ..files import complete_folder
from ..hub import download_of
from ..media.remote import ALLOWED_PATHS, check_allowed, is_url
from ..media.rows import SOURCE, SOURCE_COLUMN, MediaColumns
from ..plans.ways import CachedAs
from ..randomness import COLUMN_PREFIX, ROW, check_rows
from .apply import undecoded
from .arrays import column_array, column_batches, is_list_type
from .data_lock import LOCK_FILE, LockRule
from .faults import path_of
from .layouts import TextFiles

MANIFEST = "bucketing.json"

STREAM = "stream"
"""Entry of the manifest of a folder that describes a stream instead of holding rows."""

ROW_WEIGHT = f"{COLUMN_PREFIX}weight"
"""Column of the occurrences of each row per epoch, where they are not 1."""

MANIFEST_VERSION = 9
"""Version of the manifest, raised whenever its fields or the columns change their meaning."""

_PREFIXED_NAMES = 9
"""First version whose columns that this package adds have names that no table brings."""

_NAMES_BEFORE = {"index": ROW, "weight": ROW_WEIGHT, SOURCE: SOURCE_COLUMN}
"""Columns of earlier versions, and the names that they have now."""

_BEFORE_REFERENCES = 7
"""Version that says nothing of the sizes of references; it is read too, unless samples have some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Describe the cached latents and texts of a data set; see `hf_bucketing.caching`, which makes and reads them.

    The data set's `latents_key` and `text_key` columns hold the keys of the entries; rows without a bucket have empty
    keys. With several views, a cell of `latents_key` lists the keys of a row's views. This value is part of the
    prepared folder, so it is defined here, with plain fields.

    Args:
        folder (`str`): Folder or URL of the entries.
        batching (`"bucket"` or `"pack"`): Whether latents have their sizes in `table`, or in `open_table`.
        latents_model (`str`): Fingerprint of the encoder of the latents.
        text_model (`str`, *optional*): Fingerprint of the encoder of the captions; None if there are none.
        empty_text_key (`str`, *optional*): Key of the entry of the text that stands for a dropped caption.
        views (`dict`): Fields of the [`ViewRule`][hf_bucketing.media.ViewRule], and the `seed` of its draws.
        prepared (`str`, *optional*): Prepared folder of the rows that were encoded, where it is known.
        views_per_sample (`int`): Views of each row.
        random_resize (`int`, *optional*): Minimum side, in pixels, of the sizes that were drawn of all views but the
            first; None where all views of a row have one size.
        appended_frames (`"first"`, `"last"` or `"all"`, *optional*): Frames of each view that are also encoded by
            themselves.
        max_sequence_length (`int`, *optional*): Text tokens per caption; None if there are no captions, or an earlier
            release made the cache.
        encoders (`dict`, *optional*): What the models that encoded say of themselves, as
            `hf_bucketing.caching.encoders` describes them; None if an earlier release made the cache.
    """

    folder: str
    batching: CachedAs
    latents_model: str
    text_model: str | None
    empty_text_key: str | None
    views: dict[str, Any]
    prepared: str | None = None
    views_per_sample: int = 1
    random_resize: int | None = None
    appended_frames: Literal["first", "last", "all"] | None = None
    max_sequence_length: int | None = None
    encoders: dict[str, Any] | None = None

    def with_folders(self, change: Callable[[str], str]) -> CacheInfo:
        """Return the value with its folders changed by a function, such as to paths that begin elsewhere."""
        source = None if self.prepared is None else change(self.prepared)
        return replace(self, folder=change(self.folder), prepared=source)


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDataset:
    """Hold rows with media, caption, size and bucket columns, and the tables that they were computed with.

    Args:
        dataset (`Dataset`): Rows with the columns of `MediaMetadata` and `BucketColumns`. `save` adds the
            column `hf_bucketing_row` of row numbers, which name a sample in logs and seed its crops and noise.
        table ([`BucketTable`]): Table of the `bucket_id` column.
        open_table ([`OpenTable`]): Sizes of the rows in packs. Its `spec` also counted the `num_tokens` column.
        column (`str`): Media column.
        caption_column (`str`, *optional*): Text column; None if there is none.
        root (`str`, *optional*): Folder or URL that relative paths in these columns start from.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources, if there are several.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`.
        references ([`ReferenceRule`][hf_bucketing.conditions.references.ReferenceRule]): How many references samples
            may have, and the sizes in which they are shown.
        audio ([`AudioRule`][hf_bucketing.conditions.audio.AudioRule], *optional*): Rule of the audio of the samples;
            None if they have none.
        token_conditions (`tuple` of [`Condition`][hf_bucketing.conditions.condition.Condition]): Conditions of the
            samples, beside references, that the model takes as tokens.
        cache ([`CacheInfo`], *optional*): Latents and texts that are already encoded.
        texts (`tuple` of [`TextFiles`][hf_bucketing.columns.layouts.TextFiles]): Local files that the captions of
            each source were read from.
        settings (mapping): Settings of the scripts that made it, as a YAML file holds them: `save` writes them to
            config.yaml.
    """

    dataset: Dataset
    table: BucketTable
    open_table: OpenTable
    column: str
    caption_column: str | None
    root: str | None = None
    other_roots: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    references: ReferenceRule = field(default_factory=ReferenceRule)
    audio: AudioRule | None = None
    token_conditions: tuple[Condition, ...] = ()
    cache: CacheInfo | None = None
    texts: tuple[TextFiles, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> MediaColumns:
        """Columns that lead to the files."""
        return MediaColumns(
            column=self.column,
            root=self.root,
            other_roots=self.other_roots,
            conditions=self.conditions,
            references=self.references,
            audio=self.audio,
        )

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of what the samples have beside their media and captions: conditions, and audio."""
        return self.files.shown

    @property
    def lock_rule(self) -> LockRule:
        """Rule of the hashes of what a model sees of each row."""
        return LockRule(
            files=self.files, caption_column=self.caption_column, table=self.table, open_table=self.open_table
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, if there are several."""
        feature = self.dataset.features.get(SOURCE_COLUMN)
        return tuple(feature.names) if isinstance(feature, ClassLabel) else ()

    @property
    def weights(self) -> FloatArray | None:
        """Occurrences of each row per epoch, `float64` of shape `(n,)`, which all plans take; None for once each."""
        if ROW_WEIGHT not in self.dataset.column_names:
            return None
        return column_array(self.dataset, ROW_WEIGHT).astype(np.float64, copy=False)

    @property
    def source_ids(self) -> IntArray | None:
        """Source of each row, `int64` of shape `(n,)`, as a position in `sources`; None if there is one."""
        return column_array(self.dataset, SOURCE_COLUMN).astype(np.int64) if self.sources else None

    def source_columns(self) -> dict[str, Any]:
        """Return the arguments of [`count_sources`][hf_bucketing.report.count_sources], if there are several."""
        if not self.sources:
            raise BucketingError("The data set has one source, or was prepared without a column of sources.")
        names = ["bucket_id", "num_tokens", "rejection"]
        columns = {name: column_array(self.dataset, name) for name in names if name in self.dataset.column_names}
        return {"sources": self.source_ids, "names": self.sources, "columns": columns, "weights": self.weights}

    @property
    def spec(self) -> LatentSpec:
        """Strides and patch of the model that the data set was prepared for."""
        return self.open_table.spec

    @property
    def condition_rules(self) -> ConditionRules:
        """How conditions are counted for the model that the data set was prepared for."""
        return ConditionRules.of(
            self.conditions, references=self.references, audio=self.audio, taken=self.token_conditions
        )

    def row_conditions(self, rules: ConditionRules | None = None) -> RowConditions:
        """Return the conditions of the rows, as rules count them, by default [`condition_rules`]."""
        rules = self.condition_rules if rules is None else rules
        columns = {name: self._condition_column(name) for name in rules.columns}
        return rules.rows(columns, num_rows=len(self.dataset))

    def _condition_column(self, name: str) -> npt.NDArray[Any] | Lists:
        """Return a column of the rows, one of lists as two arrays, so that those of 100 million rows fit in memory."""
        if not is_list_type(self.dataset.data.schema.field(name).type):
            return column_array(self.dataset, name)
        cells = list(column_batches(self.dataset, name))
        counts = [np.zeros(0, np.int64), *(pc.list_value_length(part).fill_null(0).to_numpy(False) for part in cells)]
        values = [np.zeros(0, np.int32), *(part.flatten().to_numpy(False) for part in cells)]
        return Lists(np.concatenate(values), np.concatenate(counts))

    def read_rows(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield some rows with all their columns, their files as paths or bytes."""
        columns = [self.column, *all_columns(self.conditions)]
        yield from undecoded(self.dataset.with_format(None).select(rows), columns)

    def file_names(self, rows: Sequence[int]) -> list[str]:
        """Return the paths of some rows' files, or `row N` for bytes without a path."""
        cells = self.dataset.select_columns([self.column]).with_format(None).select(rows)[self.column]
        named = zip(rows, map(path_of, cells), strict=True)
        return [f"row {row}" if path is None else path for row, path in named]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder, replacing an earlier one; it gets its name only when it is complete.

        Beside the rows lies their lock, see [`DataLock`][hf_bucketing.columns.data_lock.DataLock].

        Raises:
            BucketingError: If the folder exists and is not such a data set.
            ColumnError: If the column `hf_bucketing_row` does not name each row once.
        """
        target = Path(folder)
        dataset = self.dataset
        if ROW not in dataset.column_names:
            dataset = dataset.add_column(ROW, np.arange(len(dataset)))
        check_rows(column_array(dataset, ROW))
        manifest = {
            "version": MANIFEST_VERSION,
            "table": json.loads(self.table.to_json()),
            "open_table": asdict(self.open_table),
            "column": self.column,
            "caption_column": self.caption_column,
            "root": self.root and root_from(self.root, target),
            "other_roots": [root_from(root, target) for root in self.other_roots],
            "conditions": dict(self.conditions),
            "references": self.references.settings,
            "audio": None if self.audio is None else self.audio.settings,
            "token_conditions": [condition.settings for condition in self.token_conditions],
            "cache": None
            if self.cache is None
            else asdict(self.cache.with_folders(lambda folder: root_from(folder, target))),
            "texts": [
                asdict(replace(texts, files=tuple(root_from(file, target) for file in texts.files)))
                for texts in self.texts
            ],
        }
        with complete_folder(target, marker=MANIFEST) as partial:
            dataset.save_to_disk(str(partial))
            self.lock_rule.lock(load_from_disk(str(partial))).save(partial / LOCK_FILE)
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            write_settings(partial, self.settings)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PreparedDataset:
        """Read what [`save`][PreparedDataset.save] wrote.

        Raises:
            BucketingError: If the folder is not a prepared data set, a release wrote it whose folders differ, or it
                was downloaded and reads files elsewhere.
        """
        path = Path(folder)
        manifest = read_manifest(path)
        if STREAM in manifest:
            raise BucketingError(
                f"{path} describes a stream and holds no rows, so nothing can be planned, cached or counted; train "
                "from it with `streaming=True`, or prepare its rows without --streaming."
            )
        audio = manifest.get("audio")
        cache = None if manifest["cache"] is None else CacheInfo(**manifest["cache"])
        cache = cache and cache.with_folders(lambda folder: read_root(folder, path))
        root = manifest["root"] and read_root(manifest["root"], path)
        other_roots = tuple(read_root(root, path) for root in manifest["other_roots"])
        check_places([root, *other_roots, None if cache is None else cache.folder], path, manifest=MANIFEST)
        return cls(
            dataset=_read_rows(path, manifest["version"]),
            table=BucketTable.from_json(json.dumps(manifest["table"])),
            open_table=read_open_table(manifest["open_table"]),
            column=manifest["column"],
            caption_column=manifest["caption_column"],
            root=root_of(root, path, manifest=MANIFEST),
            other_roots=other_roots,
            conditions=manifest["conditions"],
            references=read_rule(manifest),
            audio=None if audio is None else AudioRule(**audio),
            token_conditions=tuple(Condition(**values) for values in manifest.get("token_conditions", ())),
            cache=cache,
            texts=tuple(
                TextFiles(**{**texts, "files": tuple(read_root(file, path) for file in texts["files"])})
                for texts in manifest.get("texts", ())
            ),
            settings=read_settings(path),
        )


def _read_rows(folder: Path, version: int) -> Dataset:
    """Return the rows of a folder, with the columns that name and weigh them, whatever release wrote it.

    Raises:
        BucketingError: If rows have no names of their own.
    """
    dataset = load_from_disk(str(folder))
    if version < _PREFIXED_NAMES:
        ours = [name for name in _NAMES_BEFORE if name in dataset.column_names]
        if not isinstance(dataset.features.get(SOURCE), ClassLabel):
            ours = [name for name in ours if name != SOURCE]  # of the table; rows had one source
        dataset = dataset.rename_columns({name: _NAMES_BEFORE[name] for name in ours})
    try:
        check_rows(column_array(dataset, ROW))
    except ColumnError as error:
        column = ROW if version >= _PREFIXED_NAMES else "index"
        raise BucketingError(
            f"The column {column} of {folder} does not name each row once, as its table had a column of this name or "
            "rows were added; prepare it again with hf_bucketing prepare."
        ) from error
    return dataset


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings by which a folder is made to its config.yaml, if there are any."""
    if settings:
        (folder / CONFIG_FILE).write_text(write_config(settings), encoding="utf-8")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings by which a folder was made; none if it does not hold them."""
    file = folder / CONFIG_FILE
    return read_config_file(str(file)).plain() if file.is_file() else {}


def root_from(root: str, folder: Path) -> str:
    """Return a root as it is seen from a prepared folder, so that both can be moved together."""
    return root if is_url(root) else os.path.relpath(root, folder)


def read_root(root: str, folder: Path) -> str:
    """Return a root of which a prepared folder holds how it is seen from there."""
    return root if is_url(root) else os.path.normpath(folder / root)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder, of rows or of a stream.

    Raises:
        BucketingError: If there is none, or a release wrote it whose folders differ.
    """
    if not (folder / MANIFEST).is_file():
        raise BucketingError(f"{folder} holds no {MANIFEST}; make it with hf_bucketing prepare.")
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    version, conditions = manifest["version"], manifest.get("conditions", ())
    if version == _BEFORE_REFERENCES and REFERENCE in conditions:
        raise BucketingError(
            f"{folder} was prepared before the sizes of references became a column; prepare it again with "
            "hf_bucketing prepare."
        )
    if not _BEFORE_REFERENCES <= version <= MANIFEST_VERSION:
        raise BucketingError(
            f"{folder} has version {version}, but this release reads version {MANIFEST_VERSION}; prepare it again "
            "with hf_bucketing prepare."
        )
    return manifest


def read_rule(manifest: Mapping[str, Any]) -> ReferenceRule:
    """Return the rule of references of a manifest, or that of folders that were written before there were any."""
    before = {"multiples": read_open_table(manifest["open_table"]).spec.multiples}
    return ReferenceRule.from_settings(manifest.get("references", before))


def read_open_table(values: Mapping[str, Any]) -> OpenTable:
    """Make an open table of its fields as JSON values."""
    images = values["image_sizes"]
    spec = {name: value for name, value in values["spec"].items() if name != "added_frames"}  # of version 7, always 0
    return OpenTable(
        spec=LatentSpec(**spec),
        image_sizes=None
        if images is None
        else ImageSizes(sizes=tuple(images["sizes"]), rule=AssignmentRule(**images["rule"])),
        max_frames=values["max_frames"],
    )


def check_places(places: Iterable[str | None], folder: Path, *, manifest: str) -> None:
    """Check that a prepared folder may name the places of its files.

    A downloaded one may name places in its download, on servers and on the hub. Any other may name all places but the
    whole disk, as its own record proves nothing. The environment variable `HF_BUCKETING_ALLOWED_PATHS` allows more.

    Args:
        places (iterable of `str`, *optional*): Folders and URLs.
        folder (`Path`): The prepared folder.
        manifest (`str`): Name of the file in it that names them.

    Raises:
        BucketingError: If it may not.
    """
    download = download_of(folder / manifest)
    for place in filter(None, places):
        whole_disk = os.path.dirname(place) == place
        if download is None and not whole_disk:
            continue
        try:
            check_allowed(place, str(download or os.path.abspath(folder)))
        except MediaError as error:
            why = "the whole disk" if download is None else f"outside of {download}, to which it was downloaded"
            raise BucketingError(
                f"{folder} reads files from {place}, {why}. If you trust it, prepare it again, or name that place in "
                f"the environment variable {ALLOWED_PATHS}, such as {ALLOWED_PATHS}={place}."
            ) from error


def root_of(root: str | None, folder: Path, *, manifest: str) -> str | None:
    """Return the root of a prepared folder that names one or none.

    Without a root, rows may name any file; rows of a downloaded folder then begin at its download.
    """
    download = download_of(folder / manifest)
    return root if root is not None or download is None else str(download)
