"""Per-sample losses and the one global mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.losses import global_mean, masked_mse, masked_snr, min_snr_weights, reduction_weights
from hf_bucketing.packing import PackedLayout, packed_mse
from hf_bucketing.packing.strips import to_strips


def test_masked_mse_leaves_padding_out_even_when_it_is_nan() -> None:
    output, target = torch.randn(2, 3, 2, 5, 4).unbind(0)
    lengths = torch.tensor([4, 1, 3])
    expected = [(output[i, ..., :n] - target[i, ..., :n]).square().mean() for i, n in enumerate(lengths)]
    padding = torch.arange(4) >= lengths[:, None, None, None]
    output = torch.where(padding, torch.nan, output).requires_grad_()
    values = masked_mse(output, target, lengths)
    assert torch.allclose(values, torch.stack(expected))
    values.sum().backward()
    assert torch.isfinite(output.grad).all()
    assert (output.grad[padding.expand_as(output)] == 0).all()


def test_masked_snr_leaves_padding_out_even_when_it_is_nan() -> None:
    torch.manual_seed(0)  # a target near zero would let the small constant show
    output, target = torch.randn(2, 3, 2, 4).unbind(0)
    lengths = torch.tensor([4, 1, 3])
    pairs = [(output[i, :, :n], target[i, :, :n]) for i, n in enumerate(lengths)]
    ratios = [t.square().sum(-1) / (t - o).square().sum(-1) for o, t in pairs]
    expected = [(10 * torch.log10(ratio)).mean() for ratio in ratios]
    padding = torch.arange(4) >= lengths[:, None, None]
    output = torch.where(padding, torch.nan, output).requires_grad_()
    values = masked_snr(output, target, lengths)
    assert torch.allclose(values, torch.stack(expected), atol=1e-4)
    values.sum().backward()
    assert torch.isfinite(output.grad).all()
    assert (output.grad[padding.expand_as(output)] == 0).all()
    assert torch.isfinite(masked_snr(target, target)).all()
    assert torch.isfinite(masked_snr(target, torch.zeros_like(target))).all()


def test_masked_snr_is_taken_per_channel_and_averaged_in_decibels() -> None:
    """A loud channel does not hide a silent one: 40 dB and 0 dB make 20 dB, while their pooled powers make 37 dB."""
    target = torch.tensor([[[100.0, 100.0], [1.0, 1.0]]])
    output = target + torch.ones_like(target)
    assert float(masked_snr(output, target)) == pytest.approx(20.0, abs=1e-4)


@pytest.mark.parametrize(("prediction_type", "expected"), [
    ("epsilon", [1.0, 1.0, 0.5]), ("v_prediction", [0.0, 0.5, 5 / 11]), ("sample", [0.0, 1.0, 5.0]),
])  # fmt: skip
def test_min_snr_limits_the_weight_of_the_error_in_the_clean_sample(prediction_type: str, expected) -> None:
    weights = min_snr_weights(torch.tensor([0.0, 1.0, 10.0]), gamma=5.0, prediction_type=prediction_type)
    assert weights.tolist() == pytest.approx(expected)
    with pytest.raises(BucketingError):
        min_snr_weights(torch.ones(1), prediction_type="flow")


def test_reducing_by_token_weighs_samples_by_their_tokens() -> None:
    values, tokens = torch.tensor([1.0, 4.0]), torch.tensor([30, 10])
    assert float(global_mean(values, reduction_weights(tokens, "token"))) == pytest.approx(70 / 40)
    assert float(global_mean(values, reduction_weights(tokens, "sample"))) == pytest.approx(2.5)
    with pytest.raises(BucketingError, match="reduction"):
        reduction_weights(tokens, "mean")


def test_half_precision_is_computed_in_float32() -> None:
    output = torch.full((1, 4096), 300.0, dtype=torch.float16)
    assert masked_mse(output, torch.zeros_like(output)).tolist() == [90000.0]


def test_packed_mse_is_the_mean_over_each_samples_own_tokens() -> None:
    grids, patch = ((2, 2, 3), (1, 1, 1), (1, 4, 2)), (1, 2, 2)
    shapes = [(4, t, 2 * h, 2 * w) for t, h, w in grids]
    outputs, targets = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    layout = PackedLayout(grids=grids, text_lengths=(1, 1, 1), strip_length=5)
    strips = to_strips(outputs, patch, layout=layout)
    tokens = strips.unflatten(4, (5, -1)).movedim(4, 1).flatten(0, 1)
    tokens[layout.segment_ids < 0] = torch.nan
    poisoned = tokens.unflatten(0, (-1, 5)).movedim(1, 4).flatten(4, 5)
    poisoned.requires_grad_()
    values = packed_mse(poisoned, to_strips(targets, patch, layout=layout), layout)
    values.sum().backward()
    assert torch.isfinite(poisoned.grad).all()
    expected = [(output - target).square().mean() for output, target in zip(outputs, targets, strict=True)]
    assert torch.allclose(values, torch.stack(expected))


def test_shapes_that_differ_are_errors() -> None:
    layout = PackedLayout(grids=((1, 1, 1),), text_lengths=(1,), strip_length=2)
    for call in (
        lambda: masked_mse(torch.zeros(2, 3), torch.zeros(2, 4)),
        lambda: masked_mse(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1])),
        lambda: packed_mse(torch.zeros(2, 1, 1, 1, 2), torch.zeros(2, 1, 1, 1, 2), layout),
        lambda: packed_mse(torch.zeros(1, 1, 1, 1, 2), torch.zeros(1, 2, 1, 1, 2), layout),
        lambda: packed_mse(torch.zeros(1, 1, 1, 1, 2), [torch.zeros(1, 1, 1, 1)], layout),
        lambda: global_mean(torch.zeros(2), torch.zeros(3)),
        lambda: global_mean(torch.zeros(2, 1)),
    ):
        with pytest.raises(BucketingError, match="Expected"):
            call()


def fake_accelerator(num_processes: int, steps: int, weight_sums=None) -> SimpleNamespace:
    return SimpleNamespace(
        num_processes=num_processes,
        gradient_accumulation_steps=steps,
        reduce=lambda value, how: torch.tensor(float(weight_sums)),
    )


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("cut", [None, 5], ids=["even", "short last batch"])
def test_the_global_mean_does_not_depend_on_processes_accumulation_or_tails(shape, cut) -> None:
    """DDP averages over processes and accelerate over micro-batches, as simulated here."""
    processes, steps = shape
    values = torch.randn(16, dtype=torch.float64)[:cut]
    parameter = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (parameter * values).mean().backward()
    expected, parameter.grad = parameter.grad, None
    for share in values.tensor_split(processes):
        for micro_batch in share.tensor_split(steps):
            loss = global_mean(
                parameter * micro_batch, accelerator=fake_accelerator(processes, steps), total=len(values)
            )
            (loss / steps / processes).backward()
    assert torch.allclose(parameter.grad, expected, atol=1e-12)


def test_weights_count_in_numerator_and_denominator() -> None:
    values, weights = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 0.0, 3.0])
    assert float(global_mean(values, weights)) == pytest.approx(13 / 4)
    assert float(global_mean(values)) == pytest.approx(7 / 3)
    shared = fake_accelerator(2, 1, weight_sums=10)
    assert float(global_mean(values, weights, accelerator=shared)) == pytest.approx(13 * 2 / 10)
