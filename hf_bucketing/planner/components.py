"""The models of a pipeline, built from their configurations alone: shapes and dtypes without weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights

from ..buckets.sizes import LatentSpec
from ..conditions.audio import AudioRule
from ..conditions.shares import read_conditions
from ..errors import BucketingError
from ..hub import from_hub
from ..models.experts import TrainedComponent, transformers_of
from ..models.index import IndexEntry, read_index
from ..models.loading import part_of
from ..models.recipe import Recipe
from ..models.registry import recipe_of
from ..models.weight_files import FileWeights, read_weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A model of a pipeline by its class and configuration.

    Attributes:
        library (`str`): `"diffusers"`, `"transformers"`, or a module of these.
        class_name (`str`): Name of the class in it.
        config_json (`str`): Configuration, as JSON.
        weights ([`FileWeights`][hf_bucketing.models.weight_files.FileWeights], *optional*): What the file says that
            its weights come from, if they do not come from the pipeline.
    """

    library: str
    class_name: str
    config_json: str
    weights: FileWeights | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        values: dict[str, Any] = json.loads(self.config_json)
        return values

    @property
    def model_class(self) -> Any:
        """The class of the model."""
        return getattr(importlib.import_module(self.library), self.class_name)

    def build(self, **changes: Any) -> Any:
        """Return the model on torch's meta device, with some values of its configuration changed."""
        with torch.device("meta"):
            return self._make({**self.config, **changes})

    def num_values(self) -> int:
        """Return the number of the model's weights and buffers; the latter are made, as some classes read them."""
        with init_empty_weights():
            model = self._make(self.config)
            return sum(values.numel() for values in (*model.parameters(), *model.buffers()))

    def _make(self, config: dict[str, Any]) -> Any:
        if hasattr(self.model_class, "config_class"):  # of transformers, wherever it lies
            full_config = self.model_class.config_class.from_dict(config)
            if self.library != "transformers":
                full_config = getattr(full_config, "encoder", full_config)  # PRX's is a part
            return self.model_class(full_config).eval()
        return self.model_class.from_config(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """What a plan of memory knows of a pipeline.

    Attributes:
        recipe (type): Recipe that trains it.
        spec ([`LatentSpec`]): Strides of the VAE and patch of the transformer.
        transformer ([`Component`]): Transformer to train, or the first of two.
        vae ([`Component`]): VAE.
        text_encoders (`tuple` of [`Component`]): Text encoders.
        others (`tuple` of `(name, Component)`): What else encodes texts and media, such as an image encoder.
        second ([`Component`], *optional*): Transformer that is trained in the same run.
        settings (mapping of `str` to any): Settings of the pipeline.
        audio ([`AudioRule`][hf_bucketing.conditions.audio.AudioRule], *optional*): Rule of the audio that it makes
            with video; None if it makes none.
    """

    recipe: type[Recipe]
    spec: LatentSpec
    transformer: Component
    vae: Component
    text_encoders: tuple[Component, ...]
    others: tuple[tuple[str, Component], ...] = ()
    second: Component | None = None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    audio: AudioRule | None = None

    def can_cache(self, condition: str | None) -> bool:
        """Return whether a cache can hold what a run with a `condition` shows."""
        if condition is None:
            return True
        pipeline, config = SimpleNamespace(config=self.settings), self.transformer.config
        recipe = self.recipe(pipeline=pipeline, spec=self.spec, max_sequence_length=1, config=config)
        return all(map(recipe.can_cache, read_conditions(condition).all))


def read_components(
    name_or_path: str, *, trained: TrainedComponent = "transformer", transformer_file: str | None = None
) -> Components:
    """Read the configurations of a pipeline on the hub or in a folder, never its weights.

    Args:
        name_or_path (`str`): The pipeline.
        trained (`"transformer"`, `"transformer_2"`, `"both"` or `"transformer_ref"`): Transformers to train.
        transformer_file (`str`, *optional*): File of the transformer's weights, of which the header is read.

    Raises:
        BucketingError: If there is no such pipeline, no recipe to train it, it has no transformer of that name, or the
            file does not fit.
    """
    recipe, index, names = recipe_of(name_or_path), read_index(name_or_path), transformers_of(trained)
    for name in names:
        index.check_has(name)
    called = recipe.called_components(index, names[0])
    encoding = [name for name in called if part_of(name, trained=names) in ("text_encoders", "vae")]
    with from_hub(name_or_path):
        read = {name: _read_component(name_or_path, name, index.components[name]) for name in (*names, *encoding)}
        if transformer_file is not None:
            weights = read_weights_of(transformer_file, read[names[0]].build())
            read[names[0]] = replace(read[names[0]], weights=weights)
        of_text = tuple(name for name in encoding if name.startswith("text_encoder"))
        return Components(
            recipe=recipe,
            spec=recipe.read_spec(name_or_path),
            transformer=read[names[0]],
            second=read[names[1]] if len(names) > 1 else None,
            vae=read["vae"],
            text_encoders=tuple(read[name] for name in of_text),
            others=tuple((name, read[name]) for name in encoding if name not in ("vae", *of_text)),
            settings=index.settings,
            audio=recipe.read_audio_rule(name_or_path),
        )


def _read_component(name_or_path: str, name: str, entry: IndexEntry) -> Component:
    library, class_name = entry.library, entry.class_name
    if library not in ("diffusers", "transformers"):  # models of one pipeline alone, such as connectors of LTX-2
        library = f"diffusers.pipelines.{library}"
        if importlib.util.find_spec(library) is None:
            raise BucketingError(f"The {name} of {name_or_path} is a {class_name}, which cannot be planned.")
    kind = getattr(importlib.import_module(library), class_name)
    place = {"subfolder": entry.subfolder, "revision": entry.revision}
    if hasattr(kind, "config_class"):
        config = kind.config_class.from_pretrained(entry.name_or_path, **place).to_dict()
    else:
        config = dict(kind.load_config(entry.name_or_path, **place))
    text = json.dumps(config, sort_keys=True, default=str)
    return Component(library=library, class_name=class_name, config_json=text)
