"""What each of two processes runs in test_context_parallel.py: models with and without context parallelism.

Run by `accelerate launch … -m tests.placement.context_parallel_worker FOLDER`. For each case the first process writes
the outputs and the gradients of both to FOLDER.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig

from hf_bucketing.losses import global_mean
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import TokenDrop, packed_forward, packed_mse
from hf_bucketing.packing.batch import Rows
from hf_bucketing.placement.context_parallel import ContextParallel
from hf_bucketing.placement.offload import offload_blocks
from tests.models.cases import CROSS, FamilyCase, Samples

ALIKE = (0, 4)
"""Samples of one size."""

FIRST = {
    "WanTransformer3DModel": "blocks.0.attn1.to_q",
    "LTXVideoTransformer3DModel": "transformer_blocks.0.attn1.to_q",
}
"""A layer whose input shows how many tokens a process has."""

CASES = {
    "wan": {},
    "wan checkpointing": {"checkpointing": True},
    "wan lora": {"lora": True},
    "wan pack": {"packed": True},
    "wan pack checkpointing": {"packed": True, "checkpointing": True},
    "wan pack lora": {"packed": True, "lora": True},
    "wan pack offload": {"packed": True, "lora": True, "checkpointing": True, "offload": True},
    "wan pack token drop": {"packed": True, "token_drop": TokenDrop(rate=0.5)},
    "wan image pack": {"packed": True},
    "ltx": {},
    "ltx checkpointing": {"checkpointing": True},
    "ltx pack": {"packed": True},
    "ltx pack checkpointing": {"packed": True, "checkpointing": True},
}


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    accelerator = Accelerator()
    for name, options in CASES.items():
        family = name if name in CROSS else " ".join(name.split()[: 2 if "image" in name else 1])
        result = compare(CROSS[family], accelerator, **options)
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
) -> dict[str, Any]:
    model = case.model()
    if lora:
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros at first, behind which half of the gradients would not show
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    if checkpointing:
        model.enable_gradient_checkpointing()
    forward = packs(case, token_drop) if packed else stacks(case)
    alone = run(forward, copy.deepcopy(model), None, packed)
    if offload:
        offload_blocks(model, 1, device=accelerator.device)
    together = run(forward, model, accelerator, packed)
    return {"alone": alone, "together": together}


Forward = Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]


def stacks(case: FamilyCase) -> Forward:
    """Return a forward of two samples of one size, with text of different lengths where the model masks it."""
    samples = Samples(case=case, order=ALIKE)

    def forward(model: Any, wrapped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        family = family_of(model)
        masked = family.text.padding == "masked"
        mask = torch.tensor([[1.0] * 7, [1.0] * 4 + [0.0] * 3]) if masked else None
        rows = Rows(
            latents=torch.stack(samples.latents),
            timesteps=samples.timesteps,
            text=torch.stack(samples.text),
            patch=family.patch(model.config),
            text_mask=mask,
            conditioning=samples.conditioning,
        )
        output = family.run(model, rows, wrapped=wrapped)
        return output, (output - torch.stack(samples.targets)).square().mean((1, 2, 3, 4))

    return forward


def packs(case: FamilyCase, token_drop: TokenDrop | None) -> Forward:
    """Return a forward of a pack of all samples."""
    samples = Samples(case=case)

    def forward(model: Any, wrapped: Any) -> tuple[torch.Tensor, torch.Tensor]:
        packing = model._hf_bucketing_packing.packing
        batch = samples.pack(packing, token_drop=token_drop, seeds=range(len(samples.latents)))
        output = packed_forward(wrapped, batch)
        return output, packed_mse(output, batch.pack_like(samples.targets), batch.layout)

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
    model.get_submodule(FIRST[type(model).__name__]).register_forward_pre_hook(
        lambda module, args: tokens.append(args[0].shape[1])
    )
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
