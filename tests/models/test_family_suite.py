"""Every family in float64: a pack against the same samples run one by one through the stock model."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import NamedTuple

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._pytree import tree_map_only

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import families, family_of
from hf_bucketing.packing import TokenDrop, packed_forward, packed_mse
from tests.models.cases import Samples, assert_same_gradients, gradients, in_dtype, packed_outputs
from tests.models.families import CASES, KIN, each_case, each_family, each_kin

OUTPUTS, GRADIENTS = 1e-11, 1e-6


class Alone(NamedTuple):
    """A model, its samples, and what these give when they run alone: outputs, mean loss and its gradients."""

    model: torch.nn.Module
    samples: Samples
    outputs: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


@cache
def alone(name: str) -> Alone:
    case = CASES[name]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    with torch.enable_grad():
        outputs = samples.alone(model)
        loss = samples.loss_of(outputs)
        values = gradients(model, loss)
    return Alone(model, samples, [output.detach() for output in outputs], float(loss.detach()), values)


def assert_equal(expected: list[torch.Tensor], outputs: list[torch.Tensor], *, limit: float = OUTPUTS) -> None:
    for output, other in zip(expected, outputs, strict=True):
        difference, scale = float((output - other).detach().abs().max()), float(output.abs().max())
        assert difference <= limit * max(1.0, scale)


def test_every_family_has_a_case() -> None:
    assert {type(case.model()).__name__ for case in CASES.values()} == set(families())


def test_kin_are_cases() -> None:
    assert {*KIN, *sum(KIN.values(), ())} <= CASES.keys()


@each_case
@torch.no_grad()
def test_the_family_runs_a_sample_as_the_pipeline_does(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    for sample, expected in enumerate(outputs):
        output = family_of(model).run_alone(
            model,
            samples.latents[sample],
            timestep=samples.timesteps[sample],
            text=samples.text[sample],
            conditioning={name: values[sample] for name, values in samples.conditioning.items()},
        )
        assert_equal([expected], [output])


@each_case
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_outputs_loss_and_gradients_are_those_of_the_samples_alone(name: str, checkpointing: bool) -> None:
    model, samples, outputs, loss, expected = alone(name)
    assert min(float(output.abs().max()) for output in outputs) > 0.01
    model = copy.deepcopy(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    batch = samples.pack(enable_packing(model, strip_length=4))
    prediction = packed_forward(model, batch)
    assert_equal(outputs, batch.unpack(prediction))
    packed_loss = packed_mse(prediction, batch.pack_like(samples.targets), batch.layout).mean()
    assert abs(float(packed_loss.detach()) - loss) <= 1e-6  # losses are computed in float32 or better
    packed_gradients = gradients(model, packed_loss)
    assert_same_gradients(expected, packed_gradients, GRADIENTS, without_gradient=CASES[name].without_gradient)
    unused = family_of(model).unused(model)  # DDP would wait for the gradients of others
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert {name for name in without if not any(part in name for part in unused)} == set()


@each_kin
def test_two_packs_in_flight_keep_their_own_layouts(name: str) -> None:
    case, model = CASES[name], copy.deepcopy(alone(name).model)
    both = [Samples(torch.float64, case=case, order=order) for order in ((0, 1), (5, 3))]
    expected = gradients(model, *[samples.loss_alone(model) for samples in both])
    model.enable_gradient_checkpointing()
    packing = enable_packing(model, strip_length=4)
    losses = [samples.loss_packed(model, packing) for samples in both]
    assert_same_gradients(expected, gradients(model, *losses), GRADIENTS, without_gradient=case.without_gradient)


@each_kin
@torch.no_grad()
def test_the_shortest_strips_and_longer_ones_than_any_sample(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    model = copy.deepcopy(model)
    for strip_length in (CASES[name].shortest_strip, min(64, family_of(model).longest_strip(model))):
        assert_equal(outputs, packed_outputs(model, samples, strip_length=strip_length))
    if CASES[name].shortest_strip > 1:
        with pytest.raises(PackingError, match=f"strip_length of at least {CASES[name].shortest_strip}"):
            enable_packing(model, strip_length=1)


@each_family
@torch.no_grad()
def test_a_nan_leaks_into_no_other_sample(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    model = copy.deepcopy(model)
    before = packed_outputs(model, samples)
    for victim in range(len(outputs)):
        poisoned = Samples(torch.float64, case=CASES[name])
        poisoned.latents[victim] = poisoned.latents[victim] * torch.nan
        poisoned.text[victim] = poisoned.text[victim] * torch.nan
        for sample, (output, other) in enumerate(zip(before, packed_outputs(model, poisoned), strict=True)):
            assert torch.equal(output, other) == (sample != victim)


@each_kin
@torch.no_grad()
def test_a_fixed_shape_changes_nothing(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    model = copy.deepcopy(model)
    packing = enable_packing(model, strip_length=4)
    layout = samples.pack(packing).layout
    slots = layout.text_slots + 1 if layout.text_slots else 0
    strips = layout.num_strips + 3
    fixed = {"pad_to": strips, "pad_text_to": slots * strips if slots else sum(layout.text_lengths) + 5}
    batch = samples.pack(packing, **fixed)
    assert (batch.layout.num_strips, len(batch.strips), batch.layout.text_slots) == (strips, strips, slots)
    assert slots or len(batch.text) == fixed["pad_text_to"]
    assert_equal(outputs, batch.unpack(packed_forward(model, batch)))


@each_kin
@torch.no_grad()
def test_dropped_tokens_are_missing_and_the_others_keep_their_positions(name: str) -> None:
    case, outputs = CASES[name], alone(name).outputs
    model = copy.deepcopy(alone(name).model).train()
    packing = enable_packing(model, strip_length=4)

    def run(*order: int) -> list[torch.Tensor]:
        samples = Samples(torch.float64, case=case, order=order)
        batch = samples.pack(packing, token_drop=TokenDrop(rate=0.4), seeds=order)
        return batch.unpack(packed_forward(model, batch))

    if name.startswith(("latte", "wan-animate")):
        with pytest.raises(PackingError, match="token_drop"):
            run(0, 1)
        return
    together = run(*range(len(outputs)))
    for sample, output in enumerate(together):
        assert_equal([output], run(sample))
    dropped = together[0].abs().sum(0) == 0
    assert 0 < dropped.float().mean() < 1
    assert float((together[0] - outputs[0])[:, ~dropped].abs().max()) > 1e-4


def in_float64(values: torch.Tensor) -> torch.Tensor:
    return values.double() if values.is_floating_point() else values


@each_family
@torch.no_grad()
def test_conditioning_can_be_drawn_to_try_a_model_out(name: str) -> None:
    model, samples = copy.deepcopy(alone(name).model), Samples(torch.float64, case=CASES[name], order=(0, 1))
    packing = enable_packing(model, strip_length=4)
    needed, grids = samples.conditioning, samples.pack(packing).layout.grids
    drawn = packing.family.draw_conditioning(model, grids)
    assert drawn.keys() == needed.keys()
    samples.conditioning = tree_map_only(torch.Tensor, in_float64, drawn)
    assert torch.isfinite(packed_forward(model, samples.pack(packing))).all()


@each_kin
@torch.no_grad()
def test_a_hundred_samples_in_one_pack(name: str) -> None:
    model, _, outputs, _, _ = alone(name)
    case, order = CASES[name], tuple(i % len(outputs) for i in range(100))
    samples = Samples(torch.float64, case=case, order=order)
    assert_equal([outputs[sample] for sample in order], packed_outputs(copy.deepcopy(model), samples, strip_length=16))


@each_kin
@torch.no_grad()
def test_a_copy_and_a_saved_model_run_the_same_packs(name: str, tmp_path: Path) -> None:
    model, samples, outputs, _, _ = alone(name)
    packed, cls, keys = copy.deepcopy(model), type(model), model.state_dict().keys()
    processors = [module.processor for module in packed.modules() if hasattr(module, "set_processor")]
    packing = enable_packing(packed, strip_length=4)
    assert type(packed) is cls
    assert cls.forward is getattr(diffusers, cls.__name__).forward
    assert not any("forward" in vars(module) for module in packed.modules())
    assert packed.state_dict().keys() == keys
    batch = samples.pack(packing)
    assert_equal(outputs, batch.unpack(packed_forward(copy.deepcopy(packed), batch)))
    packed.save_pretrained(tmp_path)
    disable_packing(packed)
    assert [module.processor for module in packed.modules() if hasattr(module, "set_processor")] == processors
    assert all(torch.equal(output, other) for output, other in zip(outputs, samples.alone(packed), strict=True))
    loaded = in_dtype(type(model).from_pretrained(tmp_path), torch.float64)
    assert {name: weight.shape for name, weight in loaded.state_dict().items()} == {
        name: weight.shape for name, weight in model.state_dict().items()
    }
    # Mochi rounds sums to float32 inside, here and there to a neighbour where another order of terms is near a tie.
    assert_equal(samples.alone(loaded), packed_outputs(loaded, samples, strip_length=8), limit=1e-6)


@each_kin
@torch.no_grad()
def test_adapters_take_part(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    lora = LoraConfig(r=2, target_modules=list(CASES[name].lora_targets), init_lora_weights=False)
    adapted = in_dtype(get_peft_model(copy.deepcopy(model), lora), torch.float64)
    expected = samples.alone(adapted.get_base_model())
    assert max(float((output - other).abs().max()) for output, other in zip(outputs, expected, strict=True)) > 1e-6
    assert_equal(expected, packed_outputs(adapted, samples))


@each_family
@torch.no_grad()
def test_texts_may_come_padded_with_a_mask(name: str) -> None:
    model, samples, outputs, _, _ = alone(name)
    rule = family_of(model).text.padding
    longest, count = max(map(len, samples.text)), len(samples.text)
    if rule != "masked":
        return  # what the model attends to as padding is part of each text already
    mask = torch.stack([torch.arange(longest + 2) < len(text) for text in samples.text]).long()
    padded = torch.full((count, longest + 2, samples.text[0].shape[1]), 7.0, dtype=torch.float64)
    for row, text in enumerate(samples.text):
        padded[row, : len(text)] = text
    model = copy.deepcopy(model)
    batch = samples.pack(enable_packing(model, strip_length=4), text=padded, text_mask=mask)
    assert_equal(outputs, batch.unpack(packed_forward(model, batch)))
