"""From a source of data to rows that training can draw: captions checked, sizes and buckets computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from datasets import Features, Value

from ..buckets.assignment import AssignmentRule
from ..buckets.ladders import token_ladder
from ..buckets.open_table import OpenTable, open_table
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..buckets.union import union_of_tables
from ..command_line.flags import numbers
from ..errors import BucketingError, ColumnError, FlagError
from ..media.conditions import CONDITIONS
from ..media.rows import MediaColumns
from ..settings import check_literals
from .apply import map_columns, with_columns
from .arrays import column_array
from .beside import BesideConfig
from .buckets import BucketColumns
from .captions import check_captions, check_template, for_source
from .clips import SCENE_END, SCENE_START, ClipRule, cut_clips
from .conditions import ConditionColumns, check_condition_columns, check_conditions
from .faults import Faults, OnCaptionError, Treatment
from .merge import merge_sources, with_sources
from .metadata import MediaMetadata, SizesFrom, add_sizes, read_size_columns
from .nested import nested_names
from .prepared import ROW_WEIGHT, PreparedDataset
from .shares import name_sources, row_weights
from .sources import MediaDataset, load_source


def heights_and_widths(text: str) -> list[tuple[int, int]]:
    """Parse the sizes of a flag, `480,832;720,1280`, or `none`."""
    return [] if text == "none" else [size[1:] for size in BucketTable.parse(text).sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """Bucket table.

    Args:
        bucket_tokens (`list` of `int`, *optional*): Token budgets per sample, such as 8190,18480 (no default: give
            this, `buckets` or `table`).
        buckets (`str`, *optional*): Buckets in diffusers' form "height,width;height,width", in place of
            `bucket_tokens` (default: none).
        table (`Path`, *optional*): File that BucketTable.to_json wrote, in place of `bucket_tokens` (default: none).
        bucket_frames (`list` of `int`): Numbers of frames that buckets have.
        bucket_sizes (list of pairs, *optional*): Sizes in pixels that token buckets always contain, such as
            480,832;720,1280, or none (default: the model's own).
        aspect_step (`float`): Distance between aspect ratios of token buckets; 0.08 is 8 %, and a larger distance
            makes fewer buckets.
        max_aspect_ratio (`float`): Largest ratio of the longer to the shorter side of token buckets.
        image_sizes (`"own"` or `"video"`): Whether images are trained at buckets of one frame, or packed at their own
            size, or both at the sizes of videos.
        max_frames (`int`, `"table"` or `"none"`): Most frames that a sample keeps in packs: a number, those of the
            longest bucket, or all that it has.

    Raises:
        FlagError: Unless one of `bucket_tokens`, `buckets` and `table` is given.
        BucketingError: If `max_frames` is not as described.
    """

    bucket_tokens: list[int] | None = field(default=None, metadata={"parse": numbers, "argument": "tokens"})
    buckets: str | None = None
    table: Path | None = None
    bucket_frames: list[int] = field(
        default_factory=lambda: [1, 17, 49, 81], metadata={"parse": numbers, "argument": "frames"}
    )
    bucket_sizes: list[tuple[int, int]] | None = field(default=None, metadata={"parse": heights_and_widths})
    aspect_step: float = 0.08
    max_aspect_ratio: float = 2.5
    image_sizes: Literal["own", "video"] = "own"
    max_frames: int | Literal["table", "none"] = "table"

    def __post_init__(self) -> None:
        check_literals(self)
        if self.max_frames not in ("table", "none") and (not isinstance(self.max_frames, int) or self.max_frames < 1):
            raise BucketingError(
                f'`max_frames` must be a number of frames of at least 1, "table" or "none", got {self.max_frames!r}.'
            )
        if sum(option is not None for option in (self.bucket_tokens, self.buckets, self.table)) != 1:
            raise FlagError("Give one of --bucket_tokens, --buckets and --table.")

    def make(self, spec: LatentSpec, *, native_sizes: Sequence[tuple[int, int]] = ()) -> BucketTable:
        """Return the table for a model of these strides and of these own sizes, `(height, width)` in pixels."""
        if self.buckets is not None:
            table = BucketTable.parse(self.buckets, frames=self.bucket_frames)
        elif self.table is not None:
            table = BucketTable.from_json(self.table.read_text())
        else:
            table = token_ladder(
                spec,
                self.bucket_tokens or [],
                frames=self.bucket_frames,
                sizes=native_sizes if self.bucket_sizes is None else self.bucket_sizes,
                max_aspect_ratio=self.max_aspect_ratio,
                aspect_step=self.aspect_step,
            )
        return table.images_at_video_sizes() if self.image_sizes == "video" else table

    def make_open(self, spec: LatentSpec, table: BucketTable) -> OpenTable:
        """Return the table of the sizes in packs, beside the bucket table of a data set."""
        limits = {"table": table.max_frames, "none": None}
        return open_table(spec, max_frames=limits.get(self.max_frames, self.max_frames))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Source of data, and how it is read.

    Args:
        dataset (`str`): Data to prepare: a csv, tsv, json, jsonl or parquet file, or its URL; tars of webdataset; a
            folder with such a file named metadata, with videos.txt and prompts.txt, or with a .txt caption beside each
            image and video; or a data set on the hub.
        dataset_config_name (`str`, *optional*): Configuration of a hub data set.
        split (`str`): Split, such as train or train[:100].
        media_column (`str`, *optional*): Image or video column, of files, paths or URLs (default: found by its name).
        first_frame_column (`str`, *optional*): Column of images to begin each clip with.
        last_frame_column (`str`, *optional*): Column of images to end each clip with.
        control_column (`str`, *optional*): Column of control videos or images, which lie over their samples frame by
            frame.
        mask_column (`str`, *optional*): Column of masks, videos or images: white is learned, black is not. A row
            without a mask is learned as a whole.
        reference_column (`str`, *optional*): Column of reference images, which keep their own size.
        caption_column (`str`, *optional*): Column of a text or a list of texts, or several such columns, as
            short_caption,long_caption; training draws one of the captions of a row in every epoch; json.caption is
            the caption within the dicts of a column json (default: found by its name).
        caption_template (`str`, *optional*): Text that each caption becomes, with {caption} in its place, such as
            "TOK, {caption}"; an empty caption becomes the rest of it.
        sizes_from (`"auto"`, `"columns"` or `"headers"`): Origin of the sizes: columns if the headers of a sample of
            files agree, columns without opening a file, or the headers of all files.
        size_columns (`str`, *optional*): Columns of sizes that have other names than width, height, num_frames and
            fps, such as num_frames=frame; duration=seconds takes the place of num_frames (default: none).
        target_fps (`float`): Frame rate to train at.
        clips (`str`, *optional*): Clips that each longer video is cut into, one row each: head, one from the start;
            uniform:N, N of them spread evenly; slide:STRIDE, one every STRIDE frames; all, consecutive ones; or
            scenes, those of the columns start and end, in seconds (default: each file is one row).
        clip_frames (`int`, *optional*): Frames of a clip at `target_fps` (default: the most frames of a bucket).
        on_error (`"raise"`, `"reject"` or `"empty"`): Treatment of unreadable files, and of clips and conditions that
            do not fit: raise ends the script and reports all of them, reject rejects their rows; empty is raise with
            `on_caption_error` empty.
        on_caption_error (`"raise"`, `"reject"` or `"empty"`, *optional*): Treatment of captions that are missing or
            not text: raise ends the script, reject rejects their rows, and empty trains them without a text (default:
            as `on_error`).
        beside ([`BesideConfig`]): Captions and other files that have the names of the media.
        name (`str`, *optional*): Name among several sources, for counts and logs (default: from its path).
        repeats (`float`): Occurrences of each row per epoch, each with noise, crop and caption of its own: 2 trains
            each row twice, 0.5 every row in every other epoch.
        weight (`float`, *optional*): Share of this source in an epoch, in place of `repeats`: of sources with weights
            3 and 1, three of four samples come from the first. An epoch then has as many samples as there are rows.
        table ([`TableConfig`]): Bucket table of its rows.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Limits of the assignment of buckets.

    Raises:
        BucketingError: If `repeats` or `weight` is not above 0, or both are given, if `on_error` and
            `on_caption_error` contradict each other, or if `caption_template`, `clips`, `clip_frames` or
            `size_columns` is not as described.
    """

    dataset: str
    dataset_config_name: str | None = None
    split: str = "train"
    media_column: str | None = None
    caption_column: str | None = None
    first_frame_column: str | None = None
    last_frame_column: str | None = None
    control_column: str | None = None
    mask_column: str | None = None
    reference_column: str | None = None
    caption_template: str | None = None
    sizes_from: SizesFrom = "auto"
    size_columns: str | None = None
    target_fps: float = 16.0
    clips: str | None = None
    clip_frames: int | None = None
    on_error: OnCaptionError = "raise"
    on_caption_error: OnCaptionError | None = None
    beside: BesideConfig = field(default_factory=BesideConfig)
    name: str | None = None
    repeats: float = 1.0
    weight: float | None = None
    table: TableConfig
    rule: AssignmentRule = field(default_factory=AssignmentRule)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.caption_template is not None:
            check_template(self.caption_template)
        if self.clip_frames is not None and (self.clips is None or self.clips == "scenes"):
            raise ColumnError("Omit `clip_frames`: no effect without `clips`, nor with the scenes of a data set.")
        self.clip_rule(1)
        Treatment.of(self.on_error, self.on_caption_error)
        if self.size_columns is not None:
            read_size_columns(self.size_columns)
        for name in ("repeats", "weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BucketingError(f"`{name}` must be above 0 and finite, got {value}.")
        if self.weight is not None and self.repeats != 1:
            raise BucketingError("`repeats` and `weight` both say how often a row occurs; give one of them.")

    def clip_rule(self, longest: int) -> ClipRule | None:
        """Return the rule of the clips, of `longest` frames where their number is not given; None for whole files."""
        frames = longest if self.clip_frames is None else self.clip_frames
        return None if self.clips is None else ClipRule.parse(self.clips, frames=frames)

    @property
    def conditions(self) -> dict[str, str]:
        """Column of each condition that is given."""
        columns = {name: getattr(self, f"{name}_column") for name in CONDITIONS}
        given: dict[str, str] = {name: column for name, column in columns.items() if column is not None}
        return {**{name: name for name in self.beside.companions}, **given}


def read_source(
    source: SourceConfig,
    *,
    clips: ClipRule | None = None,
    num_proc: int | None = None,
    say: Callable[[str], None] = print,
) -> MediaDataset:
    """Read the rows of a source, check their captions and conditions, and add the columns of their sizes.

    Args:
        source ([`SourceConfig`]): What to read.
        clips ([`ClipRule`], *optional*): Clips that videos are cut into; by default each file is one row.
        num_proc (`int`, *optional*): Processes that read file headers; by default this one.
        say (callable): Called with each sentence about what was found.

    Returns:
        [`MediaDataset`]: Rows with the columns of `MediaMetadata`; those without a usable caption, file, clip or
        condition are marked for rejection where `on_error` and `on_caption_error` say so.

    Raises:
        ColumnError: If there is no caption column or a named column, or captions are not text or clips do not lie in
            their files, unless such rows are rejected; and as `load_source`.
        MediaError: If files cannot be read or conditions do not fit their samples, unless such rows are rejected; and
            as `load_source`.
        RowsError: If several of these are so; the message has a line for each.
    """
    with Faults() as faults:
        return _read_and_check(source, faults, clips=clips, num_proc=num_proc, say=say)


def _read_and_check(
    source: SourceConfig,
    faults: Faults,
    *,
    clips: ClipRule | None,
    num_proc: int | None,
    say: Callable[[str], None],
) -> MediaDataset:
    """Return the rows of a source as [`read_source`] does; keep the errors about rows, and check the rest.

    Rows whose file or clip is at fault are marked as if they were rejected, so that their conditions are not checked.
    """
    names = [] if source.caption_column is None else source.caption_column.split(",")
    loaded = load_source(
        source.dataset,
        split=source.split,
        config_name=source.dataset_config_name,
        media_column=source.media_column,
        caption_column=names[0] if names else None,
        caption_extension=source.beside.caption_extension,
        missing_caption=source.beside.missing_caption,
        companions=source.beside.companions,
    )
    say(loaded.describe())
    if loaded.caption_column is None:
        raise ColumnError(
            f"No caption column was found among {nested_names(loaded.dataset)}; name one as `caption_column`, or "
            "write captions beside the files."
        )
    check_condition_columns(loaded.dataset, source.conditions)
    treatment = Treatment.of(source.on_error, source.on_caption_error)
    captions = check_captions(
        loaded.dataset,
        [loaded.caption_column, *names[1:]],
        on_error=treatment.captions,
        template=source.caption_template,
        media_column=loaded.column,
        report=lambda error: faults.report(for_source(error)),
    )
    metadata = MediaMetadata(loaded.column, target_fps=source.target_fps, root=loaded.root, on_error=treatment.files)
    sized = add_sizes(
        captions.dataset,
        metadata,
        sizes_from=source.sizes_from,
        size_columns=None if source.size_columns is None else read_size_columns(source.size_columns),
        num_proc=num_proc,
        report=faults.report,
    )
    dataset = captions.mark(sized.dataset)
    if captions.summary and treatment.captions != "raise":
        say(captions.summary)
    say(sized.origin)
    if clips is not None:
        dataset, summary = cut_clips(
            dataset,
            clips,
            on_error=treatment.files,
            media_column=loaded.column,
            caption_column=captions.column,
            report=faults.report,
        )
        say(summary)
    elif {SCENE_START, SCENE_END} <= set(dataset.column_names):
        say(f"The columns {SCENE_START} and {SCENE_END} are not used; `clips` scenes cuts files by them.")
    files = MediaColumns(column=loaded.column, root=loaded.root, conditions=source.conditions)
    dataset, sentences = check_conditions(
        dataset,
        ConditionColumns(files, on_error=treatment.files),
        media_column=loaded.column,
        num_proc=num_proc,
        report=faults.report,
    )
    for sentence in sentences:
        say(sentence)
    return replace(loaded, dataset=dataset, conditions=source.conditions)


def prepare(
    sources: SourceConfig | Sequence[SourceConfig],
    *,
    spec: LatentSpec,
    native_sizes: Sequence[tuple[int, int]] = (),
    num_proc: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> PreparedDataset:
    """Read one or several sources, and assign the rows of each to the buckets of its table.

    Rows of several sources get a `source` column, a `ClassLabel` of the sources' names, and their tables become one.
    Where rows do not occur once per epoch, a column `weight` says how often.

    Args:
        sources ([`SourceConfig`] or several): What to read, and its bucket table.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        native_sizes (sequence of pairs): The model's own sizes, `(height, width)` in pixels, for its table.
        num_proc (`int`, *optional*): Processes that read file headers; by default this one.
        overwrite (`bool`): Whether bucket columns that the data set already has are replaced.
        say (callable): Called with each sentence about what was found.

    Raises:
        BucketingError: As [`read_source`], for all sources at once, if the data set already has bucket columns, if
            two sources have one name, only some have a `weight`, or their settings cannot be met in one data set.
    """
    configs = [sources] if isinstance(sources, SourceConfig) else list(sources)
    names = name_sources([(config.dataset, config.name) for config in configs])
    check_alike(configs)
    tables = [config.table.make(spec, native_sizes=native_sizes) for config in configs]
    table, ids = union_of_tables(tables)
    parts: dict[str, MediaDataset] = {}
    with Faults() as faults:
        for name, config, own in zip(names, configs, tables, strict=True):
            clips = config.clip_rule(own.max_frames)
            try:
                parts[name] = read_source(config, clips=clips, num_proc=num_proc, say=say)
            except BucketingError as error:
                faults.report(error, source=name if len(configs) > 1 else None)
    for name, config, own in zip(names, configs, tables, strict=True):
        if not len(parts[name].dataset):
            raise ColumnError(f"The source {name} has no rows; correct its `dataset` and `split`, or remove it.")
        columns = BucketColumns(own, spec, rule=config.rule)
        mapped = map_columns(parts[name].dataset, columns, overwrite=overwrite)  # processes would start for longer
        parts[name] = replace(parts[name], dataset=mapped)
    rows = next(iter(parts.values()))
    weights = row_weights(
        [part.dataset for part in parts.values()],
        repeats=[config.repeats for config in configs],
        shares=[config.weight for config in configs],
    )
    if len(parts) > 1:
        rows = merge_sources(parts, say=say)
        rows = replace(rows, dataset=with_sources(rows.dataset, parts, table=table, ids=ids))
    dataset = rows.dataset
    if weights is not None:
        dataset = with_columns(dataset, {ROW_WEIGHT: weights}, features=Features({ROW_WEIGHT: Value("float64")}))
    packed = configs[0].table.make_open(spec, table)
    if configs[0].table.image_sizes == "video":
        sizes = (column_array(dataset, name) for name in ("num_frames", "height", "width"))
        packed = packed.images_at_video_sizes(*sizes, rule=configs[0].rule)
    return PreparedDataset(
        dataset=dataset,
        table=table,
        open_table=packed,
        column=rows.column,
        caption_column=rows.caption_column,
        root=rows.root,
        other_roots=rows.other_roots,
        conditions=rows.conditions,
    )


def check_alike(configs: Sequence[SourceConfig]) -> None:
    """Raise BucketingError if sources differ in what all rows of a data set share: the rules of their packs."""
    if len({config.table.max_frames for config in configs}) > 1:
        raise BucketingError("`max_frames` must be the same for all sources, as packs of all of them share it.")
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
