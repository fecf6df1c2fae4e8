"""What a run knows before weights are loaded: its recipe, its model without weights, and what is loaded how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend

from ..batching import way_of
from ..batching.checks import check_reference_views
from ..buckets.cost import read_cost_model
from ..buckets.sizes import LatentSpec, Size
from ..columns.arrays import column_array
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream, holds_stream
from ..conditions.appended import AppendedFrames
from ..conditions.rows import ConditionRules, tokens_with
from ..conditions.shares import most_appended
from ..configuration.run import LaunchConfig, TrainingConfig, check_run
from ..errors import BucketingError
from ..models.compilation import compiled_classes
from ..models.experts import transformers_of
from ..models.loading import (
    MODEL_PARTS,
    Loading,
    ModelPart,
    empty_component,
    empty_transformer,
    read_configs,
)
from ..models.recipe import Recipe
from ..models.registry import recipe_of
from ..models.weight_files import TransformerFile, check_weights_can_train, read_weights_of
from ..optimizers.optimizer import check_optimizer
from ..placement.blocks import blocks_of
from ..placement.context_parallel import check_audio, check_model, check_sizes
from ..placement.offload import check_blocks
from ..placement.quantization import check_package, quantization_of
from ..placement.sharding import HALF, SHARDED, loads_empty, loads_once, sharding_of, wraps_blocks
from .data_changes import settle_caches

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run whose configurations are read, and whose settings fit its model and its data.

    Attributes:
        config ([`TrainingConfig`]): Settings.
        accelerator (`Accelerator`): Processes, devices and precision.
        recipe (type of [`Recipe`][hf_bucketing.models.recipe.Recipe]): What trains the pipeline.
        spec ([`LatentSpec`]): Strides and patch of the model.
        called (tuple of `str`): Frozen parts of the pipeline that every step calls.
        prepared ([`PreparedDataset`], *optional*): The rows that are trained; None where a stream is.
        held_out ([`PreparedDataset`], *optional*): Held-out rows of a folder of their own.
    """

    config: TrainingConfig
    accelerator: Accelerator
    recipe: type[Recipe]
    spec: LatentSpec
    called: tuple[ModelPart, ...]
    prepared: PreparedDataset | None = None
    held_out: PreparedDataset | None = None

    @cached_property
    def empty_transformer(self) -> Any:
        """The transformer to train, or the first of two, from its configuration alone: parameters without values."""
        config = self.config
        return empty_transformer(config.pretrained_model_name_or_path, transformers_of(config.trained_component)[0])

    @property
    def transformer_file(self) -> TransformerFile | None:
        """The file of the weights of the transformer to train, if they do not come from the pipeline."""
        config = self.config
        if config.transformer_file is None:
            return None
        return TransformerFile(path=config.transformer_file, component=transformers_of(config.trained_component)[0])

    @property
    def loading(self) -> Loading:
        """What is loaded: what is trained, what steps call, and for validation everything where it renders.

        Frozen weights are loaded in the precision of activations.
        """
        config, memory, accelerator = self.config, self.config.memory, self.accelerator
        dtype = HALF.get(accelerator.mixed_precision, torch.float32)
        quantization = None
        if memory.quantize_base is not None:
            quantization = quantization_of(memory.quantize_base, self.empty_transformer, dtype=dtype)
        return Loading(
            parts=MODEL_PARTS if self.renders else ("trained", *self.called),
            dtype=dtype,
            trained_dtype=trained_dtype(config) if config.adapters.lora_rank is None else dtype,
            quantization=quantization,
            empty=loads_empty(accelerator),
            transformer_file=self.transformer_file,
            vae_file=config.vae_file,
            vae_tiling=memory.vae_tiling and (self.renders or "vae" in self.called),
        )

    @cached_property
    def data(self) -> PreparedDataset | PreparedStream:
        """The data set, or the stream of one, before its rows are read."""
        if self.prepared is not None:
            return self.prepared
        folder = self.config.dataset_dir
        return PreparedStream.load(folder) if holds_stream(folder) else PreparedDataset.load(folder)

    @property
    def trains_audio(self) -> bool:
        """Whether audio is trained with video: the data set has some."""
        return self.data.audio is not None

    @property
    def made_with(self) -> Mapping[str, Any]:
        """Settings by which the rows were prepared and cached; none where their folder does not hold them."""
        return self.data.settings

    @property
    def renders(self) -> bool:
        """Whether this process renders prompts: the main one, or all where none holds all weights."""
        sharded = self.accelerator.distributed_type in SHARDED
        return self.config.validation.validation_prompts is not None and (sharded or self.accelerator.is_main_process)


def open_run(config: TrainingConfig, accelerator: Accelerator) -> OpenedRun:
    """Read the configurations of a run, and check that its settings fit its model, its data and their cache.

    Raises:
        BucketingError: If they do not; the message names the nearest settings that do.
    """
    if config.batches.cost_model is not None:
        read_cost_model(config.batches.cost_model)  # a bad file ends the run before weights are loaded
    recipe = recipe_of(config.pretrained_model_name_or_path)
    prepared = None if config.stream.streaming else PreparedDataset.load(config.dataset_dir)
    validation = config.held_out.validation_dataset_dir
    held_out = None if validation is None else PreparedDataset.load(validation)
    folders = {config.dataset_dir: prepared, str(validation): held_out}
    config = settle_caches(config, {folder: rows for folder, rows in folders.items() if rows is not None})
    opened = OpenedRun(
        config=config,
        accelerator=accelerator,
        recipe=recipe,
        spec=recipe.read_spec(config.pretrained_model_name_or_path),
        called=_parts_called(prepared),
        prepared=prepared,
        held_out=held_out,
    )
    for data, views in ((opened.data, config.views), (opened.held_out, config.views.fixed)):
        if data is not None:
            check_reference_views(config, data, recipe, views=views)
    check_package(config.memory.quantize_base)
    check_optimizer(config.optimizer)
    if config.transformer_file is not None:
        weights = read_weights_of(config.transformer_file, opened.empty_transformer)
        check_weights_can_train(weights, adapters=config.adapters.lora_rank is not None)
    if config.vae_file is not None:
        read_weights_of(config.vae_file, empty_component(config.pretrained_model_name_or_path, "vae"))
    memory = config.memory
    offloads = memory.offload_blocks or memory.offload_idle_expert or memory.offload_activations
    if accelerator.device.type == "cpu" and offloads:
        logger.warning("Offload saves nothing on a CPU run: what waits on the CPU is copied there all the same.")
    _check_model_and_data(opened)
    return opened


def check_settings(config: TrainingConfig, accelerator: Accelerator) -> None:
    """Raise BucketingError for settings that cannot be combined on the processes and devices of an accelerator."""
    check_run(config, launch_of(accelerator), precision=accelerator.mixed_precision)


def launch_of(accelerator: Accelerator) -> LaunchConfig:
    """Return how the processes of an accelerator were launched."""
    return LaunchConfig(
        sharding=sharding_of(accelerator),
        num_processes=accelerator.num_processes,
        device="cpu" if accelerator.device.type == "cpu" else "cuda",
        loads_once=loads_once(accelerator),
        grouped=accelerator.torch_device_mesh is not None,
        dynamo=accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
        wraps_blocks=wraps_blocks(accelerator),
    )


def _check_model_and_data(opened: OpenedRun) -> None:
    """Raise BucketingError for settings of memory that the model, its parts or its samples do not allow."""
    config, memory = opened.config, opened.config.memory
    if memory.vae_tiling and config.validation.validation_prompts is None and "vae" not in opened.called:
        raise BucketingError(
            "Omit `vae_tiling`: latents are cached and nothing is rendered, so that no VAE runs. It is a setting of "
            "hf_bucketing cache too."
        )
    if memory.offload_blocks:
        check_blocks(memory.offload_blocks, blocks=len(blocks_of(opened.empty_transformer)))
    if memory.compile:
        compiled_classes(opened.empty_transformer)
    if memory.context_parallel_degree > 1:
        _, transformer = read_configs(config.pretrained_model_name_or_path)
        packed = not way_of(config.batches).stacks
        check_model(memory.context_parallel_degree, opened.recipe, transformer, packed=packed)
        if opened.trains_audio:
            check_audio(memory.context_parallel_degree, opened.recipe, packed=packed)
        if not packed:
            check_sizes(memory.context_parallel_degree, _stacked_sizes(opened), spec=opened.spec)


def _stacked_sizes(opened: OpenedRun) -> Counter[tuple[Size, int]]:
    """Count the samples of each size, with its tokens, in the data sets of a run."""
    sizes: Counter[tuple[Size, int]] = Counter()
    for prepared in filter(None, (opened.prepared, opened.held_out)):
        ids = column_array(prepared.dataset, "bucket_id").astype(np.int64)
        sample_tokens = prepared.table.num_tokens(ids, spec=prepared.spec)
        references = prepared.references.entering(
            replace(opened.recipe.reference_condition(), text_tokens=0, text_factor=0)
        )
        rows = prepared.row_conditions(ConditionRules.of(prepared.conditions, references=references))
        for appended in {0, min(1, most_appended(opened.config.objective.condition))}:  # then any number divides too
            conditions = rows.appending(AppendedFrames(appended))
            tokens = tokens_with(conditions, sample_tokens, ids, table=prepared.table, spec=prepared.spec)
            usable = np.stack([ids, tokens])[:, tokens > 0]
            for (bucket, length), count in zip(*np.unique(usable.T, axis=0, return_counts=True), strict=True):
                sizes[prepared.table.size(int(bucket)), int(length)] += int(count)
    return sizes


def trained_dtype(config: TrainingConfig) -> torch.dtype:
    """Return the precision of what is trained."""
    return torch.bfloat16 if config.memory.trained_dtype == "bf16" else torch.float32


def _parts_called(prepared: PreparedDataset | None) -> tuple[ModelPart, ...]:
    """Return the frozen parts of the pipeline that every step calls: those whose results are not cached."""
    if prepared is None or prepared.cache is None:
        return "text_encoders", "vae"
    return ("text_encoders",) if prepared.cache.text_model is None else ()
