"""Find the model family of a transformer and the training recipe of a pipeline, or why there is none.

Each module of `families/` holds models that are kin: its `RECIPES` name the family that packs their transformer. Where
a pipeline cannot be trained, it has `REFUSED`, the reason by its class. Nothing else lists them. A look-up by the name
of a class imports the modules that name it, and no others. Transformers of diffusers that packing refuses are here, in
`UNPACKABLE`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BucketingError, HubError, PackingError
from ..packing.family import Family
from ..packing.unchanged import replaced_forward
from . import families as families_package
from .index import check_is_no_file, read_index

if TYPE_CHECKING:
    from .recipe import Recipe


@functools.cache
def families() -> dict[str, Family]:
    """Return the model families by the name of their transformer class in diffusers."""
    return {recipe.family.transformer_class: recipe.family for recipe in reversed(recipes().values())}


@functools.cache
def recipes() -> dict[str, type[Recipe]]:
    """Return the training recipes by the name of their pipeline class in diffusers."""
    return {recipe.pipeline_class: recipe for module in _modules() for recipe in module.RECIPES}


@functools.cache
def refused_pipelines() -> dict[str, str]:
    """Return why pipelines of known transformers cannot be trained, by the name of their class in diffusers."""
    refused = {name: why for module in _modules() for name, why in getattr(module, "REFUSED", {}).items()}
    return {**refused, **UNTRAINED}


@functools.cache
def find_family(transformer_class: str) -> Family | None:
    """Return the model family of a transformer class in diffusers by its name; None if there is none."""
    named = (recipe.family for module in _modules(naming=transformer_class) for recipe in module.RECIPES)
    return next((family for family in named if family.transformer_class == transformer_class), None)


@functools.cache
def find_recipe(pipeline_class: str) -> type[Recipe] | None:
    """Return the training recipe of a pipeline class in diffusers by its name; None if there is none."""
    named = (recipe for module in _modules(naming=pipeline_class) for recipe in module.RECIPES)
    return next((recipe for recipe in named if recipe.pipeline_class == pipeline_class), None)


def _modules(*, naming: str = "") -> Iterator[ModuleType]:
    """Import the modules of families whose text names a class."""
    for folder in families_package.__path__:
        for module in pkgutil.iter_modules([folder]):
            if not module.ispkg and naming in Path(folder, f"{module.name}.py").read_text(encoding="utf-8"):
                yield importlib.import_module(f"{families_package.__name__}.{module.name}")


def family_of(transformer: torch.nn.Module) -> Family:
    """Return the model family of a diffusers transformer, or of a subclass that keeps the stock `forward`.

    Raises:
        PackingError: If no family claims the class (with the reason, where there is one), or a subclass or the model
            has a `forward` of its own, which may do across tokens what packing does not see.
    """
    cls = type(transformer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    stock: Any = None
    family = None
    for base in cls.__mro__:
        if _is_stock(base) and (family := find_family(base.__name__)) is not None:
            stock = base
            break
    if family is None:
        for base in cls.__mro__:
            if base.__name__ in UNPACKABLE and _is_stock(base):
                raise PackingError(
                    f"{name} cannot be packed: {UNPACKABLE[base.__name__]}. Train this model with bucketed batches."
                )
            if base.__name__ in OTHER_KINDS and _is_stock(base):
                raise PackingError(
                    f"{name} does not make images or videos from text, for which packing is: it "
                    f"{OTHER_KINDS[base.__name__]}."
                )
        known = ", ".join(sorted(families()))
        disguised = (
            f" (diffusers has a {cls.__name__}, but this is another class)" if cls.__name__ in families() else ""
        )
        raise PackingError(
            f"Packing does not know {name}{disguised}; it knows the diffusers classes {known}. Train this model with "
            "bucketed batches, which work with any model, or write a family for it (docs/models/adding-a-model.md)."
        )
    if cls.forward is not stock.forward:
        raise PackingError(
            f"{name} overrides the forward of diffusers' {stock.__name__}, so packing cannot know how it treats the "
            "tokens of several samples. Use the stock class, or train this model with bucketed batches."
        )
    if (code := replaced_forward(transformer)) is not None:
        raise PackingError(
            f"The forward of this {name} was replaced by {code}, so packing cannot know how it treats the tokens of "
            "several samples. Delete transformer.forward, or train this model with bucketed batches."
        )
    return family.variant(transformer)


def _is_stock(cls: type[Any]) -> bool:
    """Return whether a class is the one of that name in diffusers."""
    return cls is getattr(importlib.import_module("diffusers"), cls.__name__, None)


def recipe_of(name_or_path: str) -> type[Recipe]:
    """Return the recipe of a pipeline on the hub or in a folder, by the class that its index names.

    Raises:
        BucketingError: If there is no pipeline, or no recipe for it.
    """
    check_is_no_file(name_or_path)
    try:
        index = read_index(name_or_path)
    except HubError:
        raise
    except BucketingError as error:
        raise BucketingError(f"{name_or_path} is no diffusers pipeline: {error}") from error
    name = index.class_name
    recipe = find_recipe(name)
    if recipe is not None:
        return recipe
    if name in refused_pipelines():
        raise BucketingError(f"{name_or_path} is a {name}, which cannot be trained: {refused_pipelines()[name]}.")
    kinds = {entry.class_name for entry in index.components.values()} & UNPACKABLE.keys()
    why = "".join(f" Its {kind} cannot be packed: {UNPACKABLE[kind]}." for kind in sorted(kinds))
    raise BucketingError(
        f"{name_or_path} is a {name}; there are training recipes for {', '.join(sorted(recipes()))}.{why}"
    )


_TILES = (
    "diffusers encodes with its VAE tile by tile only, in tiles of 24×320×320 pixels, and returns zeros for what does "
    "not fill a tile, so for every image and for most sizes of videos"
)
_BETWEEN_LEVELS = (
    "its model is distilled to predict the mean velocity between the noise level of a step and the next, and flow "
    "matching, which trains the velocity at one level, would leave the steps between levels as they are"
)
_FACE = (
    "its call takes embeddings of a face, which models outside the pipeline make, and a data set has no column for "
    "them"
)
_PRIOR_TOKENS = (
    "its transformer draws after one token for each patch, which the pipeline's vision-language model makes of an "
    "image, and the processor of that model resizes images, such as those below 512 pixels, so that they have another "
    "number of tokens than of patches"
)

UNPACKABLE: Mapping[str, str] = MappingProxyType(
    {
        "AllegroTransformer3DModel": f"no recipe trains it, since {_TILES}",
        "AnyFlowFARTransformer3DModel": (
            "it cuts a batch row into chunks of frames, the older ones in larger patches, and attends from chunk "
            "to chunk by a mask over the row"
        ),
        "AnyFlowTransformer3DModel": f"no recipe trains it, since {_BETWEEN_LEVELS}",
        "BriaFibo2Transformer2DModel": (
            "it squeezes texts into tokens, as many as the longest of them asks for, and puts all of these in front "
            "of each batch row; some of its blocks read further layers of the text"
        ),
        "BriaFiboTransformer2DModel": (
            "each of its blocks replaces half of the channels of a batch row's text by another layer of the text "
            "encoder"
        ),
        "ConsisIDTransformer3DModel": f"no recipe trains it, since {_FACE}",
        "GlmImageTransformer2DModel": f"no recipe trains it, since {_PRIOR_TOKENS}",
        "HeliosTransformer3DModel": (
            "it puts earlier frames, in patches of three sizes, in front of the tokens of a batch row, and as many of "
            "them in front of each row"
        ),
        "HiDreamImageTransformer2DModel": (
            "each of its blocks brings a text of its own, a layer of Llama, into the sequence of a batch row"
        ),
        "HunyuanVideoFramepackTransformer3DModel": (
            "it puts earlier frames, in patches of three sizes, in front of the tokens of a batch row"
        ),
        "JoyImageEditPlusTransformer3DModel": (
            "it makes positions inside its forward, by lists of the pictures in each batch row, and no module "
            "whose output could be replaced returns them"
        ),
        "JoyImageEditTransformer3DModel": (
            "it makes positions inside its forward, by the shape of a batch row, and no module whose output could "
            "be replaced returns them"
        ),
        "Kandinsky6SRTransformer3DModel": (
            "its attention is sparse: a batch row chooses, by the means of its blocks of 64 tokens, which blocks "
            "attend to which"
        ),
        "NucleusMoEImageTransformer2DModel": (
            "its experts choose the tokens that fit them best among those of a batch row, so that a token's "
            "output depends on the others in its row"
        ),
        "OmniGenTransformer2DModel": (
            "its words attend to the words before them alone, by a mask over a batch row in which pictures lie "
            "among the words"
        ),
        "SanaTransformer2DModel": (
            "its attention is linear, a sum over all keys of a batch row, and its feed-forward convolves over the "
            "grid of the row"
        ),
        "SanaVideoTransformer3DModel": (
            "its attention is linear, a sum over all keys of a batch row, and its feed-forward convolves over the "
            "grid and the frames of the row"
        ),
        "SanaWMLTX2RefinerTransformer3DModel": (
            "it refines a video block by block, and each attends to keys of earlier blocks, which its caller keeps in "
            "between in one tensor for all batch rows"
        ),
        "SanaWMTransformer3DModel": (
            "its attention is a recurrence over the frames of a batch row, and it convolves over their grid"
        ),
    }
)
"""Why packing refuses a transformer, by the name of its class in diffusers 0.42.1.

Its pipeline trains in buckets if a recipe claims it.
"""

_CHUNKS = (
    "it renders a video chunk by chunk, each beside those rendered before, and a run from single clips would train "
    "one chunk beside zeros, so that the weights that read rendered frames would get no gradient"
)

UNTRAINED: Mapping[str, str] = MappingProxyType(
    {
        "AllegroPipeline": _TILES,
        "AnyFlowFARPipeline": _BETWEEN_LEVELS,
        "AnyFlowPipeline": _BETWEEN_LEVELS,
        "ConsisIDPipeline": _FACE,
        "GlmImagePipeline": _PRIOR_TOKENS,
        "HeliosPipeline": _CHUNKS,
        "HeliosPyramidPipeline": _CHUNKS,
        "HunyuanVideoFramepackPipeline": _CHUNKS,
    }
)
"""Why no recipe trains the pipeline of such a transformer, by the name of its class in diffusers 0.42.1."""

OTHER_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "AceStepTransformer1DModel": "makes music",
        "DiTTransformer2DModel": "makes images of a class, and takes no text",
        "DreamLiteTransformer2DModel": "is a block of a U-Net, which normalizes over the pixels of a batch row",
        "MiniMaxMusic3Transformer1DModel": "makes music",
        "Transformer2DModel": "is a block of a U-Net, which normalizes over the pixels of a batch row",
        "TransformerTemporalModel": "is a block of a U-Net, which normalizes over the frames of a batch row",
    }
)
"""What the transformers of diffusers 0.42.1 do that do not make images or videos from text."""
