"""Losses of packs: per-sample values over each sample's own tokens.

R strips, S strip_length, C channels of a latent; p_t, p_h, p_w are the sides of a patch.
"""

from __future__ import annotations

import torch

from ..errors import BucketingError
from ..losses.variational import GaussianPosterior, vlb_terms
from .layout import PackedLayout


def packed_mse(prediction: torch.Tensor, target: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return the mean squared error of each sample of a pack, over its own tokens.

    Args:
        prediction (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): Strips from `packed_forward`; half precision is
            computed in float32.
        target (`torch.Tensor` of shape `(R, C, p_t, p_h, S·p_w)`): Strips from `PackedBatch.pack_like`.
        layout ([`PackedLayout`][hf_bucketing.packing.PackedLayout]): The pack's layout.

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes differ or do not fit the layout.
    """
    prediction, target = _real_tokens(prediction, target, layout=layout)
    return _mean_per_sample((prediction - target).square(), layout)


def packed_vlb(
    prediction: torch.Tensor,
    layout: PackedLayout,
    *,
    noised: torch.Tensor,
    clean: torch.Tensor,
    timesteps: torch.Tensor,
    posterior: GaussianPosterior,
    rescale: bool = True,
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

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes do not fit each other or the layout.
    """
    (prediction,) = _real_tokens(prediction, layout=layout)
    noised, clean = _real_tokens(noised, clean, layout=layout)
    by_strip = timesteps.to(prediction.device)[layout.strip_segments]
    terms = vlb_terms(prediction, noised=noised, clean=clean, timesteps=by_strip, posterior=posterior, rescale=rescale)
    return _mean_per_sample(terms, layout)


def _real_tokens(*strips: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    """Return strips of one shape in at least float32, zero where a strip holds padding."""
    count, length = layout.num_strips, layout.strip_length
    first = strips[0]
    if any(one.shape != first.shape for one in strips) or first.shape[0] != count or first.shape[-1] % length:
        raise BucketingError(
            f"Expected tensors of one shape ({count}, channels, p_t, p_h, {length}·p_w), got "
            f"{[tuple(one.shape) for one in strips]}."
        )
    dtype = torch.promote_types(first.dtype, torch.float32)
    real = (layout.segment_ids >= 0).view(count, 1, 1, 1, length).repeat_interleave(first.shape[-1] // length, -1)
    return tuple(torch.where(real, one.to(dtype), 0) for one in strips)


def _mean_per_sample(values: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return each sample's mean of `(R, C, p_t, p_h, S·p_w)` over its own tokens, `(n,)`."""
    tokens = values.unflatten(4, (layout.strip_length, -1)).mean((1, 2, 3, 5)).flatten()
    return torch.stack([tokens[start:stop].mean() for start, stop in layout.spans])
