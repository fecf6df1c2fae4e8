"""Context parallelism: processes that compute the same samples, each with a part of the tokens.

Ulysses (Jacobs et al., 2023), by diffusers' hooks and exchange: a process holds its part of the tokens everywhere but
in self-attention, for which a group exchanges tokens for heads. Text that attends in one sequence with the tokens is
split as they are; other text is attended to by each process's own tokens.

A process computes the gradients that come through its own tokens; those of a group add up. DDP divides their sum by
the number of all processes, and `global_mean` multiplies losses by it, so that gradients are right as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    CheckpointWrapper,
)
from torch.distributed.device_mesh import init_device_mesh

from ..buckets.sizes import LatentSpec, Size
from ..errors import BucketingError
from ..models.recipe import Recipe
from ..models.registry import family_of
from ..packing.context import keep_inputs_exact, keeps_inputs_exact
from ..packing.family import Family
from .blocks import blocks_of

_SELF_ATTENTION, _TEXT_ATTENTION = ("attn", "attn1"), "attn2"
"""Names of the attention modules of a block; those of other modalities, such as sound, have others."""

_TIMESTEPS = "timestep"
"""Argument of a forward that may hold a timestep for each token, as for references, which are clean."""

_TEXT, _TEXT_MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
"""Arguments of the forwards of models whose text attends in one sequence with the tokens."""

_IDS = ("img_ids", "txt_ids")
"""Arguments of a forward that number tokens and text; hooks replace them in packs."""

_SIZES_NAMED = 5


def check_audio(degree: int, recipe: type[Recipe], *, packed: bool) -> None:
    """Refuse a model whose audio processes cannot share.

    Raises:
        BucketingError: With what works instead.
    """
    option = f"`context_parallel_degree={degree}`"
    if not recipe.family.shares_audio:
        raise BucketingError(
            f"Omit {option}, or prepare the data without --with_audio: no processes share the audio of a "
            f"{recipe.family.transformer_class}."
        )
    if not packed:
        raise BucketingError(
            f'Train packs (`batching="pack"`) with {option} and audio: diffusers\' plan for a '
            f"{recipe.family.transformer_class} leaves audio whole, so that in stacks it would attend to a part of "
            "the video alone."
        )


def check_model(degree: int, recipe: type[Recipe], transformer: Mapping[str, Any], *, packed: bool) -> None:
    """Refuse a model whose tokens or heads processes cannot share, before its weights are loaded.

    Args:
        degree (`int`): Processes that share a sample.
        recipe (type of [`Recipe`][hf_bucketing.models.recipe.Recipe]): Recipe of the pipeline.
        transformer (mapping): Configuration of the transformer.
        packed (`bool`): Whether packs are run.

    Raises:
        BucketingError: With the reason and the nearest combination that works.
    """
    import diffusers

    option, family = f"`context_parallel_degree={degree}`", recipe.family
    if getattr(diffusers, family.transformer_class)._cp_plan is None:
        raise BucketingError(
            f"Omit {option}: there is no plan by which processes could share the tokens of a "
            f"{family.transformer_class}. `gradient_checkpointing` and smaller `max_tokens` also save memory."
        )
    if packed:
        return
    if family.text.rows == "sequence":
        raise BucketingError(
            f'Train packs (`batching="pack"`) with {option}: the stock {family.transformer_class} masks no part of '
            "its sequence of text and tokens, which could then be filled up to equal parts."
        )
    heads = transformer["num_attention_heads"]
    if heads % degree:
        possible = [count for count in range(2, heads + 1) if heads % count == 0]
        raise BucketingError(
            f"{option} does not divide the {heads} attention heads of the model; choose one of {possible}, or train "
            'packs (`batching="pack"`), which take any degree.'
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
        self._text_hook: Any = None
        if degree > 1:
            self.plan = _plan(transformer, packed=packed)
            self.config = _parallel_config(accelerator, degree)
            if not packed:
                _check_backend()
            self.apply()

    def apply(self) -> None:
        """Hook the transformer, and tell the processors of its attention modules."""
        from diffusers.hooks.context_parallel import apply_context_parallel

        if self.config is None:
            return
        context = self.config.context_parallel_config
        self._tell(self.config)
        apply_context_parallel(self.transformer, context, self.plan)
        if not self.packed:
            if not keeps_inputs_exact(self.transformer):
                keep_inputs_exact(self.transformer)  # whose hook undoes what hooks before it do
            fill_up = partial(fill_up_text, context.ulysses_degree)
            self._text_hook = self.transformer.register_forward_pre_hook(fill_up, with_kwargs=True)

    def remove(self) -> None:
        """Restore the transformer, which this process can then run alone."""
        from diffusers.hooks.context_parallel import remove_context_parallel

        if self.config is None:
            return
        self._tell(None)
        remove_context_parallel(self.transformer, self.plan)
        if self._text_hook is not None:
            self._text_hook.remove()

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Restore the transformer inside a `with` block."""
        self.remove()
        try:
            yield
        finally:
            self.apply()

    def _tell(self, config: Any) -> None:
        self.transformer._parallel_config = config  # packs are made of strips that their processes can share
        # Tokens attend to text in diffusers' processors without an exchange; packed ones exchange here too.
        exchanging: tuple[str, ...] = _SELF_ATTENTION
        if self.packed:
            exchanging = (*exchanging, _TEXT_ATTENTION, *family_of(self.transformer).shared_audio)
        for block in blocks_of(self.transformer):
            for name, module in block.named_modules():
                if name.rpartition(".")[2] in exchanging:
                    module.processor._parallel_config = config


def _plan(transformer: Any, *, packed: bool) -> dict[str, Any]:
    """Return diffusers' plan for tokens, their positions and, where each token has one, their timesteps.

    Text that tokens attend to apart is omitted, which diffusers also splits in some models: the backward pass of its
    exchange takes as many keys as queries. In packs, the processors split the positions. Where FSDP checkpoints a
    block, its own forward is inside.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput

    family = family_of(transformer)
    timesteps = {_TIMESTEPS: ContextParallelInput(split_dim=1, expected_dims=2)}  # some of diffusers' plans lack it
    plan: dict[str, Any] = {"": timesteps}
    of_audio = family.parallel_plan_of_audio(transformer) if packed else {}
    for pattern, rules in (*family.parallel_plan(transformer).items(), *of_audio.items()):
        if isinstance(rules, dict):
            rules = {key: rule for key, rule in rules.items() if not _is_omitted(key, family, packed=packed)}
        for name in _module_names(transformer, pattern) if rules else ():
            plan[name] = {**plan.get(name, {}), **rules} if isinstance(rules, dict) else rules
    return plan


def _is_omitted(key: str | int, family: Family, *, packed: bool) -> bool:
    if isinstance(key, int) or key in _IDS:
        return packed
    return key.startswith("encoder_") and not family.text.in_sequence


def _module_names(transformer: Any, pattern: str) -> list[str]:
    """Return the names of the modules that a name of diffusers' plan stands for, `*` for each member of a list."""
    parent, star, _ = pattern.partition(".*")
    names = [f"{parent}.{index}" for index in range(len(transformer.get_submodule(parent)))] if star else [pattern]
    wrapped = (isinstance(transformer.get_submodule(name), CheckpointWrapper) for name in names)
    return [
        f"{name}.{_CHECKPOINT_WRAPPED_MODULE}" if inside else name for name, inside in zip(names, wrapped, strict=True)
    ]


def fill_up_text(degree: int, transformer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Fill up the text of a stack with masked tokens to a multiple of the degree; a forward pre-hook.

    Raises:
        BucketingError: If the model masks no text.
    """
    text, family = kwargs[_TEXT], family_of(transformer)
    missing = -text.shape[1] % degree
    if not missing or not family.text.in_sequence:
        return args, kwargs
    if _TEXT_MASK not in kwargs:
        raise BucketingError(
            f"`context_parallel_degree={degree}` does not divide the {text.shape[1]} text tokens, and a "
            f"{type(transformer).__name__} masks none that could fill them up. Choose a `max_sequence_length` that it "
            'divides, or train packs (`batching="pack"`).'
        )
    mask = text.new_ones(text.shape[:2], dtype=torch.bool) if kwargs[_TEXT_MASK] is None else kwargs[_TEXT_MASK]
    filled = {_TEXT: F.pad(text, (0, 0, 0, missing)), _TEXT_MASK: F.pad(mask, (0, missing))}
    return args, {**kwargs, **filled}


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
