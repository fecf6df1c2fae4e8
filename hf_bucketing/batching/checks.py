"""What a run checks of its data before it draws a batch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from accelerate.logging import get_logger

from ..buckets.sizes import LatentSpec
from ..caching.columns import NULL_TEXT_KEY
from ..columns.prepared import CacheInfo, PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.audio import AUDIO
from ..conditions.names import MASK, REFERENCE
from ..conditions.shares import read_conditions
from ..configuration.objective import read_loss_weight
from ..configuration.run import TrainingConfig
from ..errors import BucketingError, quoted
from ..media.rows import REGULARIZATION, check_flips
from ..media.views import ViewRule
from ..models.index import read_index
from ..models.loss_mask import LOSS_MASK
from ..models.recipe import Recipe
from ..models.samples import REFERENCES
from ..settings import marked, not_default
from . import Step, way_of
from .run_data import RunData

logger = get_logger(__name__)


def check_prepared(
    config: TrainingConfig, prepared: PreparedDataset | PreparedStream, spec: LatentSpec, *, folder: str
) -> None:
    """Raise BucketingError if a data set was prepared for another model, or has no captions."""
    if prepared.spec != spec:
        raise BucketingError(
            f"{folder} was prepared for {prepared.spec}, but the model has {spec}; prepare it again with "
            f"--pretrained_model_name_or_path {config.pretrained_model_name_or_path}."
        )
    if prepared.caption_column is None:
        raise BucketingError(
            f"The rows of {folder} have no captions, which the model needs; prepare the data set with "
            "--caption_column, or with captions beside its files."
        )


def check_marks(config: TrainingConfig, prepared: PreparedDataset) -> None:
    """Raise BucketingError if no sample can be preserved; say so if marked rows are not."""
    rows, wanted = prepared.dataset, config.preservation
    count = sum(map(bool, rows[REGULARIZATION])) if REGULARIZATION in rows.column_names else 0
    if wanted.preservation is not None and not wanted.preservation_share and not count:
        raise BucketingError(
            f"`preservation` preserves no sample: {config.dataset_dir} marks no rows. Give `preservation_share`, or "
            "prepare a source of regularization samples with --is_regularization."
        )
    if count and wanted.preservation is None:
        logger.warning(
            f"{count} rows are marked as regularization samples and are trained as all others; with --preservation "
            "prior, the base model's own predictions are their targets."
        )


def check_reference_dropout(
    config: TrainingConfig, prepared: PreparedDataset | PreparedStream, *, in_front: bool, evaluation: bool = False
) -> None:
    """Raise BucketingError if references cannot be dropped: samples have none, or they are part of the latents.

    With `evaluation`, they need not have any.
    """
    objective = config.objective
    if objective.reference_dropout:
        name = "`reference_dropout`"
    elif objective.condition is not None and read_conditions(objective.condition).draws_references:
        name = "`reference` in `condition`"
    else:
        return
    if REFERENCE not in prepared.conditions:
        if evaluation:
            return
        raise BucketingError(f"Omit {name}: the samples of {config.dataset_dir} have no references.")
    if isinstance(prepared, PreparedDataset) and NULL_TEXT_KEY in prepared.dataset.column_names:
        raise BucketingError(
            f"Omit {name}: this model's cached texts are those of an encoder that saw the references. "
            "Train from the folder that hf_bucketing prepare wrote."
        )
    if in_front:
        raise BucketingError(
            f"Omit {name}: references of this model are frames of a sample's latents, which it is always shown."
        )


def check_reference_views(
    config: TrainingConfig, data: PreparedDataset | PreparedStream, recipe: type[Recipe], *, views: ViewRule
) -> None:
    """Raise BucketingError if samples are mirrored and not their references; say if a pipeline shows these otherwise.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        data ([`PreparedDataset`] or [`PreparedStream`]): Its data set, which has references or not.
        recipe (subclass of [`Recipe`][hf_bucketing.models.recipe.Recipe]): Recipe of its model.
        views ([`ViewRule`]): Views of the samples, unless a cache has its own.
    """
    cache = data.cache if isinstance(data, PreparedDataset) else None
    apart = REFERENCE in data.conditions and not data.references.lie_over
    if cache is None:
        check_flips(views, data.conditions, data.references)
    elif (
        apart
        and cache.views.get("flip_probability")
        and not cache.views.get("flip_references")
        and (cache.views_per_sample == 1 or config.batches.cached_views != "first")  # the first view is not mirrored
    ):
        raise BucketingError(
            f"The latents in {cache.folder} are of samples that `flip_probability` mirrored without their references. "
            "Cache them again without it, or with --flip_references, which mirrors both."
        )
    rule = recipe.reference_rule(read_index(config.pretrained_model_name_or_path).settings)
    factor = data.references.downscale_factor
    wanted = rule.manner if factor is None else replace(rule, short_side=None).within(None, factor).manner
    if REFERENCE in data.conditions and data.references.manner != wanted:
        logger.warning(
            f"The references of this data set are {data.references.manner}; the pipeline of the model shows them "
            f"{wanted}. Prepare the data set again for this model, with this release, to train as it renders."
        )


def check_named_sources(config: TrainingConfig, sources: Sequence[str]) -> None:
    """Raise BucketingError if settings name sources that the data set has not; `sources` are none where it has one."""
    condition, loss_weight = config.objective.condition, config.objective.loss_weight
    named = {
        "condition": [] if condition is None else read_conditions(condition).by_source,
        "loss_weight": [] if loss_weight is None else read_loss_weight(loss_weight),
    }
    for setting, names in named.items():
        if unknown := sorted({*names} - {*sources}):
            has = f"the sources {quoted(sources)}" if sources else "one source, which has no name"
            raise BucketingError(f"`{setting}` names {quoted(unknown)}, but {config.dataset_dir} has {has}.")


def check_audio(config: TrainingConfig, prepared: PreparedDataset | PreparedStream) -> None:
    """Raise BucketingError if settings do not go with the audio of a data set, or are about audio that it lacks."""
    if prepared.audio is None:
        if given := not_default(config, "audio_weight"):
            raise BucketingError(f"Omit {quoted(given)}: {config.dataset_dir} was prepared without --with_audio.")
        return
    if config.views.frame_picking == "uniform":
        raise BucketingError(
            f'{config.dataset_dir} has audio, which does not go with `frame_picking="uniform"`, by which frames are '
            "further apart than their sound."
        )


def check_cached_rows(config: TrainingConfig, cache: CacheInfo, *, folder: str) -> None:
    """Raise BucketingError if a cache is of another way of batching, or settings change what it encoded."""
    batching = way_of(config.batches).cached_as
    if cache.batching != batching:
        raise BucketingError(
            f"{folder} caches latents for --batching {cache.batching}, not {batching}; run "
            f"hf_bucketing cache with --batching {batching}."
        )
    condition = config.objective.condition
    appended = None if condition is None else read_conditions(condition).appended_frames
    if appended not in (None, cache.appended_frames) and (appended, cache.appended_frames) != ("last", "all"):
        frames = {
            "first": "the first frame of each sample, encoded by itself",
            "last": "the last frame of each sample, encoded by itself",
            "all": "all frames that may be drawn, each encoded by itself",
        }[appended]
        raise BucketingError(
            f"`condition` appends frames, but {folder} does not hold {frames}; run "
            f"hf_bucketing cache again with --condition {shlex.quote(str(condition))}."
        )
    encoded = marked(TrainingConfig, "encoded")
    given = not_default(config, *encoded)
    if media := [name for name in given if encoded[name] == "media"]:
        raise BucketingError(
            f"Omit {quoted(media)}: {folder} holds encoded latents, and such settings change what is decoded. Give "
            "them to hf_bucketing cache."
        )
    if given:
        raise BucketingError(
            f"Omit {quoted(given)}: {folder} holds encoded captions, whose tags keep their order; train "
            "from the folder that hf_bucketing prepare wrote."
        )


def check_data(step: Step, data: RunData) -> None:
    """Raise BucketingError if the model cannot take samples of the data, or their cache lacks what it is shown."""

    def check(counts: Mapping[int, int]) -> None:
        check_positions(step, data, counts)
        step.recipe.check_frames(data.table, np.repeat(list(counts), list(counts.values())).astype(np.int64))

    data.check_buckets(check)
    if step.condition is not None:
        step.condition.check_sources(data.sources)
    step.recipe.check_conditions(
        data.conditions,
        references=data.reference_counts(),
        audio_rates=data.audio_rates(),
        drawn=() if step.condition is None else step.condition.all,
        cached=data.cached_batch() is not None,
    )
    check_cached(step.recipe, data)


def check_positions(step: Step, data: RunData, counts: Mapping[int, int]) -> None:
    """Raise BucketingError if a sample lies beyond the positions that the model has, such as a video for images.

    `counts` are the buckets of samples in the table of the data, each with its number of samples.
    """
    for bucket_id, count in counts.items():
        size = data.table.size(bucket_id)
        refusal = step.refusal(data.spec.grid(size))
        if refusal is not None:
            raise BucketingError(
                f"The model cannot take the {count} samples of {size}{data.example_of(bucket_id)}: {refusal} "
                "--max_frames of hf_bucketing prepare cuts samples that are too long."
            )


def check_cached(recipe: Recipe, data: RunData) -> None:
    """Raise BucketingError if a cache lacks what the model is shown of a sample, such as its first frame.

    All entries of a cache are made by one encoder, so one row is read.
    """
    batch = data.cached_batch()
    if batch is None:
        return
    if recipe.null_as_long and "" in data.texts and data.texts[""].mask is not None:
        raise BucketingError(
            f"The null text of a {recipe.pipeline_class} is as long as the caption that it replaces, but the cache "
            "holds the empty caption alone; run hf_bucketing cache again."
        )
    latent = batch["latents"][0]
    if len(latent) != recipe.latent_channels:
        raise BucketingError(
            f"The cache holds latents of {len(latent)} channels, but a {recipe.pipeline_class} is trained on "
            f"{recipe.latent_channels}; run hf_bucketing cache again with this pipeline."
        )
    needed = {*recipe.blank_conditions(latent), *([LOSS_MASK] if MASK in data.conditions else [])}
    if REFERENCE in data.conditions and not recipe.reference_condition().in_front:
        needed.add(REFERENCES)
    if recipe.audio:
        needed.add(AUDIO)
    if missing := needed - batch.get("conditions", {}).keys():
        raise BucketingError(
            f"A {recipe.pipeline_class} is also shown {', '.join(sorted(missing))}, which the cache lacks; run "
            "hf_bucketing cache again with this pipeline."
        )
