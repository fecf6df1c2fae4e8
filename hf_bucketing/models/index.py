"""What the index of a pipeline says: its class, and the class and place of each component.

Most pipelines have a `model_index.json`, which names the class of each component; a component lies in the folder of
its name. Pipelines that diffusers has only as blocks have a `modular_model_index.json`, which also names the
repository and the folder of each component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BucketingError
from ..formats import is_weight_file
from ..hub import from_hub

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """A component of a pipeline.

    Attributes:
        library (`str`): Library of its class, as the index names it.
        class_name (`str`): Name of its class.
        name_or_path (`str`): Repository or folder that holds it.
        subfolder (`str`): Folder in it.
        revision (`str`, *optional*): Revision of the repository.
    """

    library: str
    class_name: str
    name_or_path: str
    subfolder: str
    revision: str | None = None

    def is_below(self, folder: Path) -> bool:
        """Return whether the component lies in a folder of a pipeline's folder."""
        return self.name_or_path == str(folder) and bool(self.subfolder) and (folder / self.subfolder).is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """The index of a pipeline.

    Attributes:
        name_or_path (`str`): The pipeline on the hub or in a folder.
        class_name (`str`): Class of the pipeline in diffusers.
        is_modular (`bool`): Whether the pipeline exists only as blocks.
        components (mapping of `str` to [`IndexEntry`]): The components that it comes with.
        absent (`tuple` of `str`): Components that its class has and it comes without.
        settings (mapping of `str` to any): What the index says of the pipeline's call, such as `expand_timesteps`.
    """

    name_or_path: str
    class_name: str
    is_modular: bool
    components: Mapping[str, IndexEntry]
    absent: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return MODULAR_INDEX if self.is_modular else INDEX

    def check_has(self, trained: str) -> None:
        """Raise BucketingError if the pipeline has no transformer of that name."""
        if trained not in self.components:
            raise BucketingError(f"{self.name_or_path} has no {trained} to train; name another `trained_component`.")


def check_is_no_file(name_or_path: str) -> None:
    """Raise BucketingError if a file of weights is named where a pipeline is expected."""
    if is_weight_file(name_or_path):
        raise BucketingError(
            f"{name_or_path} is a file of weights, which has no configurations. Name the pipeline of its model, on "
            "the hub or in a folder, and this file as `transformer_file`: it replaces the weights of the transformer."
        )


def read_index(name_or_path: str) -> PipelineIndex:
    """Read the index of a pipeline on the hub or in a folder; a `model_index.json` comes first.

    Raises:
        BucketingError: If there is no pipeline.
    """
    check_is_no_file(name_or_path)
    with from_hub(name_or_path):
        try:
            values = _values(name_or_path)
        except OSError:
            modular = _modular_values(name_or_path)
            if modular is None:
                raise
            return _modular_index(name_or_path, modular)
    entries = {name: entry for name, entry in values.items() if _names_class(entry)}
    return PipelineIndex(
        name_or_path=name_or_path,
        class_name=_class_of(name_or_path, values),
        is_modular=False,
        components={
            name: IndexEntry(library=library, class_name=class_name, name_or_path=name_or_path, subfolder=name)
            for name, (library, class_name) in entries.items()
            if library is not None
        },
        absent=tuple(name for name, (library, _) in entries.items() if library is None),
        settings={name: value for name, value in values.items() if name not in entries},
    )


def _names_class(entry: Any) -> bool:
    """Return whether an entry is a library and a class; some settings of a pipeline are lists too."""
    is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
    return is_pair and all(isinstance(part, str | None) for part in entry)


def index_file(folder: Path) -> Path | None:
    """Return the index of a pipeline in a folder; None if it holds none."""
    return next((folder / name for name in (INDEX, MODULAR_INDEX) if (folder / name).is_file()), None)


def copy_index(source: Path, folder: Path, *, place: str) -> None:
    """Copy the index of a pipeline, whose components were copied too, into another folder.

    Args:
        source (`Path`): Folder of the pipeline.
        folder (`Path`): Folder that holds the components already.
        place (`str`): Repository or folder from which they will be loaded.
    """
    file = index_file(source)
    assert file is not None, "checked when the pipeline was loaded"
    if file.name == INDEX:  # which names no places
        (folder / INDEX).write_bytes(file.read_bytes())
        return
    values = json.loads(file.read_text())
    for name, entry in values.items():
        if isinstance(entry, list) and (folder / name).is_dir():
            entry[2] |= {"pretrained_model_name_or_path": place, "subfolder": name, "revision": None, "variant": None}
    (folder / file.name).write_text(json.dumps(values, indent=2) + "\n")


def _values(name_or_path: str) -> Mapping[str, Any]:
    """Return what a `model_index.json` holds."""
    file = Path(name_or_path) / INDEX
    if file.is_file():
        return read_json(file)

    import diffusers

    values: Mapping[str, Any] = diffusers.DiffusionPipeline.load_config(name_or_path)
    return values


def read_json(file: Path) -> dict[str, Any]:
    """Return what a file of a pipeline in a folder holds, as diffusers reads it.

    Raises:
        OSError: If it is not JSON.
    """
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"It looks like the config file at '{file}' is not a valid JSON file.") from error
    return values


def _modular_values(name_or_path: str) -> Mapping[str, Any] | None:
    import diffusers

    if not hasattr(diffusers, "ModularPipeline"):
        return None
    try:
        values: Mapping[str, Any] = diffusers.ModularPipeline.load_config(name_or_path)
    except OSError:
        return None
    return values


def _modular_index(name_or_path: str, values: Mapping[str, Any]) -> PipelineIndex:
    components, absent = {}, []
    for name, entry in values.items():
        if not isinstance(entry, (list, tuple)):
            continue
        _, _, spec = entry
        library, class_name = spec["type_hint"]
        subfolder = spec.get("subfolder") or ""
        is_here = subfolder and (Path(name_or_path) / subfolder).is_dir()  # a copy of the repository, as in diffusers
        place = name_or_path if is_here else spec.get("pretrained_model_name_or_path")
        if place is None or library is None:
            absent.append(name)
            continue
        components[name] = IndexEntry(
            library=library,
            class_name=class_name,
            name_or_path=place,
            subfolder=subfolder,
            revision=None if is_here else spec.get("revision"),
        )
    return PipelineIndex(
        name_or_path=name_or_path,
        class_name=_class_of(name_or_path, values),
        is_modular=True,
        components=components,
        absent=tuple(absent),
        settings={name: value for name, value in values.items() if not isinstance(value, (list, tuple))},
    )


def _class_of(name_or_path: str, values: Mapping[str, Any]) -> str:
    if "_class_name" not in values:
        raise BucketingError(f"The index of {name_or_path} names no class of a pipeline (`_class_name`).")
    return str(values["_class_name"])
