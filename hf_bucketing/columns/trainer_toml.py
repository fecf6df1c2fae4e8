"""Lists of sources of other trainers: TOML of sd-scripts, musubi-tuner and diffusion-pipe, and `10_name` folders.

Checked with sd-scripts 48d368fa (library/config_util.py, library/train_util.py), musubi-tuner
(src/musubi_tuner/dataset/config_utils.py, image_video_dataset.py) and diffusion-pipe (utils/dataset.py).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MediaError
from ..files import existing_places
from .beside import files_in
from .layouts import CAPTION_EXTENSION, MEDIA_FILES, TABLES
from .tables import column_names
from .toml_tables import read_tables

_VIDEOS = ("video_directory", "video_jsonl_file")
_TABLES = ("image_jsonl_file", "video_jsonl_file")
_PATHS = ("image_directory", "video_directory", "image_dir", "path", *_TABLES)
"""Keys that hold the path of a source: of musubi-tuner, sd-scripts, diffusion-pipe, musubi-tuner."""

_KINDS = {"image_directory": "images", "video_directory": "videos"}
"""Keys of folders of which musubi-tuner takes files of one kind alone."""

_FOLDERS = {"control_directory": "control", "conditioning_data_dir": "control", "mask_path": "mask"}
"""Keys of folders with files that have the stems of the media."""

_REFERENCE_FOLDERS = ("control_directory", "control_path")
"""Keys of folders of references: of musubi-tuner, where the samples are images, and of diffusion-pipe."""

_CONTROL = re.compile(r"control_path(?:_(\d+))?")
"""Columns of controls or references in tables of musubi-tuner."""

_JOINTS = {"image_dir": " "}
"""What joins prefix, caption and suffix, by the key of the source's path: a space in sd-scripts, nothing elsewhere."""

_SD_SCRIPTS_EXTENSION = ".caption"
"""Ending of caption files in sd-scripts, where its TOML names none."""

_REPEATS = re.compile(r"([1-9]\d{0,2})_(.+)")
"""Name of a folder of sd-scripts: repeats, and the words of its captions."""

_CAPTION = "{caption}"
"""Place of the caption in a template."""

_CLIPS = ("frame_extraction", "frame_stride", "frame_sample")
_CAPTIONS = ("caption_prefix", "caption_suffix")
KEYS_READ = {*_PATHS, *_FOLDERS, *_REFERENCE_FOLDERS, *_CLIPS, *_CAPTIONS, "control_resolution"}
KEYS_READ |= {"num_repeats", "caption_extension", "class_tokens", "target_frames", "frame_buckets", "is_reg"}

_BUCKETS = "sizes come from the bucket table: give `bucket_tokens`, `buckets` or `table`"
KEYS_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("resolution", "size_buckets"), (None, _BUCKETS)),
    **dict.fromkeys(("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"), (None, _BUCKETS)),
    "resolutions": (None, "give `bucket_tokens`, and `each_budget` to train each sample at all of them"),
    **dict.fromkeys(("enable_bucket", "enable_ar_bucket"), (True, f"there are always buckets; {_BUCKETS}")),
    **dict.fromkeys(("min_ar", "max_ar"), (None, "give `max_aspect_ratio`")),
    **dict.fromkeys(("num_ar_buckets", "ar_buckets"), (None, "give `aspect_step`")),
    "bucket_no_upscale": (True, "give `max_upscale`"),
    "batch_size": (None, "give `train_batch_size` or `max_tokens` when training"),
    "source_fps": (None, "the frame rate of each file is read from its header; give `target_fps` to train at another"),
    "max_frames": (None, "the longest of `bucket_frames` decides"),
    **dict.fromkeys(("cache_directory", "cache_info"), (None, "latents are cached by hf_bucketing cache")),
    **dict.fromkeys(
        ("caption_dropout_rate", "caption_dropout_every_n_epochs"), (0, "give `caption_dropout` in training")
    ),
    **dict.fromkeys(
        ("shuffle_caption", "shuffle_tags", "cache_shuffle_num"), (False, "give `shuffle_tags` when training")
    ),
    "keep_tokens": (0, "give `keep_tags` when training"),
    **dict.fromkeys(("caption_separator", "cache_shuffle_delimiter"), (None, "give `tag_separator` when training")),
    "skip_empty_caption": (None, 'give `on_error="reject"` or `on_error="empty"`'),
    "flip_aug": (False, "give `flip_probability` when training"),
    "random_crop": (None, "give `random_crop` when training"),
    "color_aug": (False, "there is no counterpart"),
    **dict.fromkeys(
        (
            "multiple_target",
            "no_resize_control",
            "alpha_mask",
            "enable_wildcard",
            "debug_dataset",
            "caption_tag_dropout_rate",
            "token_warmup_step",
            "validation_seed",
            "fp_1f_no_post",
            "online_captions",
        ),
        (False, "there is no counterpart"),  # False equals 0
    ),
    "validation_split": (0, "give `validation_split` when training"),
    **dict.fromkeys(("token_warmup_min", "network_multiplier"), (1, "there is no counterpart")),
    "shuffle_metadata": (True, "rows are drawn in an order of their own in every epoch"),
    "prior_loss_weight": (1, "give `preservation_weight` when training"),
}
"""For each key without effect: the value that asks for what happens anyway, and what to give for others."""

_UNKNOWN = (None, "there is no counterpart")


class TomlSources(NamedTuple):
    """Sources that a TOML file lists.

    Attributes:
        sources (list of `dict`): For each source the values of settings by name, such as `dataset` and `repeats`.
        ignored (list of `str`): Sentences, one for each key without effect, with what to give instead.
    """

    sources: list[dict[str, Any]]
    ignored: list[str]


def load_toml(path: str | Path) -> TomlSources:
    """Read the sources that a TOML file of sd-scripts, musubi-tuner or diffusion-pipe lists.

    Their paths may be relative to the file or to the working directory.

    Args:
        path (`str` or `Path`): File with `[[datasets]]`, which may have `[[datasets.subsets]]`, or with
            `[[directory]]`.

    Raises:
        MediaError: If the file is not such a TOML, a source has no path or several, its path does not exist, or it
            exists below both folders.
    """
    file, tables = Path(path), read_tables(path)
    names = [f"source {number} of {file}" for number in range(1, len(tables) + 1)]
    sources = [_source(table, file.parent, name) for table, name in zip(tables, names, strict=True)]
    _divide_by_kind(tables, sources)
    return TomlSources(sources, _ignored(tables))


def _source(table: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Return the settings of one source."""
    keys = [key for key in _PATHS if key in table]
    if len(keys) != 1 or "metadata_file" in table:
        named = " and ".join([*keys, *(["metadata_file"] if "metadata_file" in table else [])]) or "none"
        raise MediaError(f"{name} needs one of {', '.join(_PATHS)}; got {named}.")
    key = keys[0]
    values: dict[str, Any] = {"dataset": _existing(table[key], folder, name)}
    if "num_repeats" in table:
        values["repeats"] = float(table["num_repeats"])
    values |= {"is_regularization": True} if table.get("is_reg") else {}
    if key not in _TABLES:
        extension = table.get("caption_extension", _SD_SCRIPTS_EXTENSION if key == "image_dir" else None)
        values |= {"caption_extension": extension} if extension else {}
        values |= {"missing_caption": table["class_tokens"]} if table.get("class_tokens") else {}
    values |= _condition_settings(table, key, values["dataset"], lambda path: _existing(path, folder, name))
    joint = _JOINTS.get(key, "")
    parts = (table.get("caption_prefix"), _CAPTION, table.get("caption_suffix"))
    template = joint.join(part for part in parts if part)
    values |= {"caption_template": template} if template != _CAPTION else {}
    frames = table.get("target_frames")
    if "frame_buckets" in table:  # diffusion-pipe always has one of images
        frames = sorted({1, *table["frame_buckets"]})
    values |= {"bucket_frames": list(frames)} if frames else {}
    if key in _VIDEOS and (clips := _clips(table, name)):
        values["clips"] = clips
    return values


def _divide_by_kind(tables: Sequence[Mapping[str, Any]], sources: Sequence[dict[str, Any]]) -> None:
    """Let sources take images or videos alone where one folder is a source of both, as musubi-tuner reads them.

    They have names of their own, `clips-images` and `clips-videos`, as their folder gives both one.
    """
    kinds = [next((kind for key, kind in _KINDS.items() if key in table), None) for table in tables]
    folders = [os.path.realpath(source["dataset"]) for source in sources]
    both = set.intersection(*({folder for folder, own in zip(folders, kinds, strict=True) if own == kind}
                              for kind in _KINDS.values()))  # fmt: skip
    names: Counter[str] = Counter()
    for source, folder, kind in zip(sources, folders, kinds, strict=True):
        if kind is not None and folder in both:
            name = f"{os.path.basename(folder)}-{kind}"
            names[name] += 1
            source |= {"media_kind": kind, "name": name if names[name] == 1 else f"{name}-{names[name]}"}


def _condition_settings(
    table: Mapping[str, Any], key: str, dataset: str, find: Callable[[Any], str]
) -> dict[str, Any]:
    """Return the settings of controls, masks and references of a source.

    Controls of images, which musubi-tuner has for edit models alone, are references, and so are those that are
    numbered, and those of diffusion-pipe; controls of videos lie over them frame by frame.
    """
    values: dict[str, Any] = {}
    are_references = key not in _VIDEOS
    if key in _TABLES:
        columns = sorted(filter(_CONTROL.fullmatch, column_names(Path(dataset))), key=lambda name: (len(name), name))
        if columns == ["control_path"] and not are_references:
            values["control_column"] = "control_path"
        elif columns:
            values["reference_column"] = columns
    for folder_key in _REFERENCE_FOLDERS:
        if folder_key in table and are_references:
            folders = table[folder_key] if isinstance(table[folder_key], list) else [table[folder_key]]
            values |= {"reference_folder": [Path(find(path)) for path in folders], "reference_column": ["reference"]}
    for folder_key, column in _FOLDERS.items():
        if folder_key in table and not (are_references and folder_key in _REFERENCE_FOLDERS):
            values |= {f"{column}_folder": find(table[folder_key]), f"{column}_column": column}
    if "control_resolution" in table and "reference_column" in values:
        sides = table["control_resolution"]
        values["reference_pixels"] = math.prod(sides) if isinstance(sides, list) else sides**2
    return values


def _clips(table: Mapping[str, Any], name: str) -> str | None:
    """Return the clips that musubi-tuner takes of a video; None for the whole video."""
    extraction = table.get("frame_extraction", "head")
    if extraction == "uniform" and table.get("frame_sample", 1) == 1:
        extraction = "head"
    clips = {
        "head": "head",
        "chunk": "all",
        "slide": f"slide:{table.get('frame_stride', 1)}",
        "uniform": f"uniform:{table.get('frame_sample', 1)}",
        "full": None,
    }
    if extraction not in clips:
        raise MediaError(f"{name} has frame_extraction {extraction!r}; expected one of {', '.join(clips)}.")
    return clips[extraction]


def _existing(path: Any, folder: Path, name: str) -> str:
    """Return a path that the file names; relative ones begin at its folder, or at the working directory."""
    if not isinstance(path, str):
        raise MediaError(f"{name} has {path!r} where a path is needed.")
    places = dict.fromkeys(os.path.abspath(place) for place in (folder / path, path))
    existing = existing_places(path, folder=folder)
    if len(existing) != 1:
        which = "are both there" if existing else "do not exist" if len(places) > 1 else "does not exist"
        raise MediaError(f"{name}: {' and '.join(places)} {which}; write the whole path.")
    return existing[0]


def _ignored(tables: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each key without effect, with its values."""
    values: dict[str, list[Any]] = {}
    for table in tables:
        for key in sorted(table.keys() - KEYS_READ):
            fulfilled, _ = KEYS_WITHOUT_EFFECT.get(key, _UNKNOWN)
            if table[key] != fulfilled and table[key] not in values.setdefault(key, []):
                values[key].append(table[key])
    several = [table["target_frames"] for table in tables if len(table.get("target_frames", [])) > 1]
    said = [
        f"target_frames = {frames}: each clip is trained once, at the longest of them that it has; musubi-tuner "
        "trains it at each that it has."
        for frames in several[:1]
    ]
    return said + [
        f"{key} = {' and '.join(map(str, settings))} has no effect: {KEYS_WITHOUT_EFFECT.get(key, _UNKNOWN)[1]}."
        for key, settings in values.items()
        if settings
    ]


def load_repeats(folder: str | Path) -> TomlSources | None:
    """Read a folder of folders as sd-scripts names them: `10_a fox` has ten repeats, and `a fox` where captions miss.

    Args:
        folder (`str` or `Path`): Folder, or any other name of a data set.

    Returns:
        A source for each such folder, or None for a name of another kind, a folder that holds media itself, or one in
        which other folders hold media. Numbers of four digits are taken for years, not for repeats.
    """
    if not os.path.isdir(folder):
        return None
    inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    endings = {path: {os.path.splitext(name)[1].lower() for name in files_in(Path(path))} for path in inner}
    named = {path: match for path in inner if (match := _REPEATS.fullmatch(os.path.basename(path)))}
    media = [path for path in inner if endings[path] & MEDIA_FILES]
    above = {os.path.splitext(name)[1].lower() for name in files_in(Path(folder))}
    if not media or not named.keys() >= set(media) or above & (MEDIA_FILES | TABLES.keys()):
        return None
    sources = []
    for path in media:
        repeats, words = named[path].groups()
        has_caption_files = _SD_SCRIPTS_EXTENSION in endings[path] and CAPTION_EXTENSION not in endings[path]
        extension = {"caption_extension": _SD_SCRIPTS_EXTENSION} if has_caption_files else {}
        sources.append({"dataset": path, "repeats": float(repeats), "missing_caption": words, **extension})
    names = ", ".join(os.path.basename(path) for path in media)
    return TomlSources(sources, [f"{names}: repeats and, where captions are missing, their words, as in sd-scripts."])
