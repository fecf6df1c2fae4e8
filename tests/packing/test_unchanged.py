"""A pack runs diffusers' own code: forwards and hooks of anyone else are refused by name, usual wrappers are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from accelerate.utils import convert_outputs_to_fp32
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import HookRegistry, ModelHook as DiffusersHook
from diffusers.hooks.layerwise_casting import apply_layerwise_casting
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from peft import LoraConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward
from tests.models.cases import Samples, largest_difference, make_model

Change = Callable[[torch.nn.Module], object]


def mix(hidden_states: torch.Tensor) -> torch.Tensor:
    """Add the mean of all tokens of a pack to each of them."""
    return hidden_states + hidden_states.mean((0, 1), keepdim=True)


def mix_outputs(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return mix(output)


def mix_inputs(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return mix(args[0]), *args[1:]


def keep_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """Look at the inputs of a model, and change nothing."""


def mixing(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mixed_forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return mix(forward(hidden_states, *args, **kwargs))

    return mixed_forward


def replace_forward(module: torch.nn.Module) -> None:
    module.forward = mixing(module.forward)


def replace_forward_in_disguise(module: torch.nn.Module) -> None:
    module.forward = wraps(module.forward)(mixing(module.forward))


def replace_forward_under_a_known_wrapper(module: torch.nn.Module) -> None:
    replace_forward_in_disguise(module)
    module.forward = convert_outputs_to_fp32(module.forward)


class Mixing(ModelHook):
    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return mix(output)


class MixingOfDiffusers(DiffusersHook):
    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return mix(output)


class MixingBlock(WanTransformerBlock):
    def forward(self, *args: Any) -> torch.Tensor:
        return mix(super().forward(*args))


def replace_block(model: Any) -> None:
    block = copy.deepcopy(model.blocks[1])
    block.__class__ = MixingBlock
    model.blocks[1] = block


NAME = r"blocks\.1 \(diffusers\.\S+WanTransformerBlock\)"
HERE = r"tests\.packing\.test_unchanged\."
REFUSED: dict[str, tuple[Change, str]] = {
    "forward of the model": (
        replace_forward,
        rf"forward of this diffusers\.\S+WanTransformer3DModel was replaced by {HERE}mixed_forward",
    ),
    "forward of a block": (
        lambda model: replace_forward(model.blocks[1]),
        rf"forward of {NAME} was replaced by {HERE}mixed_forward",
    ),
    "forward of a block that looks like its own": (
        lambda model: replace_forward_in_disguise(model.blocks[1]),
        rf"forward of {NAME} was replaced by {HERE}mixed_forward",
    ),
    "forward of a block inside a wrapper": (
        lambda model: replace_forward_under_a_known_wrapper(model.blocks[1]),
        rf"forward of {NAME} was replaced by {HERE}mixed_forward",
    ),
    "forward of a feed-forward": (
        lambda model: replace_forward(model.blocks[0].ffn),
        rf"forward of blocks\.0\.ffn \(\S+FeedForward\) was replaced by {HERE}mixed_forward",
    ),
    "forward of another block": (
        lambda model: setattr(model.blocks[1], "forward", model.blocks[0].norm2.forward),
        rf"forward of {NAME} was replaced by (torch|diffusers)\.\S+forward",
    ),
    "hook of a block": (
        lambda model: model.blocks[1].register_forward_hook(mix_outputs),
        rf"{NAME} has the hook {HERE}mix_outputs",
    ),
    "hook before a block": (
        lambda model: model.blocks[1].register_forward_pre_hook(mix_inputs),
        rf"{NAME} has the hook {HERE}mix_inputs",
    ),
    "hook of an attention module": (
        lambda model: model.blocks[1].attn1.register_forward_hook(mix_outputs),
        rf"blocks\.1\.attn1 \(\S+WanAttention\) has the hook {HERE}mix_outputs",
    ),
    "hook before the model": (
        lambda model: model.register_forward_pre_hook(keep_inputs, with_kwargs=True),
        rf"this diffusers\.\S+WanTransformer3DModel has the hook {HERE}keep_inputs",
    ),
    "hook of torch without gradients": (
        lambda model: model.blocks[1].register_forward_hook(torch.no_grad()(mix_outputs)),
        rf"{NAME} has the hook {HERE}mix_outputs",
    ),
    "hook of accelerate": (
        lambda model: add_hook_to_module(model.blocks[1], SequentialHook(AlignDevicesHook("cpu"), Mixing())),
        rf"forward of {NAME} was replaced by the hook {HERE}Mixing",
    ),
    "hook of diffusers' registry": (
        lambda model: HookRegistry.check_if_exists_or_initialize(model.blocks[1]).register_hook(
            MixingOfDiffusers(), "mixing"
        ),
        rf"forward of {NAME} was replaced by the hook {HERE}MixingOfDiffusers",
    ),
    "cache of blocks": (
        lambda model: model.enable_cache(FirstBlockCacheConfig(threshold=0.1)),
        r"forward of blocks\.\d \S+ was replaced by the hook diffusers\.hooks\.first_block_cache\.FBC",
    ),
    "cache of attention": (
        lambda model: model.enable_cache(
            PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
            )
        ),
        r"attn\d \S+ was replaced by the hook diffusers\.hooks\.pyramid_attention_broadcast\.Pyramid",
    ),
    "another block": (replace_block, r"blocks\.1 was replaced or removed after enable_packing"),
    "one block more": (
        lambda model: model.blocks.append(copy.deepcopy(model.blocks[1])),
        r"blocks\.2 was added after enable_packing",
    ),
    "one block less": (lambda model: model.blocks.pop(1), r"blocks\.1 was replaced or removed after enable_packing"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
@torch.no_grad()
def test_code_that_may_mix_tokens_is_refused_by_name_before_the_next_pack(change: Change, message: str) -> None:
    model, samples = make_model(num_layers=2), Samples()
    batch = samples.pack(enable_packing(model, strip_length=4))
    packed_forward(model, batch)
    change(model)
    with pytest.raises(PackingError, match=message):
        packed_forward(model, batch)


@pytest.mark.parametrize("case", [name for name in REFUSED if "block more" not in name and "block less" not in name
                                  and name != "another block"])  # fmt: skip
def test_what_is_refused_later_is_refused_when_packing_is_enabled(case: str) -> None:
    change, _ = REFUSED[case]
    model = make_model(num_layers=2)
    change(model)
    with pytest.raises(PackingError, match=r"was replaced by|has the hook"):
        enable_packing(model, strip_length=4)
    assert not hasattr(model.blocks[0].attn1.processor, "backend"), "nothing was changed"


def test_a_class_of_diffusers_with_another_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = make_model(num_layers=2), Samples()
    batch = samples.pack(enable_packing(model, strip_length=4))
    stock = WanTransformerBlock.forward
    with monkeypatch.context() as patch:
        patch.setattr(WanTransformerBlock, "forward", lambda self, *args: mix(stock(self, *args)))
        with pytest.raises(PackingError, match=r"forward of blocks\.0 \S+ was replaced by tests\.\S+<lambda>"):
            packed_forward(model, batch)
    packed_forward(model, batch)


def test_a_global_hook_of_torch_is_refused() -> None:
    model, samples = make_model(num_layers=2), Samples()
    batch = samples.pack(enable_packing(model, strip_length=4))
    handle = register_module_forward_hook(mix_outputs)
    try:
        with pytest.raises(PackingError, match=rf"global hook {HERE}mix_outputs"):
            packed_forward(model, batch)
    finally:
        handle.remove()
    packed_forward(model, batch)


def add_lora(model: Any) -> None:
    model.add_adapter(LoraConfig(target_modules=["to_q", "net.2"]))


def use_mixed_precision(model: Any) -> None:
    """Replace the forward as `accelerator.prepare` does."""
    for wrap in (torch.autocast("cpu", torch.bfloat16, enabled=False), convert_outputs_to_fp32):
        model.forward = MethodType(wrap(model.forward.__func__), model)


def wrap_blocks(model: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


USUAL: dict[str, Change] = {
    "LoRA": add_lora,
    "gradient checkpointing": lambda model: model.enable_gradient_checkpointing(),
    "checkpointed blocks": wrap_blocks,
    "group offload": lambda model: model.enable_group_offload(
        torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    ),
    "group offload of leaves": lambda model: model.enable_group_offload(
        torch.device("cpu"), offload_type="leaf_level"
    ),
    "accelerate's hooks": lambda model: add_hook_to_module(
        model, AlignDevicesHook("cpu", io_same_device=True), append=True
    ),
    "accelerate's hooks on every part": lambda model: [
        add_hook_to_module(module, AlignDevicesHook("cpu")) for module in model.blocks.modules()
    ],
    "mixed precision": use_mixed_precision,
    "layerwise casting": lambda model: apply_layerwise_casting(
        model, storage_dtype=torch.float32, compute_dtype=torch.float32
    ),
    "compiled blocks": lambda model: [block.compile(backend="eager") for block in model.blocks],
    "compiled forward": compile_forward,
    "look inside a block": lambda model: model.blocks[1].ffn.register_forward_hook(lambda *_: None),
}


COMPILED = [("compiled blocks", True), ("compiled forward", False), ("compiled forward", True)]
"""Cases that run with `-m every`: blocks are compiled in the other order by a fast one."""


@pytest.mark.parametrize(
    ("change", "before"),
    [
        pytest.param(
            change,
            before,
            id=f"{name}-{'beforehand' if before else 'afterwards'}",
            marks=pytest.mark.every if (name, before) in COMPILED else (),
        )
        for name, change in USUAL.items()
        for before in (False, True)
    ],
)
def test_usual_wrappers_and_hooks_run_packs(change: Change, before: bool) -> None:
    model, samples = make_model(num_layers=2), Samples()
    with torch.no_grad():
        expected = samples.alone(model)
    if before:
        change(model)
    packing = enable_packing(model, strip_length=4)
    if not before:
        change(model)
    batch = samples.pack(packing)
    assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-5
    torch._dynamo.reset()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_and_a_copy_run_packs() -> None:
    model, samples = make_model(num_layers=1), Samples()
    expected = samples.alone(model)
    batch = samples.pack(enable_packing(model, strip_length=4))
    for runner in (torch.compile(model, backend="eager"), copy.deepcopy(model)):
        assert largest_difference(expected, batch.unpack(packed_forward(runner, batch))) <= 1e-5
    torch._dynamo.reset()


@torch.no_grad()
def test_a_copy_is_checked_by_itself() -> None:
    model, samples = make_model(num_layers=2), Samples()
    batch = samples.pack(enable_packing(model, strip_length=4))
    other = copy.deepcopy(model)
    replace_forward(other.blocks[1])
    packed_forward(model, batch)
    with pytest.raises(PackingError, match=r"forward of blocks\.1"):
        packed_forward(other, batch)
    disable_packing(model)
