"""Settings of a source of data and of its bucket table; they need neither torch nor datasets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from ..buckets.assignment import AssignmentRule
from ..buckets.fitted import fitted_ladder
from ..buckets.ladders import BUCKET_FRAMES, token_ladder
from ..buckets.open_table import OpenTable, open_table
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..command_line.flags import numbers
from ..conditions.names import CONDITIONS, REFERENCE
from ..conditions.references import ReferenceRule
from ..errors import BucketingError, ColumnError, FlagError, quoted
from ..settings import check_at_least, check_literals, marked, not_default, setting

OnFileError = Literal["raise", "reject"]

OnCaptionError = Literal["raise", "reject", "empty"]

ClipMode = Literal["head", "uniform", "slide", "all", "scenes"]

MediaKind = Literal["all", "images", "videos"]
"""Which files of a folder are its media."""
SizesFrom = Literal["auto", "columns", "headers"]

CAPTION = "{caption}"
"""Place of the caption in a template."""

SIDES = ("width", "height")
TIMES = ("num_frames", "fps")
"""Columns of the sizes of samples, in pixels, and of their frames and frames per second."""


class Treatment(NamedTuple):
    """What happens to rows at fault.

    Attributes:
        files: What happens to rows with an unreadable file, a clip outside of its file, or a condition that does not
            fit.
        captions: What happens to rows with a caption that is missing or not text.
    """

    files: OnFileError
    captions: OnCaptionError

    @classmethod
    def of(cls, on_error: OnCaptionError, on_caption_error: OnCaptionError | None) -> Treatment:
        """Return the treatment by two settings, the second of which follows the first where it is not given.

        Raises:
            BucketingError: If `on_error` is `"empty"`, which is about captions, and `on_caption_error` is another.
        """
        if on_error == "empty" and on_caption_error not in (None, "empty"):
            raise BucketingError(
                f'`on_error="empty"` and `on_caption_error="{on_caption_error}"` contradict each other; leave out the '
                "first of them."
            )
        return cls("reject" if on_error == "reject" else "raise", on_caption_error or on_error)


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
        each_budget (`bool`): Whether each sample is trained at every one of `bucket_tokens` that does not enlarge it,
            as a row of a source of its own, such as clips-4096; by default it is one row, at the largest.
        num_buckets (`int`, *optional*): Most buckets of the table, whose sizes are chosen from those of all rows so
            that these keep the largest area, within `bucket_tokens` and `bucket_frames`; with `each_budget`, those of
            each budget (default: sizes at all aspect ratios, see `aspect_step`).
        bucket_frames (`list` of `int`, *optional*): Numbers of frames that buckets have (default: 1 for models of
            images, else 1,17,49,81).
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
        FlagError: Unless one of `bucket_tokens`, `buckets` and `table` is given, and with `each_budget` or
            `num_buckets` the first.
        BucketingError: If `max_frames` is not as described, `num_buckets` is below 1, or given with what it cannot
            be combined with.
    """

    bucket_tokens: list[int] | None = setting(None, parse=numbers, argument="tokens", one_of="table", common=True)
    buckets: str | None = setting(None, one_of="table", common=True)
    table: Path | None = setting(None, one_of="table")
    each_budget: bool = False
    num_buckets: int | None = setting(
        None, common=True, needs_rows="a stream does not know the sizes of its rows before they come"
    )
    bucket_frames: list[int] | None = setting(None, parse=numbers, argument="frames", common=True)
    bucket_sizes: list[tuple[int, int]] | None = setting(None, parse=heights_and_widths)
    aspect_step: float = setting(0.08, infinite=True)
    max_aspect_ratio: float = 2.5
    image_sizes: Literal["own", "video"] = setting(
        "own", needs_rows="a stream does not know the sizes of its videos before they come"
    )
    max_frames: int | Literal["table", "none"] = "table"

    def __post_init__(self) -> None:
        check_literals(self)
        if self.max_frames not in ("table", "none") and (not isinstance(self.max_frames, int) or self.max_frames < 1):
            raise BucketingError(
                f'`max_frames` must be a number of frames of at least 1, "table" or "none", got {self.max_frames!r}.'
            )
        options = [*marked(TableConfig, "one_of")]
        if sum(getattr(self, name) is not None for name in options) != 1:
            raise FlagError(f"Give one of --{options[0]}, --{options[1]} and --{options[2]}.")
        if self.each_budget and self.bucket_tokens is None:
            raise FlagError("--each_budget goes with --bucket_tokens, each of which is a size that samples have.")
        self._check_num_buckets()

    def _check_num_buckets(self) -> None:
        """Raise BucketingError if `num_buckets` is below 1, or given with a setting that says what it chooses."""
        if self.num_buckets is None:
            return
        check_at_least(1, self, "num_buckets")
        if self.bucket_tokens is None:
            raise FlagError("--num_buckets goes with --bucket_tokens, within which it chooses sizes.")
        if self.bucket_sizes:
            raise BucketingError(
                "`num_buckets` chooses sizes from those of the rows, and `bucket_sizes` names some that a table "
                "always contains; give one of them."
            )
        if unused := not_default(self, "aspect_step", "image_sizes"):
            raise BucketingError(
                f"Omit {quoted(unused)}: with `num_buckets`, sizes of videos and of images follow from the rows."
            )

    @property
    def of_rows(self) -> dict[str, TableConfig]:
        """Settings of each table in which every row of a source has a bucket, by the end of that source's name."""
        if not self.each_budget:
            return {"": self}
        return {f"-{budget}": replace(self, bucket_tokens=[budget]) for budget in self.bucket_tokens or []}

    @property
    def ladder(self) -> TableConfig:
        """Settings of the table that does not depend on rows; its buckets have these frames and budgets."""
        return replace(self, num_buckets=None)

    @property
    def frames(self) -> list[int]:
        """Numbers of frames that buckets have."""
        return self.bucket_frames or list(BUCKET_FRAMES)

    def of_images(self, images_only: bool) -> TableConfig:
        """Return these settings for a model: where it takes images alone, buckets have one frame by default."""
        return replace(self, bucket_frames=[1]) if images_only and self.bucket_frames is None else self

    def make(
        self,
        spec: LatentSpec,
        *,
        native_sizes: Sequence[tuple[int, int]] = (),
        samples: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike] | None = None,
        rule: AssignmentRule | None = None,
    ) -> BucketTable:
        """Return the table for a model of these strides and of these own sizes, `(height, width)` in pixels.

        Args:
            spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
            native_sizes (sequence of pairs): The model's own sizes, `(height, width)` in pixels.
            samples (three arrays of `int`, shape `(n,)`, *optional*): Frames, heights and widths of all rows, which
                `num_buckets` chooses from.
            rule ([`AssignmentRule`][hf_bucketing.AssignmentRule], *optional*): How these are assigned to buckets.

        Raises:
            BucketingError: If the settings make no table, or `num_buckets` is given and `samples` are not.
        """
        if self.buckets is not None:
            table = BucketTable.parse(self.buckets, frames=self.frames)
        elif self.table is not None:
            table = BucketTable.from_json(self.table.read_text())
        else:
            limits: dict[str, Any] = {
                "frames": self.frames,
                "sizes": native_sizes if self.bucket_sizes is None else self.bucket_sizes,
                "max_aspect_ratio": self.max_aspect_ratio,
                "own_budgets": not self.each_budget,
            }
            tokens = self.bucket_tokens or []
            if self.num_buckets is None:
                table = token_ladder(spec, tokens, aspect_step=self.aspect_step, **limits)
            elif samples is None:
                raise BucketingError("`num_buckets` chooses a table from the sizes of rows; give them as `samples`.")
            else:
                table = fitted_ladder(spec, tokens, samples, num_buckets=self.num_buckets, rule=rule, **limits)
        return table.images_at_video_sizes() if self.image_sizes == "video" else table

    def make_open(self, spec: LatentSpec, table: BucketTable) -> OpenTable:
        """Return the table of the sizes in packs, beside the bucket table of a data set."""
        limits = {"table": table.max_frames, "none": None}
        return open_table(spec, max_frames=limits.get(self.max_frames, self.max_frames))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Files beside media.

    Args:
        caption_extension (`str`, *optional*): Ending of the caption files beside the media; giving it also chooses
            them where a table could be meant as well (default: .txt).
        missing_caption (`str`, *optional*): Caption of media that have no caption file (default: none, so that it is
            missing).
        control_folder (`Path`, *optional*): Folder of control videos or images with the names of the media, which
            become the column control (default: none).
        mask_folder (`Path`, *optional*): Folder of masks with the names of the media, which become the column mask
            (default: none).
        face_folder (`Path`, *optional*): Folder of faces with the names of the media, which become the column face
            (default: none).
        reference_folder (`list` of `Path`, *optional*): Folders of references with the names of the media, or with
            these names and a number, as clip_0.png and clip_1.png; their files become the lists of the column
            reference, in the order of the folders, then of the numbers (default: none).
        media_kind (`"all"`, `"images"` or `"videos"`): Kind of files, by their endings, that are media of the folder,
            as for Live Photos, whose picture and clip have one name and one caption.
    """

    caption_extension: str | None = None
    missing_caption: str | None = None
    control_folder: Path | None = None
    mask_folder: Path | None = None
    face_folder: Path | None = None
    reference_folder: list[Path] | None = None
    media_kind: MediaKind = "all"

    def __post_init__(self) -> None:
        check_literals(self)

    @property
    def companions(self) -> dict[str, list[str]]:
        """Folders of each column that is added; that of references may have several, all others have one."""
        single = {"control": self.control_folder, "mask": self.mask_folder, "face": self.face_folder}
        folders = {column: [str(folder)] for column, folder in single.items() if folder is not None}
        reference_folders = [str(folder) for folder in self.reference_folder or []]
        return {**folders, REFERENCE: reference_folders} if reference_folders else folders


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRule:
    """Cut videos into clips.

    Frames are counted at the rate of the `fps` column. Images, and videos of no more frames than a clip, stay one row.

    Args:
        mode (`"head"`, `"uniform"`, `"slide"`, `"all"` or `"scenes"`): One clip from the start; `number` clips spread
            evenly from the start to the end (fewer if a video has fewer starts); a clip every `number` frames;
            consecutive clips, the last of them shorter, unless one frame is left, which the clip before it keeps; or
            the scenes whose seconds the columns `start` and `end` hold.
        frames (`int`, *optional*): Frames of a clip; needed by all modes but `"scenes"`.
        number (`int`): Clips of `"uniform"`, or frames from one start to the next of `"slide"`.

    Raises:
        ColumnError: If the mode is unknown, a number is below 1, or `frames` is missing or has no effect.
    """

    mode: ClipMode
    frames: int | None = None
    number: int = 1

    def __post_init__(self) -> None:
        check_literals(self, error=ColumnError)
        if self.number < 1 or (self.frames is not None and self.frames < 1):
            raise ColumnError(f"Clips need numbers of 1 or more, got {self}.")
        if (self.mode == "scenes") != (self.frames is None):
            raise ColumnError(f"`clip_frames` goes with every mode but scenes, got {self.frames} with {self.mode}.")

    @classmethod
    def parse(cls, text: str, *, frames: int | None) -> ClipRule:
        """Read the value of a flag: `head`, `uniform:N`, `slide:STRIDE`, `all` or `scenes`.

        Raises:
            ColumnError: If it is none of these.
        """
        mode, colon, number = text.partition(":")
        if mode not in ("head", "uniform", "slide", "all", "scenes") or bool(colon) != (mode in ("uniform", "slide")):
            raise ColumnError(f"`clips` must be head, uniform:N, slide:STRIDE, all or scenes, got {text!r}.")
        if colon and not (number.isascii() and number.isdigit() and int(number) >= 1):
            raise ColumnError(f"`clips` {mode} needs a whole number of 1 or more behind the colon, got {text!r}.")
        return cls(mode=mode, frames=None if mode == "scenes" else frames, number=int(number or 1))  # type: ignore[arg-type]


def check_template(template: str) -> None:
    """Raise unless a template has one place for the caption.

    Raises:
        ColumnError: If it has none, or several.
    """
    if template.count(CAPTION) != 1:
        raise ColumnError(
            f"`caption_template` must hold {CAPTION} once, as in 'TOK, {CAPTION}'; got {template!r}.",
        )


def read_size_columns(text: str) -> dict[str, str]:
    """Parse the value of a flag such as `num_frames=frame,duration=seconds`.

    The names on the left are `width`, `height`, `num_frames`, `fps`, and `duration`, in seconds, in place of
    `num_frames`.

    Raises:
        ColumnError: If a name on the left is none of these or occurs twice, or a column is missing.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    columns = {name: column for name, _, column in pairs}
    known = (*SIDES, *TIMES, "duration")
    if len(columns) < len(pairs) or not set(columns) <= set(known) or not all(columns.values()):
        raise ColumnError(
            f"`size_columns` must be as width=w,height=h, with names of {', '.join(known)}; got {text!r}."
        )
    if {"num_frames", "duration"} <= set(columns):
        raise ColumnError("`size_columns` names num_frames and duration, which both give frames; name one of them.")
    return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """Rows of a source, and how their columns are computed; for rows and for streams.

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
        face_column (`str`, *optional*): Column of videos or images of a face in each sample, cut out of its frames and
            of a size of their own, for models that animate one.
        reference_column (`list` of `str`, *optional*): Columns of references: images, and for videos also videos,
            which the model is shown beside the sample. A cell holds a file, a list of files or none; the files of
            several columns follow one another (default: none).
        reference_pixels (`int`, *optional*): Largest area of a reference in pixels, such as 262144; larger ones are
            made smaller, at their own shape. Models whose references all have one area, such as Qwen-Image-Edit, get
            this area instead (default: what the model's pipeline makes of them).
        reference_downscale_factor (`int`, *optional*): References that lie over their sample, at this fraction of its
            height and width, with its crop, flip and frames, as LTX in-context models take them: 1 or 2 (default:
            references keep their own shape, uncropped).
        with_audio (`bool`): Whether a model that generates audio with video is trained on the sound of its videos, as
            it is in the files; those without a track train video alone.
        caption_column (`str`, *optional*): Column of a text or a list of texts, or several such columns, as
            short_caption,long_caption; training draws one of the captions of a row in every epoch; json.caption is
            the caption within the dicts of a column json (default: found by its name).
        audio_caption_column (`str`, *optional*): Column of a text about the sound of each row, which follows its
            caption where audio is trained (default: captions tell of both, or of none).
        caption_template (`str`, *optional*): Text that each caption becomes, with {caption} in its place, such as
            "TOK, {caption}"; an empty caption becomes the rest of it.
        sizes_from (`"auto"`, `"columns"` or `"headers"`): Origin of the sizes: columns if the headers of a sample of
            files agree, columns without opening a file, or the headers of all files.
        size_columns (`str`, *optional*): Columns of sizes that have other names than width, height, num_frames and
            fps, such as num_frames=frame; duration=seconds takes the place of num_frames (default: none).
        ignore_columns (`list` of `str`, *optional*): Columns of the data set that are dropped, as if it had none of
            these names (default: none).
        is_regularization (`bool`): Whether all rows are regularization samples, which `preservation` of a run keeps as
            the base model has them; by default those that a column is_regularization marks.
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
        sidecars ([`SidecarConfig`]): Captions and other files that have the names of the media.
        name (`str`, *optional*): Name among several sources, for counts and logs (default: from its path).
        repeats (`float`): Occurrences of each row per epoch, each with noise, crop and caption of its own: 2 trains
            each row twice, 0.5 every row in every other epoch.
        weight_column (`str`, *optional*): Column of the occurrences of each row per epoch, times `repeats`: 2 trains a
            row twice, 0.5 in every other epoch, 0 never (default: every row counts alike).
        weight (`float`, *optional*): Share of this source in an epoch, in place of `repeats`: of sources with weights
            3 and 1, three of four samples come from the first. An epoch then has as many samples as there are rows.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Limits of the assignment of buckets.

    Raises:
        BucketingError: If `on_error` and `on_caption_error` contradict each other, if `caption_template`, `clips`,
            `clip_frames`, `size_columns` or a setting of references is not as described, if `repeats` or `weight` is
            not above 0, or both are given.
    """

    dataset: str = field(metadata={"common": True})
    dataset_config_name: str | None = None
    split: str = "train"
    media_column: str | None = setting(None, common=True)
    caption_column: str | None = setting(None, common=True)
    first_frame_column: str | None = None
    last_frame_column: str | None = None
    control_column: str | None = None
    mask_column: str | None = None
    face_column: str | None = None
    reference_column: list[str] | None = None
    reference_pixels: int | None = None
    reference_downscale_factor: int | None = None
    with_audio: bool = False
    audio_caption_column: str | None = None
    caption_template: str | None = None
    sizes_from: SizesFrom = "auto"
    size_columns: str | None = None
    ignore_columns: list[str] | None = None
    is_regularization: bool = False
    target_fps: float = setting(16.0, common=True)
    clips: str | None = setting(None, common=True)
    clip_frames: int | None = setting(None, common=True)
    on_error: OnCaptionError = setting("raise", common=True)
    on_caption_error: OnCaptionError | None = None
    sidecars: SidecarConfig = field(default_factory=SidecarConfig)
    name: str | None = setting(None, flag="listed")
    repeats: float = setting(
        1.0, flag="listed", needs_rows="a stream does not know how many rows there are to repeat; give `weight`"
    )
    weight_column: str | None = setting(
        None, needs_rows="a stream does not know how many rows there are to repeat; give sources a `weight`"
    )
    weight: float | None = setting(None, flag="listed")
    rule: AssignmentRule = field(default_factory=AssignmentRule)

    def __post_init__(self) -> None:
        check_literals(self)
        if isinstance(self.reference_column, str):
            object.__setattr__(self, "reference_column", [self.reference_column])
        self.reference_rule()
        if self.caption_template is not None:
            check_template(self.caption_template)
        if self.clip_frames is not None and (self.clips is None or self.clips == "scenes"):
            raise ColumnError("Omit `clip_frames`: no effect without `clips`, nor with the scenes of a data set.")
        if self.audio_caption_column is not None and not self.with_audio:
            raise ColumnError("Omit `audio_caption_column`: no effect without `with_audio`.")
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

    @property
    def treatment(self) -> Treatment:
        """Treatment of rows at fault."""
        return Treatment.of(self.on_error, self.on_caption_error)

    def clip_rule(self, longest: int) -> ClipRule | None:
        """Return the rule of the clips, of `longest` frames where their number is not given; None for whole files."""
        frames = longest if self.clip_frames is None else self.clip_frames
        return None if self.clips is None else ClipRule.parse(self.clips, frames=frames)

    def reference_rule(self, taken: ReferenceRule | None = None) -> ReferenceRule:
        """Return the rule of the references, in sizes and numbers that a model takes, or in any.

        Raises:
            BucketingError: If both an area and a factor are given, or one is below 1.
        """
        if self.reference_pixels is not None and self.reference_downscale_factor is not None:
            raise BucketingError(
                "Give `reference_pixels`, or `reference_downscale_factor` for references that lie over their samples, "
                "not both."
            )
        return (taken or ReferenceRule()).within(self.reference_pixels, self.reference_downscale_factor)

    @property
    def conditions(self) -> dict[str, str]:
        """Column of each condition that is given; those of references are separated by commas."""
        columns = {name: getattr(self, f"{name}_column") for name in CONDITIONS}
        columns[REFERENCE] = None if self.reference_column is None else ",".join(self.reference_column)
        named: dict[str, str] = {name: column for name, column in columns.items() if column is not None}
        return {**{name: name for name in self.sidecars.companions}, **named}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig(RowsConfig):
    """Source of data, how it is read, and its bucket table.

    Args:
        table ([`TableConfig`]): Bucket table of its rows.

    Raises:
        BucketingError: As [`RowsConfig`].
    """

    table: TableConfig
