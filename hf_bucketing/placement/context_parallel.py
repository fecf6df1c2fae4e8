"""Context parallelism: processes that compute the same samples, each with a part of the tokens.

Ulysses (Jacobs et al., 2023), by diffusers' hooks and exchange: a process holds its part of the tokens everywhere but
in self-attention, for which a group exchanges tokens for heads. Text is attended to by each process's own tokens.

A process computes the gradients that come through its own tokens; those of a group add up. DDP divides their sum by
the number of all processes, and `global_mean` multiplies losses by it, so that gradients are right as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    CheckpointWrapper,
)
from torch.distributed.device_mesh import init_device_mesh

from ..buckets.sizes import LatentSpec, Size
from ..errors import BucketingError
from ..models.recipe import Recipe

_TEXT_ATTENTION = "attn2"
"""Name of the modules that attend to text; see `Family.context_parallel`."""

_TIMESTEPS = "timestep"
"""Argument of a forward that may hold a timestep for each token, as for references, which are clean."""

_SIZES_NAMED = 5


def check_model(degree: int, recipe: type[Recipe], transformer: Mapping[str, Any]) -> None:
    """Refuse a model whose tokens or heads processes cannot share, before its weights are loaded.

    Args:
        degree (`int`): Processes that share a sample.
        recipe (type of [`Recipe`][hf_bucketing.models.recipe.Recipe]): Recipe of the pipeline.
        transformer (mapping): Configuration of the transformer.

    Raises:
        BucketingError: With the reason and the nearest combination that works.
    """
    option, family = f"`context_parallel_degree={degree}`", recipe.family
    if not family.context_parallel:
        raise BucketingError(
            f"Omit {option}: there is no plan by which processes could share the tokens of a "
            f"{family.transformer_class}. `gradient_checkpointing` and smaller `max_tokens` also save memory."
        )
    heads = transformer["num_attention_heads"]
    if heads % degree:
        possible = [count for count in range(2, heads + 1) if heads % count == 0]
        raise BucketingError(
            f"{option} does not divide the {heads} attention heads of the model; choose one of {possible}."
        )


def check_sizes(degree: int, sizes: Counter[tuple[Size, int]], *, spec: LatentSpec) -> None:
    """Refuse stacks whose tokens the degree does not divide: diffusers' exchange takes equal parts in training.

    Args:
        degree (`int`): Processes that share a sample.
        sizes (`Counter`): Size and tokens of all samples.
        spec ([`LatentSpec`]): Strides and patch of the model.

    Raises:
        BucketingError: With the sizes that are not divided.
    """
    uneven = Counter({size: count for size, count in sizes.items() if size[1] % degree})
    if not uneven:
        return
    listed = ", ".join(
        f"{'x'.join(map(str, size))} ({tokens} tokens, {count} samples)"
        for (size, tokens), count in uneven.most_common(_SIZES_NAMED)
    )
    more = f" and {len(uneven) - _SIZES_NAMED} further sizes" if len(uneven) > _SIZES_NAMED else ""
    width = spec.spatial_stride * spec.patch[2] * degree
    raise BucketingError(
        f"`context_parallel_degree={degree}` does not divide the tokens of the sizes {listed}{more}. Train packs "
        f'(`batching="pack"`), whose strips hold samples of any size, or prepare the data set with --buckets of '
        f"widths that {width} divides."
    )


def prepare_in_groups(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any, *, degree: int
) -> tuple[Any, ...]:
    """Prepare a model, its optimizer and a loader, whose batches are shared among groups of `degree` processes.

    FSDP2 would look for its own dimensions in the mesh of the groups, so it gets none.
    """
    if degree == 1:
        return tuple(accelerator.prepare(model, optimizer, loader))
    prepared = accelerator.prepare(model, optimizer)
    form_groups(accelerator, degree=degree)
    return *prepared, accelerator.prepare(loader)


def form_groups(accelerator: Accelerator, *, degree: int) -> None:
    """Let neighbouring processes take the same batches, in groups of `degree`.

    accelerate and the samplers share batches among the data-parallel ranks of accelerate's device mesh. accelerate
    itself makes a mesh with context parallelism under FSDP2 alone, so it gets this one after it was made.
    """
    if degree > 1:
        shape = (accelerator.num_processes // degree, degree)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
        accelerator.state.device_mesh = mesh


class ContextParallel:
    """Context parallelism of a transformer, which can be taken off and put on again.

    Args:
        transformer (`torch.nn.Module`): Bare diffusers model, prepared by accelerate and with packing enabled if it
            runs packs.
        accelerator (`Accelerator`): Accelerator whose processes are grouped.
        degree (`int`): Processes of a group; with 1, nothing is changed.
        packed (`bool`): Whether packs are run.

    Raises:
        BucketingError: If the attention backend of diffusers does not support it.
    """

    def __init__(self, transformer: torch.nn.Module, accelerator: Accelerator, *, degree: int, packed: bool) -> None:
        self.transformer = transformer
        self.packed = packed
        self.plan: dict[str, Any] = {}
        self.config: Any = None
        if degree > 1:
            self.plan = _plan(transformer, packed=packed)
            self.config = _parallel_config(accelerator, degree)
            if not packed:
                _check_backend()
            self.apply()

    def apply(self) -> None:
        """Hook the transformer, and tell the processors of its attention modules."""
        from diffusers.hooks.context_parallel import apply_context_parallel

        self._tell(self.config)
        if self.plan:
            apply_context_parallel(self.transformer, self.config.context_parallel_config, self.plan)

    def remove(self) -> None:
        """Restore the transformer, which this process can then run alone."""
        from diffusers.hooks.context_parallel import remove_context_parallel

        self._tell(None)
        if self.plan:
            remove_context_parallel(self.transformer, self.plan)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the transformer inside a `with` block."""
        self.remove()
        try:
            yield
        finally:
            self.apply()

    def _tell(self, config: Any) -> None:
        for name, module in self.transformer.named_modules():
            # Tokens attend to text in diffusers' processors without an exchange; packed ones exchange here too.
            exchanges = self.packed or name.rpartition(".")[2] != _TEXT_ATTENTION
            if exchanges and hasattr(getattr(module, "processor", None), "_parallel_config"):
                module.processor._parallel_config = config


def _plan(transformer: Any, *, packed: bool) -> dict[str, Any]:
    """Return diffusers' plan for tokens, their positions and, where each token has one, their timesteps.

    It leaves out the text, which diffusers also splits in some models: the backward pass of its exchange takes as many
    keys as queries. In packs, the processors split the positions. Where FSDP checkpoints a block, its own forward
    is inside.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput

    given = transformer._cp_plan
    timesteps = {_TIMESTEPS: ContextParallelInput(split_dim=1, expected_dims=2)}  # some of diffusers' plans lack it
    plan: dict[str, Any] = {}
    for name, rules in {**given, "": {**given.get("", {}), **timesteps}}.items():
        if isinstance(rules, dict):
            rules = {
                key: rule
                for key, rule in rules.items()
                if key in ("hidden_states", _TIMESTEPS) or (isinstance(key, int) and not packed)
            }
        if rules:
            inside = isinstance(transformer.get_submodule(name), CheckpointWrapper)
            plan[f"{name}.{_CHECKPOINT_WRAPPED_MODULE}" if inside else name] = rules
    return plan


def _parallel_config(accelerator: Accelerator, degree: int) -> Any:
    """Return diffusers' configuration, set up as `enable_parallelism` does, which does not run on CPU processes."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    count = accelerator.num_processes
    mesh = init_device_mesh(
        accelerator.device.type, (count // degree, 1, degree), mesh_dim_names=("groups", "ring", "ulysses")
    )
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=degree, mesh=mesh))
    config.setup(accelerator.process_index, count, accelerator.device, mesh=mesh)
    return config


def _check_backend() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    backend, _ = Registry.get_active_backend()
    if not Registry._is_context_parallel_available(backend):
        raise BucketingError(
            f"diffusers' attention backend {backend.value!r} has no context parallelism; unset "
            f"DIFFUSERS_ATTN_BACKEND, or set it to one of {sorted(Registry._supports_context_parallel)}."
        )
