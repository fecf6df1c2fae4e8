"""Two threads that run packs through one model, with gradient checkpointing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward, packed_mse
from tests.models.cases import CASES, Samples

REPEATS = 50


def checkpoint_blocks(model: torch.nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.blocks))


def enable_checkpointing(model: torch.nn.Module) -> None:
    model.enable_gradient_checkpointing()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "checkpoint", "order"),
    [("wan", enable_checkpointing, "after"), ("wan", checkpoint_blocks, "before"),
     ("cosmos", enable_checkpointing, "before")],
    ids=["wan", "wan, blocks wrapped", "cosmos"],
)  # fmt: skip
def test_two_threads_have_the_outputs_and_gradients_of_one(name: str, checkpoint, order: str) -> None:
    case = CASES[name]
    model = case.model(num_layers=1)
    if order == "before":
        checkpoint(model)
    packing = enable_packing(model, strip_length=4)
    if order == "after":
        checkpoint(model)
    cases = [Samples(case=case, order=(0,)), Samples(case=case, seed=2, order=(3, 1))]
    batches = [samples.pack(packing) for samples in cases]
    together = Barrier(2)

    def run(number: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        batch = batches[number]
        output = packed_forward(model, batch)
        loss = packed_mse(output, batch.pack_like(cases[number].targets), batch.layout).mean()
        return output.detach(), torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    def repeat(number: int) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        together.wait()
        return [run(number) for _ in range(REPEATS)]

    expected = [run(0), run(1)]
    with ThreadPoolExecutor(2) as pool:
        for (output, slopes), results in zip(expected, pool.map(repeat, (0, 1)), strict=True):
            for other, others in results:
                assert torch.equal(output, other)
                assert all(torch.equal(*pair) for pair in zip(slopes, others, strict=True))


def test_the_checkpoint_functions_come_back_when_packing_is_disabled() -> None:
    model = CASES["wan"].model()
    model.enable_gradient_checkpointing()
    own, samples = model._gradient_checkpointing_func, Samples()
    batch = samples.pack(enable_packing(model, strip_length=4))
    for _ in range(2):
        packed_forward(model, batch)
    assert model._gradient_checkpointing_func is not own
    disable_packing(model)
    assert model._gradient_checkpointing_func is own
