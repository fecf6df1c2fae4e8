"""Backends, fixed shapes and token drop with every family that attends to its text apart."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import TokenDrop, packed_forward
from tests.models.joint_cases import JOINT_CASES
from tests.packing.packing_cases import CASES, FamilyCase, Samples, largest_difference

APART = {name: case for name, case in CASES.items() if name not in JOINT_CASES}
each_family = pytest.mark.parametrize("case", APART.values(), ids=APART.keys())


def shared(samples: Samples) -> Samples:
    """Give two samples one caption."""
    samples.text[4] = samples.text[0]
    return samples


@each_family
@torch.no_grad()
def test_the_dense_backend_computes_the_same(case: FamilyCase) -> None:
    model, samples = case.model(), shared(Samples(case=case))
    expected = samples.alone(model)
    batch = samples.pack(enable_packing(model, strip_length=4, backend="dense"))
    assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-5


@each_family
@torch.no_grad()
def test_padding_to_a_fixed_shape_changes_nothing(case: FamilyCase) -> None:
    model, samples = case.model(), shared(Samples(case=case))
    expected = samples.alone(model)
    packing = enable_packing(model, strip_length=4)
    own = samples.pack(packing).layout
    fixed = {"pad_to": own.num_rows + 3, "pad_text_to": sum(case.text_lengths) + 5}
    batch = packing.pack(
        samples.latents,
        timesteps=samples.timesteps,
        text=samples.text,
        conditioning=samples.conditioning,
        **fixed,
    )
    assert (len(batch.strips), len(batch.text)) == tuple(fixed.values())
    assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-5


@each_family
@torch.no_grad()
def test_dropped_tokens_are_missing_and_the_others_keep_their_places(case: FamilyCase) -> None:
    model, samples = case.model().train(), Samples(case=case)
    packing = enable_packing(model, strip_length=4)

    def run(*order: int) -> list[torch.Tensor]:
        some = Samples(case=case, order=order)
        batch = packing.pack(
            some.latents,
            timesteps=some.timesteps,
            text=some.text,
            conditioning=some.conditioning,
            token_drop=TokenDrop(rate=0.4, mode="random"),
            seeds=order,
        )
        return batch.unpack(packed_forward(model, batch))

    if not packing.family.drops_tokens:
        with pytest.raises(PackingError, match="token_drop"):
            run(0, 1)
        return
    together = run(*range(len(samples.latents)))
    for sample, output in enumerate(together):
        assert largest_difference([output], run(sample)) <= 1e-5
    whole = samples.pack(packing)
    full = whole.unpack(packed_forward(model, whole))
    dropped = together[0].abs().sum(0) == 0
    assert 0 < dropped.float().mean() < 1
    assert largest_difference([together[0][:, ~dropped]], [full[0][:, ~dropped]]) > 1e-4
    disable_packing(model)
