"""The way of batching of a run, and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..conditions.shares import read_conditions
from ..configuration.batches import BatchConfig
from ..configuration.run import TrainingConfig
from ..models.recipe import Recipe
from .buckets import Buckets
from .lengths import Lengths
from .packs import Packs
from .steps import Step
from .way import Batching

WAYS: Mapping[str, type[Batching[Any]]] = {"bucket": Buckets, "pack": Packs, "length": Lengths}
"""Ways of batching by the names that `batching` has in settings."""


def way_of(batches: BatchConfig) -> Batching[Any]:
    """Return the way of batching that settings name."""
    return WAYS[batches.batching](batches)


def make_step(config: TrainingConfig, recipe: Recipe, *, sharded: bool = False) -> Step:
    """Return the step of a run, whose weights may be sharded over processes; its transformer is made ready for it."""
    condition, recipe = config.objective.condition, recipe.guided(config.objective.guidance)
    objective = recipe.objective(
        weighting_scheme=config.objective.weighting_scheme,
        snr_gamma=config.objective.snr_gamma,
        shift=config.objective.shift,
        seed=config.seed,
    )
    options: dict[str, Any] = {
        "objective": objective,
        "caption_dropout": config.objective.caption_dropout,
        "reference_dropout": config.objective.reference_dropout,
        "condition": None if condition is None else read_conditions(condition),
        "seed": config.seed,
        "offload_activations": config.memory.offload_activations,
        "preservation": config.preservation,
        "sharded": sharded,
        "leaves_out": config.faults.on_error == "replace",
        "audio_weight": config.objective.audio_weight,
    }
    return way_of(config.batches).step(recipe, **options)
