"""One recipe per pipeline class; adding one is one file and one line here."""

from __future__ import annotations

from diffusers import DiffusionPipeline

from ..errors import BucketingError, HubError
from ..hub import from_hub
from .latte.recipe import LatteRecipe
from .ltx.recipe import LTXRecipe
from .recipe import Recipe, TextEmbeddings
from .wan.recipe import WanRecipe

RECIPES: dict[str, type[Recipe]] = {recipe.pipeline_class: recipe for recipe in (LatteRecipe, LTXRecipe, WanRecipe)}


def recipe_of(name_or_path: str) -> type[Recipe]:
    """Return the recipe of a pipeline on the hub or in a folder, by the class that its `model_index.json` names.

    Raises:
        BucketingError: If there is no pipeline, or none that a recipe knows.
    """
    try:
        with from_hub(name_or_path):
            name = DiffusionPipeline.load_config(name_or_path)["_class_name"]
    except HubError:
        raise
    except (BucketingError, OSError, KeyError) as error:
        raise BucketingError(f"{name_or_path} is no diffusers pipeline: {error}") from error
    if name not in RECIPES:
        raise BucketingError(
            f"{name_or_path} is a {name}; there are training recipes for {', '.join(sorted(RECIPES))}."
        )
    return RECIPES[name]


__all__ = ["RECIPES", "LTXRecipe", "LatteRecipe", "Recipe", "TextEmbeddings", "WanRecipe", "recipe_of"]
