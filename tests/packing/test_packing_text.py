"""Text in a pack: lengths, padding by the family's rule, empty captions, and captions that samples share."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import PackedLayout, packed_forward
from tests.models.cases import (
    FamilyCase,
    Samples,
    assert_same_gradients,
    each_family,
    gradients,
    largest_difference,
)


def padded_with(samples: Samples, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the texts as one tensor, padded, and their mask."""
    padded = torch.nn.utils.rnn.pad_sequence(samples.text, batch_first=True, padding_value=value)
    lengths = torch.tensor([len(text) for text in samples.text])
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


@each_family
@torch.no_grad()
def test_masked_text_is_what_the_pipeline_makes_of_it(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    rule = family_of(model).text.padding
    padded, mask = padded_with(samples, 0.5 if rule == "encoded_padding" else torch.nan)
    packing = enable_packing(model, strip_length=4)

    def run(text, text_mask=None) -> torch.Tensor:
        inputs = {"timesteps": samples.timesteps, "conditioning": samples.conditioning, "text_mask": text_mask}
        batch = packing.pack(samples.latents, text=text, **inputs)
        return torch.cat([output.flatten() for output in batch.unpack(packed_forward(model, batch))])

    output = run(padded, mask)
    zeros, _ = padded_with(samples, 0.0)
    as_pipeline = {"masked": samples.text, "keep_padding": zeros, "encoded_padding": padded}[rule]
    assert torch.equal(output, run(as_pipeline))
    if len(set(case.text_lengths)) > 1:
        other = zeros if rule == "masked" else samples.text
        assert not torch.allclose(output, run(other))


@each_family
def test_an_empty_caption_attends_to_no_text(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    if not case.empty_text or len(set(case.text_lengths)) == 1:
        pytest.skip("the model runs no empty text")
    samples.text[1] = samples.text[1][:0]
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    outputs = batch.unpack(packed_forward(model, batch))
    assert all(torch.isfinite(output).all() for output in outputs)
    sum(output.sum() for output in outputs).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@each_family
def test_a_shared_caption_is_stored_once_and_gets_the_gradients_of_all_its_samples(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    samples.text = [text.clone().requires_grad_() for text in samples.text]
    samples.text[3], samples.text[4] = samples.text[1], samples.text[0]
    leaves = [samples.text[sample] for sample in (0, 1, 2, 5)]
    expected = gradients(model, samples.loss_alone(model))
    expected.update({f"text {i}": text.grad for i, text in enumerate(leaves)})
    for text in leaves:
        text.grad = None
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing)
    assert len(batch.text) == batch.layout.num_stored_text_tokens == sum(map(len, leaves))
    assert batch.layout.caption_ids == (0, 1, 2, 1, 0, 3)
    actual = gradients(model, samples.loss_packed(model, packing))
    actual.update({f"text {i}": text.grad for i, text in enumerate(leaves)})
    assert_same_gradients(expected, actual, 1e-4, without_gradient=case.without_gradient)


@each_family
@torch.no_grad()
def test_one_caption_for_all_samples_may_be_expanded(case: FamilyCase) -> None:
    model, samples = case.model(), Samples(case=case)
    text = samples.text[0][None].expand(len(samples.latents), -1, -1)
    samples.text = [samples.text[0].clone() for _ in samples.latents]
    expected = samples.alone(model)
    packing = enable_packing(model, strip_length=4)
    batch = packing.pack(samples.latents, timesteps=samples.timesteps, text=text, conditioning=samples.conditioning)
    assert len(batch.text) == len(samples.text[0])
    assert largest_difference(expected, batch.unpack(packed_forward(model, batch))) <= 1e-5
    disable_packing(model)


def test_the_layout_says_where_each_sample_finds_its_stored_caption() -> None:
    sizes = {"grids": ((1, 1, 1),) * 3, "strip_length": 2}
    layout = PackedLayout(**sizes, text_lengths=(2, 1, 2), caption_ids=(0, 1, 0))
    assert layout.text_index.tolist() == [0, 1, 2, 0, 1]
    assert (layout.num_text_tokens, layout.num_stored_text_tokens) == (5, 3)
    assert layout.text_segment_ids.tolist() == [0, 0, 1, 2, 2]
    assert PackedLayout(**sizes, text_lengths=(2, 1, 2)).text_index is None
    with pytest.raises(PackingError, match="as many caption_ids"):
        PackedLayout(**sizes, text_lengths=(2, 1, 2), caption_ids=(0, 1))
    with pytest.raises(PackingError, match="text_padding without"):
        PackedLayout(**sizes, text_lengths=(2, 1, 2), caption_ids=(0, 1, 0), text_padding=3)
