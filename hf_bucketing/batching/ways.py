"""What settings choose: the way of batching of a run, its steps, by expert if there are two, and its collator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..buckets.sizes import Size
from ..caching.collator import CachedCollator
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.shares import read_conditions
from ..configuration.batches import BatchConfig
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..loaders.faults import Replacements
from ..loaders.random_resize import RandomResize
from ..models.recipe import Recipe
from .buckets import Buckets
from .own_sizes import Lengths, Packs
from .steps import Step
from .way import Batching, Collator

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


_FRAMES = 81
"""Frames of the clip, of the model's own size, for which a shift that depends on the size is taken."""


@dataclass(frozen=True)
class Experts:
    """The transformers that a run trains: one, or two whose noise levels are all that the pipeline has.

    An optimizer step trains one of two, by its number and their shares alone, so that a resumed run and all processes
    agree. Every sample is trained once per epoch, by the expert of its step.

    Args:
        steps (tuple of [`Step`][hf_bucketing.batching.steps.Step]): One for each transformer.

    Raises:
        BucketingError: If two transformers do not share the noise levels among them.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if len(self.steps) > 1 and abs(sum(self.shares) - 1) > 1e-6:
            raise BucketingError(
                f"The transformers of this {self.steps[0].recipe.pipeline_class} have no noise levels of their own, "
                "as its configuration has no `boundary_ratio`; train one of them (`trained_component`)."
            )

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of the optimizer steps of each: that of the noise levels, as they are drawn, which are its own.

        With a shift by the size of samples, it is that of 81 frames of the model's own smallest size.
        """
        if len(self.steps) == 1:
            return (1.0,)
        recipe = self.steps[0].recipe
        size = recipe.spec.latent_size(recipe.spec.snap(Size(_FRAMES, *recipe.native_sizes[0])))
        return tuple(step.objective.share(size) for step in self.steps)

    def at(self, global_step: int) -> Step:
        """Return the expert of an optimizer step, after so many others; it comes as evenly as its share allows.

        Args:
            global_step (`int`): Optimizer steps before it.
        """
        share = self.shares[0]
        before, after = (math.floor(share * steps + 0.5) for steps in (global_step, global_step + 1))
        return self.steps[0 if after > before else -1]

    def levels(self, num_levels: int) -> list[tuple[Step, float, int]]:
        """Divide noise levels of held-out samples among the experts, the least noise first.

        Args:
            num_levels (`int`): Number of equally likely ranges of noise levels.

        Returns:
            `list` of `(Step, float, int)`: Each expert, its share, and how many levels it has, at least one.
        """
        first = self.shares[0]
        counts = [max(1, round(first * num_levels))]
        if len(self.steps) > 1:
            counts = [min(counts[0], max(1, num_levels - 1))]
            counts.append(max(1, num_levels - counts[0]))
        return [*zip(self.steps, self.shares, counts, strict=True)][::-1]

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Make the transformers usable by their pipeline inside a `with` block."""
        with ExitStack() as stack:
            for step in self.steps:
                stack.enter_context(step.unpacked())
            yield


def make_experts(config: TrainingConfig, recipe: Recipe, *, sharded: bool = False) -> Experts:
    """Return the experts of a run with their steps, see [`make_step`][hf_bucketing.batching.ways.make_step]."""
    return Experts(tuple(make_step(config, expert, sharded=sharded) for expert in recipe.experts))


def make_collator(
    way: Batching[Any], config: TrainingConfig, prepared: PreparedDataset, *, resize: RandomResize | None, log: Path
) -> Collator | CachedCollator:
    """Return the collator of rows: that of a cache, or of files with replacements for unreadable ones.

    `log` is the file that names unreadable rows.
    """
    if prepared.cache is not None:
        return CachedCollator(
            prepared.cache,
            caption_column=prepared.caption_column,
            seed=config.seed,
            first_view=config.batches.cached_views == "first",
            null_texts="" in config.preservation.captions or config.objective.caption_dropout > 0,
            sources=prepared.sources,
        )
    replacements = config.faults.replacements(prepared.dataset, log=log)
    return media_collator(way, config, prepared, resize=resize, replacements=replacements)


def media_collator(
    way: Batching[Any],
    config: TrainingConfig,
    prepared: PreparedDataset | PreparedStream,
    *,
    resize: RandomResize | None = None,
    replacements: Replacements | None = None,
) -> Collator:
    """Return the collator that decodes the files of rows."""
    return way.collator(
        way.table(prepared),
        resize=resize,
        column=prepared.column,
        caption_column=prepared.caption_column,
        captions=config.captions,
        root=prepared.root,
        other_roots=prepared.other_roots,
        conditions=prepared.conditions,
        references=prepared.references,
        audio=prepared.audio,
        sources=prepared.sources,
        views=config.views,
        seed=config.seed,
        replacements=replacements,
    )
