"""What each of two processes runs in test_context_parallel.py: models with and without context parallelism.

Run by `accelerate launch … -m tests.placement.context_parallel_worker FOLDER`. For each case the first process writes
the outputs and the gradients of both to FOLDER.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig

from hf_bucketing.losses import global_mean
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import Audio, TokenDrop, packed_forward, packed_mse
from hf_bucketing.packing.batch import Rows
from hf_bucketing.packing.family import freeze_unused
from hf_bucketing.packing.forward import packed_forward_with_audio
from hf_bucketing.placement.blocks import blocks_of
from hf_bucketing.placement.context_parallel import ContextParallel
from hf_bucketing.placement.offload import offload_blocks
from tests.models.cases import FamilyCase, Samples

PACKED, CHECKPOINTED = {"packed": True}, {"checkpointing": True}
STACKED = (
    *("wan", "ltx", "ltx2", "ltx2 interleaved patches", "ltx2.3", "chronoedit", "flux", "flux.2", "qwen-image"),
    "qwen-image clean condition",
)
"""Cases of the families whose stock class has a plan for context parallelism, but for one that runs packs alone."""

THREE_HEADS: dict[str, dict[str, int]] = {
    **{name: {"num_attention_heads": 3} for name in ("wan", "flux", "flux.2", "qwen-image", "minimax-h3")},
    "ltx": {"num_attention_heads": 3, "cross_attention_dim": 24},
    "ltx2": {
        "num_attention_heads": 3,
        "cross_attention_dim": 48,
        "audio_num_attention_heads": 3,
        "audio_cross_attention_dim": 24,
    },
    "chronoedit": {"num_attention_heads": 3, "added_kv_proj_dim": 36},
}
"""Configurations of as many heads as two processes cannot share alike."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in STACKED},
    **{f"{name} pack": (name, PACKED) for name in (*STACKED, "wan image", "minimax-h3")},
    **{f"{name} pack checkpointing": (name, PACKED | CHECKPOINTED) for name in ("wan", "qwen-image", "minimax-h3")},
    **{f"{name} checkpointing": (name, CHECKPOINTED) for name in ("wan", "ltx", "flux")},
    **{f"{name} pack of 3 heads": (name, PACKED | {"config": config}) for name, config in THREE_HEADS.items()},
    **{f"{name} pack audio": (name, PACKED | {"audio": True}) for name in ("ltx2", "ltx2.3")},
    "ltx2 pack audio checkpointing": ("ltx2", PACKED | CHECKPOINTED | {"audio": True}),
    "ltx2 pack audio of 3 heads": ("ltx2", PACKED | {"audio": True, "config": THREE_HEADS["ltx2"]}),
    "wan lora": ("wan", {"lora": True}),
    "wan pack lora": ("wan", PACKED | {"lora": True}),
    "wan pack offload": ("wan", PACKED | CHECKPOINTED | {"lora": True, "offload": True}),
    "wan pack token drop": ("wan", PACKED | {"token_drop": TokenDrop(rate=0.5)}),
}


def main() -> None:
    from tests.models.families import CASES as FAMILIES

    (folder,) = map(Path, sys.argv[1:])
    accelerator = Accelerator()
    for name, (family, options) in CASES.items():
        result = compare(FAMILIES[family], accelerator, **options)
        if accelerator.is_main_process:
            torch.save(result, folder / f"{name}.pt")
    accelerator.wait_for_everyone()
    sys.stderr.flush()
    os._exit(0)  # taking gloo's threads down can deadlock (seen with torch 2.13), and there is nothing to take down


def compare(
    case: FamilyCase,
    accelerator: Accelerator,
    *,
    packed: bool = False,
    checkpointing: bool = False,
    lora: bool = False,
    offload: bool = False,
    token_drop: TokenDrop | None = None,
    audio: bool = False,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    model = case.model(torch.float64, **config)
    freeze_unused(family_of(model), model, audio=audio)
    if lora:
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, behind which half of the gradients would not show
                parameter.data = 0.1 * torch.randn_like(parameter)
    if checkpointing:
        model.enable_gradient_checkpointing()
    forward = packs_with_audio(case) if audio else packs(case, token_drop) if packed else stacks(case)
    alone = run(forward, copy.deepcopy(model), None, packed)
    if offload:
        offload_blocks(model, 1, device=accelerator.device)
    together = run(forward, model, accelerator, packed)
    return {"alone": alone, "together": together}


Forward = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]


def stacks(case: FamilyCase) -> Forward:
    """Return a forward of samples of one size, with text of odd and of different lengths where the model masks it."""
    alike = tuple(sample for sample, size in enumerate(case.sizes) if size == case.sizes[0])
    samples = Samples(torch.float64, case=case, order=alike)

    def forward(model: Any, wrapped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        family = family_of(model)
        text, mask = torch.stack(samples.text), None
        if family.text.padding == "masked":
            mask = torch.ones(text.shape[:2])
            mask[1:, -3:] = 0
        else:
            text = text[:, : text.shape[1] // 2 * 2]
        rows = Rows(
            latents=torch.stack(samples.latents),
            timesteps=samples.timesteps,
            text=text,
            patch=family.patch(model.config),
            text_mask=mask,
            conditioning=samples.conditioning,
        )
        output = family.run(model, rows, wrapped=wrapped)
        return output, (output - torch.stack(samples.targets)).square().mean((1, 2, 3, 4))

    return forward


def packs(case: FamilyCase, token_drop: TokenDrop | None) -> Forward:
    """Return a forward of a pack of all samples."""
    samples = Samples(torch.float64, case=case)

    def forward(model: Any, wrapped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        packing = model._hf_bucketing_packing.packing
        batch = samples.pack(packing, token_drop=token_drop, seeds=range(len(samples.latents)))
        output = packed_forward(wrapped, batch)
        return output, packed_mse(output, batch.pack_like(samples.targets), batch.layout)

    return forward


def packs_with_audio(case: FamilyCase) -> Forward:
    """Return a forward of a pack of all samples, of which the second has no audio; lengths divide by no degree."""
    samples = Samples(torch.float64, case=case)
    count, generator = len(samples.latents), torch.Generator().manual_seed(5)
    lengths = [0 if sample == 1 else 3 + 2 * sample for sample in range(count)]

    def forward(model: Any, wrapped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        family, config, packing = family_of(model), model.config, model._hf_bucketing_packing.packing
        generator.manual_seed(5)
        sounds = [torch.randn(length, config.audio_in_channels, generator=generator).double() for length in lengths]
        text_dim = family.audio_text_dim(model)
        levels = 1000 * torch.rand(count, generator=generator)
        text = [torch.randn(len(words), text_dim, generator=generator).double() for words in samples.text]
        audio = Audio(latents=sounds, timesteps=levels, video_timesteps=samples.timesteps.float(), text=text)
        batch = samples.pack(packing, audio=audio)
        output, heard = packed_forward_with_audio(wrapped, batch)
        losses = packed_mse(output, batch.pack_like(samples.targets), batch.layout)
        of_audio = [sound.square().sum() / max(1, sound.numel()) for sound in heard]
        return torch.cat([output.flatten(), *map(torch.flatten, heard)]), losses + torch.stack(of_audio)

    return forward


def run(forward: Forward, model: Any, accelerator: Accelerator | None, packed: bool) -> dict[str, Any]:
    """Return outputs and gradients; with an accelerator, those of two processes that share the samples."""
    if packed:
        enable_packing(model, strip_length=4)
    model.train()
    wrapped = model
    if accelerator is not None:
        wrapped = accelerator.prepare(model)
        parallel = ContextParallel(model, accelerator, degree=2, packed=packed)
    tokens: list[int] = []
    block = blocks_of(model)[0]
    attention = block.attn1 if hasattr(block, "attn1") else block.attn
    attention.to_q.register_forward_pre_hook(lambda module, args: tokens.append(args[0].shape[:-1].numel()))
    output, values = forward(model, wrapped)
    if accelerator is None:
        values.mean().backward()
    else:
        accelerator.backward(global_mean(values, accelerator=accelerator, total=float(len(values))))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    result = {
        "output": output.detach(),
        "gradients": {name: parameter.grad.clone() for name, parameter in trained.items()},
        "tokens": tokens[0],
    }
    if accelerator is not None:
        with parallel.removed(), torch.no_grad():
            result["removed"] = forward(model, model)[0] if accelerator.is_main_process else None
        with torch.no_grad():
            result["again"] = forward(model, model)[0]
    return result


if __name__ == "__main__":
    main()
