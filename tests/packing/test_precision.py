"""Half precision: autocast, models in it, and timesteps that stay exact up to their embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.batch import Rows
from tests.models.cases import (
    COSMOS_ROTARY_ONLY,
    FLUX,
    LTX,
    PIXART_CONDITIONED,
    TIMESTEPS,
    FamilyCase,
    Samples,
    gradients,
    largest_difference,
    make_model,
)
from tests.models.families import CASES, each_family

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_errs_no_more_than_running_the_samples_alone(dtype: torch.dtype, checkpointing: bool) -> None:
    model, samples = make_model(), Samples()
    if checkpointing:
        model.enable_gradient_checkpointing()
    exact_outputs, exact = samples.alone(model), gradients(model, samples.loss_alone(model))
    with torch.autocast("cpu", dtype):
        outputs, loss = samples.alone(model), samples.loss_alone(model)
    alone = gradients(model, loss)
    packing = enable_packing(model, strip_length=4)
    with torch.autocast("cpu", dtype):
        batch = samples.pack(packing)
        packed, loss = batch.unpack(packed_forward(model, batch)), samples.loss_packed(model, packing)
    by_pack = gradients(model, loss)
    assert 0 < largest_difference(exact_outputs, packed) <= 2 * largest_difference(exact_outputs, outputs)
    for name, gradient in exact.items():
        assert (by_pack[name] - gradient).norm() <= 2 * (alone[name] - gradient).norm() + 1e-3 * gradient.norm(), name


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_model_in_half_precision_errs_no_more_than_running_the_samples_alone(dtype: torch.dtype) -> None:
    exact = Samples().alone(make_model())
    model, samples = make_model(dtype), Samples(dtype)
    alone = [output.float() for output in samples.alone(model)]
    batch = samples.pack(enable_packing(model, strip_length=4))
    packed = [output.float() for output in batch.unpack(packed_forward(model, batch))]
    assert 0 < largest_difference(exact, packed) <= 2 * largest_difference(exact, alone)


class CastsInputs(torch.nn.parallel.DataParallel):
    """Cast all inputs to half precision, as FSDP's mixed precision and DeepSpeed do."""

    def forward(self, **kwargs):
        def halve(value: torch.Tensor) -> torch.Tensor:
            return value.bfloat16() if value.is_floating_point() else value

        return self.module(**tree_map_only(torch.Tensor, halve, kwargs))


def seen_timesteps(model, run) -> torch.Tensor:
    seen = []
    handle = model.condition_embedder.timesteps_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run()
    handle.remove()
    return seen[0]


def test_timesteps_reach_their_embedding_in_float32_below_wrappers_that_cast() -> None:
    model, samples = make_model(torch.bfloat16), Samples(torch.bfloat16)
    samples.timesteps = torch.tensor([999.0, 500.25, 900.5, 0.123, 998.0, 333.3])
    assert not torch.equal(samples.timesteps.bfloat16().float(), samples.timesteps)
    batch = samples.pack(enable_packing(model, strip_length=4))
    wrapped = CastsInputs(model)
    seen = seen_timesteps(model, lambda: packed_forward(wrapped, batch))
    assert torch.equal(seen, samples.timesteps[batch.layout.strip_segments])
    assert torch.equal(packed_forward(wrapped, batch), packed_forward(model, batch))
    disable_packing(model)
    plain = seen_timesteps(
        model, lambda: wrapped(hidden_states=samples.latents[0][None], timestep=samples.timesteps[:1],
                               encoder_hidden_states=samples.text[0][None])
    )  # fmt: skip
    assert plain.dtype == torch.bfloat16, "without packing, inputs are as the wrapper leaves them"


@each_family
@torch.no_grad()
def test_every_family_runs_below_wrappers_that_cast(name: str) -> None:
    """Its `cast_inputs` name what its layers take in their own dtype; all other inputs come in float32."""
    model, samples = CASES[name].model(torch.bfloat16), Samples(case=CASES[name])
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert torch.isfinite(packed_forward(CastsInputs(model), batch)).all()


def test_whole_timesteps_become_float32_and_half_ones_are_refused() -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)
    samples.timesteps = TIMESTEPS.round().long()
    batch = samples.pack(packing)
    assert batch.timesteps.dtype == torch.float32
    assert torch.equal(batch.timesteps, samples.timesteps.float())
    samples.timesteps = TIMESTEPS.bfloat16()
    with pytest.raises(PackingError, match=r"at least float32, got torch\.bfloat16"):
        samples.pack(packing)


@contextmanager
def sharded(model: torch.nn.Module) -> Iterator[None]:
    """Shard a model over one process by FSDP2, which casts its inputs and parameters to bfloat16."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        yield
    finally:
        distributed.destroy_process_group()


EXACT = {
    "ltx": (LTX, ("rope", "time_proj")),
    "cosmos": (COSMOS_ROTARY_ONLY, ("rope", "time_proj")),
    "flux": (replace(FLUX, sizes=((1, 2, 600), (1, 4, 2))), ("pos_embed",)),  # more columns than bfloat16 counts
    "pixart": (PIXART_CONDITIONED, ("time_proj", "additional_condition_proj")),
}
"""Families, and which of their modules read positions and schedules; Flux itself rounds timesteps."""


@pytest.mark.parametrize("mode", ["bucket", "pack"])
@pytest.mark.parametrize(("case", "names"), EXACT.values(), ids=EXACT.keys())
def test_positions_and_schedules_are_exact_under_fsdp_that_casts(
    case: FamilyCase, names: tuple[str, ...], mode: str
) -> None:
    model, samples, seen = case.model(), Samples(case=case), []
    samples.timesteps = samples.timesteps.sort(descending=True).values  # 999, which bfloat16 rounds, comes first
    uneven = {"fps": 0.976, "resolution": 0.3}  # of a size that bfloat16 rounds too
    samples.conditioning = {name: values + uneven.get(name, 0) for name, values in samples.conditioning.items()}
    if mode == "pack":
        run = partial(packed_forward, model, samples.pack(enable_packing(model, strip_length=8)))
    else:
        family = family_of(model)
        rows = Rows(
            latents=samples.latents[0][None],
            timesteps=samples.timesteps[:1],
            text=samples.text[0][None],
            patch=family.patch(model.config),
            conditioning={name: values[:1] for name, values in samples.conditioning.items()},
        )
        run = partial(family.run, model, rows, wrapped=model)
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in names:
            part.register_forward_hook(lambda _, args, output: seen.extend(tree_leaves(output)))
    run()
    exact = [seen.pop(0) for _ in range(len(seen))]
    with sharded(model):
        run()
    assert len(seen) == len(exact) >= len(names)
    assert largest_difference(exact, [output.float() for output in seen]) <= 2**-7, (
        "no more than the outputs' own rounding"
    )
