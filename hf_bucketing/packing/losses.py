"""Losses of packs: per-sample values over each sample's own tokens.

R strips, S strip_length, C channels of a latent; p_t, p_h, p_w are the sides of a patch.
"""

from __future__ import annotations

import torch

from ..devices import to_device
from ..errors import BucketingError
from ..losses.per_sample import weighted_mean
from ..losses.variational import GaussianPosterior, vlb_terms
from .layout import PackedLayout


def packed_mse(
    prediction: torch.Tensor, target: torch.Tensor, layout: PackedLayout, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean squared error of each sample of a pack, over its own tokens.

    Args:
        prediction (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): Strips from `packed_forward`; half precision is
            computed in float32.
        target (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): Strips from `PackedBatch.pack_like`.
        layout ([`PackedLayout`][hf_bucketing.packing.PackedLayout]): The pack's layout.
        weights (`torch.Tensor` of shape `(R, S)`, `(R, 1, p_t, p_h, S·p_w)` or the prediction's, *optional*): Weight
            of each token, or strips of weights or masks from `PackedBatch.pack_like`, at least 0; a sample's loss is
            its weighted mean, and 0 if all its weights are. By default, all weigh the same.

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes differ or do not fit the layout.
    """
    prediction, target = _real_tokens(prediction, target, layout=layout)
    return _mean_per_sample((prediction - target).square(), layout, weights)


def packed_vlb(
    prediction: torch.Tensor,
    layout: PackedLayout,
    *,
    noised: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    posterior: GaussianPosterior,
    rescale: bool = True,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each packed sample's term of the variational bound, in bits per dimension.

    See [`batch_vlb`][hf_bucketing.losses.batch_vlb].

    Args:
        prediction (`torch.Tensor` of shape `(R, 2·C, p_t, p_h, S·p_w)`): Strips from `packed_forward`.
        layout ([`PackedLayout`][hf_bucketing.packing.PackedLayout]): The pack's layout.
        noised (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): The pack's strips, `x_t`.
        clean (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): `x_0` from `PackedBatch.pack_like`.
        timesteps (`torch.Tensor` of shape `(n,)`): `int64`, one per sample.
        posterior ([`GaussianPosterior`][hf_bucketing.losses.GaussianPosterior]): The schedule, and what the model
            predicts.
        rescale (`bool`): Whether to multiply by `T ÷ 1000`.
        weights (`torch.Tensor`, *optional*): Weights of tokens, see [`packed_mse`].

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes do not fit each other or the layout.
    """
    (prediction,) = _real_tokens(prediction, layout=layout)
    noised, clean = _real_tokens(noised, clean, layout=layout)
    by_strip = to_device(timesteps, prediction.device)[layout.strip_segments]
    terms = vlb_terms(prediction, noised=noised, clean=clean, timesteps=by_strip, posterior=posterior, rescale=rescale)
    return _mean_per_sample(terms, layout, weights)


def _real_tokens(*strips: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    """Return strips of one shape in at least float32, zero where a strip holds padding or a reference."""
    count, length = layout.num_strips, layout.strip_length
    if wrong := [type(values).__name__ for values in strips if not isinstance(values, torch.Tensor)]:
        raise BucketingError(f"Expected strips, got {wrong[0]}; `pack.pack_like` makes strips of a list of tensors.")
    first = strips[0]
    if any(values.shape != first.shape for values in strips) or first.shape[0] != count or first.shape[-1] % length:
        raise BucketingError(
            f"Expected tensors of one shape ({count}, channels, p_t, p_h, {length}·p_w), got "
            f"{[tuple(values.shape) for values in strips]}."
        )
    dtype = torch.promote_types(first.dtype, torch.float32)
    real = (layout.own_ids >= 0).view(count, 1, 1, 1, length).repeat_interleave(first.shape[-1] // length, -1)
    return tuple(torch.where(real, values.to(dtype), 0) for values in strips)


def _mean_per_sample(values: torch.Tensor, layout: PackedLayout, weights: torch.Tensor | None) -> torch.Tensor:
    """Return each sample's mean of `(R, C, p_t, p_h, S·p_w)` over its own tokens, `(n,)`."""
    if weights is None:
        return _by_sample(values, layout)
    if weights.ndim == 2 and weights.shape == (layout.num_strips, layout.strip_length):
        by_column = weights.repeat_interleave(values.shape[4] // layout.strip_length, 1)
        weights = by_column[:, None, None, None].expand(-1, 1, *values.shape[2:])
    if (
        weights.ndim != 5
        or weights.shape[1] not in (1, values.shape[1])
        or weights[:, :1].shape != values[:, :1].shape
    ):
        raise BucketingError(
            f"Expected weights of shape ({layout.num_strips}, {layout.strip_length}), or strips from pack_like of "
            f"{tuple(values.shape)} or one channel of it, got {tuple(weights.shape)}."
        )
    (weights,) = _real_tokens(weights, layout=layout)
    return weighted_mean(_by_sample(values * weights, layout), _by_sample(weights, layout))


def _by_sample(values: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    tokens = values.unflatten(4, (layout.strip_length, -1)).mean((1, 2, 3, 5)).flatten()
    return torch.stack([tokens[start:stop].mean() for start, stop in layout.own_spans])
