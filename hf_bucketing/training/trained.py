"""What a run changes: the transformers that accelerate prepared, their optimizer, and the averages of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel

from ..adapters.loading import add_frozen, expert_folder, switch_on
from ..adapters.lora import checkpoint_adapters_only, save_lora, start_adapters
from ..batching import way_of
from ..batching.run_data import RunData
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..models.compilation import compile_blocks
from ..models.recipe import Recipe
from ..optimizers.optimizer import (
    apply_settings,
    make_optimizer,
    make_schedule,
    omits_updates,
    omitted_if,
)
from ..placement.blocks import checkpoint_blocks
from ..placement.context_parallel import ContextParallel
from ..placement.offload import offload_blocks, offload_idle
from ..placement.quantization import leave_frozen_weights_to_each_process
from ..placement.sharding import SHARDED, averaged, block_by_block, sending_weights, sharded_adapters
from ..settings import changed
from .checkpoint import gather_weights, save_pipeline
from .estimate import out_of_memory
from .opened import trained_dtype
from .optimizer_steps import check_finite


def add_trained_parts(recipe: Recipe, config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """Add adapters to the transformers, if any, and what saves memory; return the settings that the adapters have.

    What is trained is set to training, for dropout and the drop of tokens; frozen parts stay in evaluation.
    """
    for expert in recipe.experts:
        config = _add_trained_parts(expert, config, accelerator)
    if config.memory.offload_idle_expert:
        offload_idle([expert.transformer for expert in recipe.experts], device=accelerator.device)
    for expert in recipe.experts:
        leave_frozen_weights_to_each_process(expert.transformer)
    return config


def _add_trained_parts(recipe: Recipe, config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """Add them to the transformer of a recipe."""
    if config.adapters.lora_rank is not None:
        adapters, folder = config.adapters, expert_folder(recipe.trained, trained=config.trained_component)
        if adapters.init_from_adapters is not None:
            adapters = replace(adapters, init_from_adapters=str(Path(adapters.init_from_adapters) / folder))
        add_frozen(recipe.pipeline, adapters.frozen_in(folder), component=recipe.trained)
        adapters = start_adapters(
            recipe.pipeline, adapters, component=recipe.trained, dtype=trained_dtype(config), audio=recipe.audio
        )
        switch_on(recipe.transformer)
        config = changed(
            config,
            lora_alpha=adapters.lora_alpha,
            lora_targets=adapters.lora_targets,
            lora_format=adapters.lora_format,
        )
        checkpoint_adapters_only(
            accelerator,
            recipe.pipeline,
            component=recipe.trained,
            lora_format=adapters.lora_format,
            transformer_file=config.transformer_file,
            subfolder=folder,
        )
    if config.memory.gradient_checkpointing != "auto":  # or else `fill_checkpointing` chooses, after the data is read
        checkpoint_blocks(recipe.transformer, config.memory.gradient_checkpointing)
    if config.memory.offload_blocks:
        offload_blocks(recipe.transformer, config.memory.offload_blocks, device=accelerator.device)
    recipe.transformer.train()  # before max_tokens="auto" tries steps
    if config.memory.compile:
        compile_blocks(recipe.transformer)
    return config


class TrainedModel:
    """Transformers under training, prepared by accelerate together with their optimizer and the loader of their data.

    Args:
        recipe ([`Recipe`][hf_bucketing.models.recipe.Recipe]): Loaded pipeline, after [`add_trained_parts`].
        config ([`TrainingConfig`]): Settings of the run.
        data ([`RunData`]): Data of the run, whose loader is prepared.
        accelerator (`Accelerator`): Accelerator of the run.

    Attributes:
        transformers (dict of `str` to `torch.nn.Module`): The prepared transformers by their names in the pipeline,
            one or both experts; `recipe.transformer` is the first one bare.
        optimizer (`AcceleratedOptimizer`): The prepared optimizer.
        loader (`DataLoader`): The prepared loader.
        way ([`Batching`][hf_bucketing.batching.Batching]): Way of batching.
        weights (dict of `str` to lists of `torch.nn.Parameter`): What is trained of each transformer.
        ema (dict of `str` to `EMAModel`): Averages of `weights`; empty without any.
        context_parallel ([`ContextParallel`][hf_bucketing.placement.context_parallel.ContextParallel]): How processes
            share the tokens of a sample.
    """

    def __init__(self, recipe: Recipe, config: TrainingConfig, data: RunData, accelerator: Accelerator) -> None:
        self.recipe, self.config, self.accelerator = recipe, config, accelerator
        transformer, degree = recipe.transformer, config.memory.context_parallel_degree
        experts = recipe.experts
        others = [expert.transformer for expert in experts[1:]]
        self._bare_optimizer = make_optimizer(transformer, config.optimizer, others=others)
        with (
            sharded_adapters(transformer, accelerator) if self.adapted else nullcontext(),
            sending_weights(transformer, accelerator),
            block_by_block(transformer, accelerator),
        ):
            prepared = data.prepare(accelerator, transformer, self._bare_optimizer, degree=degree)
        first, self.optimizer, self.loader = prepared
        self.transformers = {recipe.trained: first}
        self.transformers |= {expert.trained: accelerator.prepare(expert.transformer) for expert in experts[1:]}
        self.optimizer.train()  # as schedule-free optimizers demand
        self._updated: set[str] = set()
        # A gradient scaler sets the flags itself, and weights in shards are no plain tensors as the flag is.
        self._omits_updates = (
            omits_updates(self._bare_optimizer)
            and accelerator.scaler is None
            and accelerator.distributed_type not in SHARDED
        )
        self.way = way_of(config.batches)
        packed = not self.way.stacks
        self.context_parallel = ContextParallel(recipe.transformer, accelerator, degree=degree, packed=packed)
        self.weights = {
            name: [parameter for parameter in model.parameters() if parameter.requires_grad]
            for name, model in self.transformers.items()
        }
        self.ema: dict[str, EMAModel] = {}
        if (decay := config.ema_decay) is not None:
            self.ema = {
                name: averaged(weights, decay=decay, accelerator=accelerator) for name, weights in self.weights.items()
            }

    @property
    def transformer(self) -> torch.nn.Module:
        """The prepared transformer, or the first of two."""
        return self.transformers[self.recipe.trained]

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained, and not the whole transformer."""
        return self.config.adapters.lora_rank is not None

    def start_schedule(self, num_steps: int) -> None:
        """Begin the learning rate schedule of a number of optimizer steps, which checkpoints hold from now on."""
        # Stepped here, once per optimizer step: a prepared scheduler would step once per process.
        self.lr_scheduler = make_schedule(self._bare_optimizer, self.config.optimizer, num_training_steps=num_steps)
        self.accelerator.register_for_checkpointing(self.lr_scheduler)

    def change_schedule(self, num_steps: int) -> None:
        """Give the schedule another number of steps, and the run's settings in place of those of its checkpoint."""
        schedule = make_schedule(self._bare_optimizer, self.config.optimizer, num_training_steps=num_steps)
        self.lr_scheduler.lr_lambdas = schedule.lr_lambdas
        self.optimizer.train()  # checkpoints hold what is evaluated
        apply_settings(self.config.optimizer, self.lr_scheduler)

    @contextmanager
    def enough_memory_for(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Raise BucketingError, which names what helps, if memory runs out on a batch inside a `with` block."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            message = out_of_memory(error, batch, self.config)
            if message is None:
                raise
            raise BucketingError(message) from error

    def clip_gradients(self) -> Any:
        """Clip the gradients by their norm over all weights, and return it as it was."""
        parameters = chain.from_iterable(model.parameters() for model in self.transformers.values())
        return self.accelerator.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm)

    def reads_late(self, trained: str) -> bool:
        """Return whether the device itself can omit the next update of a transformer's weights.

        The first update is not omitted so: fused SGD would keep momentum buffers that were never filled.
        """
        return self._omits_updates and trained in self._updated

    def launch_update(self, found_inf: torch.Tensor) -> None:
        """Change weights by their gradients unless `found_inf`, on the device, is 1; [`update`] does the rest."""
        with omitted_if(found_inf, self._bare_optimizer):
            self.optimizer.step()

    def update(self, trained: str, *, launched: bool = False) -> None:
        """Change the weights of a transformer by their gradients, and its averages and the learning rate with them.

        Args:
            trained (`str`): The transformer that has gradients. Averages of the other one stay as they are, as the
                decay depends on how many steps an average has seen.
            launched (`bool`): Whether [`launch_update`] has changed the weights already.
        """
        if not launched:
            self.optimizer.step()
        self._updated.add(trained)
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_scheduler.step()
            if self.ema:
                self.ema[trained].step(self.weights[trained])

    def leave(self) -> None:
        """Leave the weights as they are although gradients came."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # which lowers the scale, and may unscale again

    @contextmanager
    def optimizer_in_evaluation(self) -> Iterator[None]:
        """Put the weights that a schedule-free optimizer evaluates in place of those it trains inside a `with` block.

        Enter it on every process: going there and back rounds.
        """
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Put the weights to evaluate, averages if there are any, in place of the last ones inside a `with` block.

        Enter it on every process, see [`optimizer_in_evaluation`].
        """
        with self.optimizer_in_evaluation():
            for name, ema in self.ema.items():
                ema.store(self.weights[name])
                ema.copy_to(self.weights[name])
            try:
                yield
            finally:
                for name, ema in self.ema.items():
                    ema.restore(self.weights[name])

    def check(self, what: str) -> None:
        """Raise BucketingError on all processes unless the weights and their averages are finite.

        The message says `what` is not saved.
        """
        averages = (ema.shadow_params for ema in self.ema.values())
        check_finite(chain.from_iterable([*self.weights.values(), *averages]), self.accelerator, what=what)

    def save_adapters(self, folder: Path) -> None:
        """Save the adapters, averaged if there are averages; call it on every process."""
        with self.averages():
            for name in self.transformers:
                subfolder = expert_folder(name, trained=self.config.trained_component)
                save_lora(
                    self.recipe.pipeline,
                    folder / subfolder,
                    component=name,
                    lora_format=self.config.adapters.lora_format,
                    transformer_file=self.config.transformer_file,
                )

    def save(self, folder: Path, *, source: Path) -> None:
        """Save the result of the run, averaged if there are averages; call it on every process.

        It is the adapters or, without any, the whole pipeline, of which the transformers are then no more trained.
        What was not trained is copied from `source`.
        """
        if self.adapted:
            self.save_adapters(folder)
            return
        self.optimizer.eval()
        for name, ema in self.ema.items():
            ema.copy_to(self.weights[name])
        weights = gather_weights(self.accelerator, self.transformer)
        if self.accelerator.is_main_process:
            self.context_parallel.remove()
            for transformer in self.transformers.values():
                self.way.release(transformer)
            save_pipeline(self.recipe, folder, source=source, weights=weights)

    @property
    def for_evaluation(self) -> dict[str, torch.nn.Module]:
        """The transformers to call without gradients, for which DDP has nothing to do: bare unless sharded."""
        if self.accelerator.distributed_type in SHARDED:
            return self.transformers
        return {expert.trained: expert.transformer for expert in self.recipe.experts}

    def release(self) -> None:
        """Release what accelerate prepared, and end the process group."""
        # DDP must go before its process group: as its last owner, DDP would destroy the group while it holds Python's
        # interpreter lock and waits for gloo's threads, which may wait for that lock to release a tensor.
        del self.transformers, self.optimizer, self.loader
        self.accelerator.free_memory()
        self.accelerator.end_training()
