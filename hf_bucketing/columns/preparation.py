"""From a source of data to rows that training can draw: captions checked, sizes and buckets computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, Value

from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable, union_of_tables
from ..conditions.audio import AudioRule
from ..conditions.condition import Condition, token_conditions
from ..conditions.names import REFERENCE, all_columns, columns_of
from ..conditions.references import ReferenceRule
from ..errors import BucketingError, ColumnError, quoted
from ..media.rows import CLIP_END, CLIP_START, REGULARIZATION, MediaColumns
from ..settings import marked, not_default
from .apply import map_columns, with_columns
from .arrays import column_array
from .audio import AudioColumns, describe_audio
from .buckets import BucketColumns
from .captions import check_captions, for_source
from .clips import SCENE_END, SCENE_START, cut_clips
from .conditions import ConditionColumns, check_condition_columns, check_conditions
from .conventions import describe_columns
from .faults import Faults
from .layouts import SourceRequest
from .merge import merge_sources, with_sources
from .metadata import MediaMetadata, add_sizes
from .nested import nested_names, with_nested
from .prepared import ROW_WEIGHT, PreparedDataset
from .settings import ClipRule, RowsConfig, SourceConfig, TableConfig, read_size_columns
from .source_lists import name_sources, row_weights
from .sources import MediaDataset, load_rows


class CheckedSource(NamedTuple):
    """A source whose rows, or of a stream whose first rows, were checked and assigned to buckets.

    Attributes:
        loaded ([`MediaDataset`]): All rows, or the stream, as they were found.
        rows ([`MediaDataset`]): Rows with the columns of their sizes and buckets; of a stream, its first rows.
        config ([`RowsConfig`]): How the columns of all rows are computed: with the names of all columns, one origin of
            sizes, the length of clips and, among several, the name of the source.
        table ([`BucketTable`]): Table of its buckets.
    """

    loaded: MediaDataset
    rows: MediaDataset
    config: RowsConfig
    table: BucketTable


def check_sources(
    sources: SourceConfig | Sequence[SourceConfig],
    *,
    spec: LatentSpec,
    native_sizes: Sequence[tuple[int, int]] = (),
    taken: ReferenceRule | None = None,
    streaming: bool = False,
    num_proc: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, CheckedSource]:
    """Read the rows of sources, or the first rows of streams, check them, and add columns of sizes and buckets.

    Rows without a usable caption, file, clip or condition are rejected where `on_error` and `on_caption_error` say so.

    Args:
        sources ([`SourceConfig`] or several): What to read, and its bucket table.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        native_sizes (sequence of pairs): The model's own sizes, `(height, width)` in pixels, for its table.
        taken ([`ReferenceRule`][hf_bucketing.conditions.references.ReferenceRule], *optional*): References that the
            model takes, as `reference_rule` of its recipe says; by default any number, as grids of their own.
        streaming (`bool`): Whether the sources are streams.
        num_proc (`int`, *optional*): Processes that read file headers; by default this one.
        overwrite (`bool`): Whether bucket columns that the data set already has are replaced.
        say (callable): Called with each sentence about what was found.

    Returns:
        The sources by their names; with `each_budget` one for each budget, such as `"clips-4096"`.

    Raises:
        ColumnError: If there is no caption column or a named column, or captions are not text or clips do not lie in
            their files, unless such rows are rejected; and as `load_source`.
        MediaError: If files cannot be read or conditions do not fit their samples, unless such rows are rejected; and
            as `load_source`.
        RowsError: If several of these are so; the message has a line for each.
        BucketingError: If two sources have one name, or their settings cannot be met in one data set.
    """
    configs = [sources] if isinstance(sources, SourceConfig) else list(sources)
    names = name_sources([(config.dataset, config.name) for config in configs])
    several = sum(len(config.table.of_rows) for config in configs) > 1
    _check_alike(configs)
    shared_rule(configs, spec, taken)
    checked: dict[str, CheckedSource] = {}
    settings: dict[str, TableConfig] = {}
    with Faults() as faults:
        for name, config in zip(names, configs, strict=True):
            of_source = {name + end: table for end, table in config.table.of_rows.items()}
            tables = {part: table.ladder.make(spec, native_sizes=native_sizes) for part, table in of_source.items()}
            settings |= of_source
            named = replace(config, name=name) if several else config
            longest = next(iter(tables.values())).max_frames
            try:
                loaded, rows, of_rows = _check_source(
                    named, longest, taken=taken, streaming=streaming, num_proc=num_proc, say=say
                )
            except BucketingError as error:
                faults.report(error, source=name if several else None)
                continue
            for part, table in tables.items():
                weight = None if config.weight is None else config.weight / len(tables)
                of_part = replace(of_rows, name=part if several else config.name, weight=weight)
                checked[part] = CheckedSource(loaded, rows, of_part, table)
    for name, source in checked.items():
        if not len(source.rows.dataset):
            raise ColumnError(f"The source {name} has no rows; correct its `dataset` and `split`, or remove it.")
    for name, source in _with_chosen_tables(checked, settings, spec, native_sizes=native_sizes).items():
        columns = BucketColumns(source.table, spec, rule=source.config.rule)
        mapped = map_columns(source.rows.dataset, columns, overwrite=overwrite)  # processes would start for longer
        checked[name] = source._replace(rows=replace(source.rows, dataset=mapped))
    return checked


def _with_chosen_tables(
    checked: Mapping[str, CheckedSource],
    settings: Mapping[str, TableConfig],
    spec: LatentSpec,
    *,
    native_sizes: Sequence[tuple[int, int]],
) -> dict[str, CheckedSource]:
    """Return the sources with tables that `num_buckets` chooses, one from all rows of those with equal settings."""
    chosen = dict(checked)
    waiting = [name for name in checked if settings[name].num_buckets is not None]
    while waiting:
        table, rule = settings[waiting[0]], checked[waiting[0]].config.rule
        alike = [name for name in waiting if (settings[name], checked[name].config.rule) == (table, rule)]
        columns = zip(*(_sizes_of(checked[name].rows.dataset) for name in alike), strict=True)
        frames, heights, widths = map(np.concatenate, columns)
        made = table.make(spec, native_sizes=native_sizes, samples=(frames, heights, widths), rule=rule)
        chosen |= {name: checked[name]._replace(table=made) for name in alike}
        waiting = [name for name in waiting if name not in alike]
    return chosen


def _sizes_of(dataset: Dataset) -> list[npt.NDArray[Any]]:
    """Return the frames, heights and widths of rows."""
    return [column_array(dataset, name) for name in ("num_frames", "height", "width")]


def _load_described(source: SourceConfig, *, streaming: bool, say: Callable[[str], None]) -> MediaDataset:
    """Load a source, as rows or as a stream, and say how it was read.

    Raises:
        BucketingError: If a setting needs all rows, and the source is a stream.
        ColumnError: If there is no caption column; and as `load_source`.
        MediaError: As `load_source`.
    """
    reasons = marked(SourceConfig, "needs_rows")
    if streaming and (unused := not_default(source, *reasons)):
        raise BucketingError(f"Omit {quoted(unused)}: {reasons[unused[0]]}.")
    loaded = load_rows(SourceRequest.of(source, streaming=streaming))
    say(loaded.describe())
    if loaded.caption_column is None:
        names = nested_names(loaded.dataset if loaded.first_rows is None else loaded.first_rows)
        raise ColumnError(
            f"No caption column was found among {names}; name one as `caption_column`, or write captions beside the "
            "files."
        )
    return loaded


def _check_source(
    source: SourceConfig,
    longest: int,
    *,
    taken: ReferenceRule | None,
    streaming: bool,
    num_proc: int | None,
    say: Callable[[str], None],
) -> tuple[MediaDataset, MediaDataset, RowsConfig]:
    """Load a source, check its rows or the first rows of its stream, and add the columns of their sizes.

    Returns:
        The source as it was found, its rows, and how the columns of all rows are computed; clips have `longest` frames
        where the source does not say how many.
    """
    loaded = _load_described(source, streaming=streaming, say=say)
    clips = source.clip_rule(longest)
    with Faults() as faults:
        rows, config = _check_rows(source, loaded, faults, taken=taken, clips=clips, num_proc=num_proc, say=say)
    return loaded, rows, config


def _check_rows(
    source: SourceConfig,
    loaded: MediaDataset,
    faults: Faults,
    *,
    taken: ReferenceRule | None,
    clips: ClipRule | None,
    num_proc: int | None,
    say: Callable[[str], None],
) -> tuple[MediaDataset, RowsConfig]:
    """Check rows and add the columns of their sizes; also return how those of all rows are computed.

    Rows whose file or clip is at fault are marked as if they were rejected, so that their conditions are not checked.
    """
    assert loaded.caption_column is not None, "_load_described checks it"
    texts = [loaded.caption_column, *(source.caption_column or "").split(",")[1:]]
    named = {} if source.size_columns is None else read_size_columns(source.size_columns)
    rows: Dataset = loaded.dataset if loaded.first_rows is None else loaded.first_rows
    columns = rows.column_names
    rows = _with_named_columns(rows, source, [*texts, *named.values()])
    check_condition_columns(rows, source.conditions)
    captions = check_captions(
        rows,
        texts,
        on_error=source.treatment.captions,
        template=source.caption_template,
        media_column=loaded.column,
        audio_column=source.audio_caption_column,
        report=lambda error: faults.report(for_source(error)),
    )
    metadata = MediaMetadata(
        loaded.column, target_fps=source.target_fps, root=loaded.root, on_error=source.treatment.files
    )
    sized = add_sizes(
        captions.dataset,
        metadata,
        sizes_from=source.sizes_from,
        size_columns=named,
        num_proc=num_proc,
        report=faults.report,
    )
    if captions.summary and source.treatment.captions != "raise":
        say(captions.summary)
    say(sized.origin)
    if sized.transparency:
        say(sized.transparency)
    dataset = _cut(
        captions.mark(sized.dataset), source, loaded, faults, clips=clips, caption_column=captions.column, say=say
    )
    dataset = _with_conditions(dataset, source, loaded, faults, taken=taken, num_proc=num_proc, say=say)
    say(describe_columns(columns, _columns_read(source, loaded, texts, sizes=sized.columns, present=columns)))
    dataset = with_marks(dataset, source, say=say)
    sizes = ",".join(f"{name}={column}" for name, column in sized.columns.items())
    config = replace(
        RowsConfig(**{field.name: getattr(source, field.name) for field in fields(RowsConfig)}),
        media_column=loaded.column,
        caption_column=",".join(texts),
        sizes_from="columns" if sizes else "headers",
        size_columns=sizes or None,
        clip_frames=None if clips is None else clips.frames,
    )
    return replace(loaded, dataset=dataset, conditions=source.conditions), config


def _with_named_columns(rows: Dataset, source: SourceConfig, names: Sequence[str]) -> Dataset:
    """Return rows with the columns that settings name, those within others too, as columns of their own."""
    others = [source.audio_caption_column, source.weight_column]
    return with_nested(rows, [*names, *all_columns(source.conditions), *(name for name in others if name is not None)])


def _cut(
    dataset: Dataset,
    source: SourceConfig,
    loaded: MediaDataset,
    faults: Faults,
    *,
    clips: ClipRule | None,
    caption_column: str,
    say: Callable[[str], None],
) -> Dataset:
    """Return the clips of the files, if there is a rule for them."""
    if clips is not None:
        dataset, summary = cut_clips(
            dataset,
            clips,
            on_error=source.treatment.files,
            media_column=loaded.column,
            caption_column=caption_column,
            report=faults.report,
        )
        say(summary)
    elif {SCENE_START, SCENE_END} <= set(dataset.column_names):
        say(f"The columns {SCENE_START} and {SCENE_END} are not used; `clips` scenes cuts files by them.")
    return dataset


def _with_conditions(
    dataset: Dataset,
    source: SourceConfig,
    loaded: MediaDataset,
    faults: Faults,
    *,
    taken: ReferenceRule | None,
    num_proc: int | None,
    say: Callable[[str], None],
) -> Dataset:
    """Check the conditions of rows, and add the columns of their sizes and of sound."""
    files = MediaColumns(
        column=loaded.column, root=loaded.root, conditions=source.conditions, references=source.reference_rule(taken)
    )
    dataset, sentences = check_conditions(
        dataset,
        ConditionColumns(files, on_error=source.treatment.files),
        media_column=loaded.column,
        num_proc=num_proc,
        report=faults.report,
    )
    for sentence in sentences:
        say(sentence)
    if source.with_audio:
        dataset = map_columns(dataset, AudioColumns(files), num_proc=num_proc, overwrite=True)
        say(describe_audio(dataset))
    return dataset


def _columns_read(
    source: SourceConfig,
    loaded: MediaDataset,
    texts: Sequence[str],
    *,
    sizes: Mapping[str, str],
    present: Sequence[str],
) -> dict[str, str]:
    """Return what each column that is read is taken for, by settings or by its name."""
    by_name = {CLIP_START: "part of its file", CLIP_END: "part of its file"}
    if not source.is_regularization:
        by_name[REGULARIZATION] = "marks of regularization samples"
    if source.clips == "scenes":
        by_name |= {SCENE_START: "scenes", SCENE_END: "scenes"}
    conditions = source.conditions.items()
    return {
        loaded.column: "media",
        **dict.fromkeys(texts, "captions"),
        **{column: name for name, named in conditions for column in columns_of(name, named)},
        **{column: name for name, column in sizes.items()},
        **{name: effect for name, effect in by_name.items() if name in present},
        **({} if source.audio_caption_column is None else {source.audio_caption_column: "captions of the sound"}),
        **({} if source.weight_column is None else {source.weight_column: "occurrences per epoch"}),
    }


def with_marks(dataset: Dataset, source: SourceConfig, *, say: Callable[[str], None]) -> Dataset:
    """Mark all rows as regularization samples if the source says so, and say how many are marked.

    Raises:
        ColumnError: If marks in a column are neither booleans nor whole numbers.
    """
    if source.is_regularization:
        marks = {REGULARIZATION: np.ones(len(dataset), bool)}
        dataset = with_columns(dataset, marks, features=Features({REGULARIZATION: Value("bool")}))
    if REGULARIZATION in dataset.column_names:
        kind = dataset.features[REGULARIZATION]
        if not isinstance(kind, Value) or not kind.dtype.startswith(("bool", "int", "uint", "null")):
            raise ColumnError(f"The column {REGULARIZATION} must hold true or false, or 1 or 0, got {kind}.")
        count = sum(map(bool, dataset[REGULARIZATION]))
        say(f"{count} of {len(dataset)} rows are regularization samples, which `preservation` is about in training.")
    return dataset


def prepare(
    sources: SourceConfig | Sequence[SourceConfig],
    *,
    spec: LatentSpec,
    native_sizes: Sequence[tuple[int, int]] = (),
    taken: ReferenceRule | None = None,
    conditions: Iterable[Condition] = (),
    audio: AudioRule | None = None,
    num_proc: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> PreparedDataset:
    """Read one or several sources, and assign the rows of each to the buckets of its table.

    Rows of several sources get a column `hf_bucketing_source`, a `ClassLabel` of the sources' names, and their tables
    become one. Where rows do not occur once per epoch, a column `hf_bucketing_weight` says how often.

    The arguments are those of [`check_sources`], `conditions`, all that the model takes as its recipe declares them,
    and `audio`, the rule of the audio of the model, if it makes some.

    Raises:
        BucketingError: As [`check_sources`], for all sources at once, if the data set already has bucket columns, or
            only some sources have a `weight`.
    """
    configs = [sources] if isinstance(sources, SourceConfig) else list(sources)
    audio = shared_audio(configs, audio)
    checked = check_sources(
        configs,
        spec=spec,
        native_sizes=native_sizes,
        taken=taken,
        num_proc=num_proc,
        overwrite=overwrite,
        say=say,
    )
    table, ids = union_of_tables([source.table for source in checked.values()])
    parts = {name: source.rows for name, source in checked.items()}
    rows = next(iter(parts.values()))
    weights = row_weights(
        [part.dataset for part in parts.values()],
        columns=[source.config.weight_column for source in checked.values()],
        repeats=[source.config.repeats for source in checked.values()],
        shares=[source.config.weight for source in checked.values()],
    )
    if len(parts) > 1:
        rows = merge_sources(parts, say=say)
        rows = replace(rows, dataset=with_sources(rows.dataset, parts, table=table, ids=ids))
    dataset = rows.dataset
    if weights is not None:
        dataset = with_columns(dataset, {ROW_WEIGHT: weights}, features=Features({ROW_WEIGHT: Value("float64")}))
        usable = column_array(dataset, "bucket_id") >= 0
        say(f"{usable.sum()} usable rows occur {weights[usable].sum():.10g} times per epoch, by their weights.")
    packed = configs[0].table.make_open(spec, table)
    if configs[0].table.image_sizes == "video":
        packed = packed.images_at_video_sizes(*_sizes_of(dataset), rule=configs[0].rule)
    return PreparedDataset(
        dataset=dataset,
        table=table,
        open_table=packed,
        column=rows.column,
        caption_column=rows.caption_column,
        root=rows.root,
        other_roots=rows.other_roots,
        conditions=rows.conditions,
        references=shared_rule(configs, spec, taken),
        audio=audio,
        token_conditions=token_conditions(conditions, rows.conditions),
        texts=rows.texts,
    )


def shared_audio(configs: Sequence[SourceConfig], audio: AudioRule | None) -> AudioRule | None:
    """Return the rule of the audio of all sources, that of the model, or None where none is trained.

    Raises:
        BucketingError: If audio is trained, but the model makes none.
    """
    if not configs[0].with_audio:
        return None
    if audio is None:
        raise BucketingError("Omit `with_audio`: the model makes video without audio.")
    return audio


def shared_rule(
    configs: Sequence[SourceConfig], spec: LatentSpec, taken: ReferenceRule | None = None
) -> ReferenceRule:
    """Return the rule of the references of all sources, for a model that takes such references.

    Raises:
        BucketingError: If sources with references differ in it, it is given and none has references, or the model
            needs references and a source has none.
    """
    taken = (taken or ReferenceRule()).in_pixels(spec.multiples)
    settings = ("reference_pixels", "reference_downscale_factor")
    with_references = [config for config in configs if REFERENCE in config.conditions]
    unused = dict.fromkeys(name for config in configs for name in not_default(config, *settings))
    if unused and not with_references:
        raise BucketingError(
            f"Omit {quoted(list(unused))}: no effect without references; name their columns as `reference_column`, or "
            "their folders as `reference_folder`."
        )
    if without := [config.dataset for config in configs if taken.least and config not in with_references]:
        raise BucketingError(
            f"The model needs references, which {quoted(without)} lacks; name their columns as `reference_column`, or "
            "their folders as `reference_folder`."
        )
    rules = {config.reference_rule(taken) for config in with_references} or {taken.unsized}
    if len(rules) > 1:
        raise BucketingError(f"{quoted(settings)} must be the same for all sources whose samples have references.")
    return rules.pop()


def _check_alike(configs: Sequence[SourceConfig]) -> None:
    """Raise BucketingError if sources differ in what all rows of a data set share: the rules of their packs."""
    if len({config.table.max_frames for config in configs}) > 1:
        raise BucketingError("`max_frames` must be the same for all sources, as packs of all of them share it.")
    if len({config.with_audio for config in configs}) > 1:
        raise BucketingError("`with_audio` must be the same for all sources; files without sound train video alone.")
    kinds = {config.table.image_sizes for config in configs}
    if len(kinds) > 1:
        raise BucketingError(
            "`image_sizes` must be the same for all sources, as packs of images from all sources share one rule."
        )
    if kinds == {"video"} and len({config.rule for config in configs}) > 1:
        raise BucketingError(
            'With `image_sizes="video"`, images from all sources share one rule; give the sources the same limits, '
            "such as `max_upscale`."
        )
