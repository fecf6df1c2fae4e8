"""Compare a model's packed runs with running the samples one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..losses.per_sample import masked_mse
from ..marks import mark
from ..packing.attachment import unwrap
from ..packing.batch import PackedBatch
from ..packing.forward import packed_forward
from ..packing.losses import packed_mse
from ..packing.pack import Packing
from ..packing.strips import token_grid
from ..plans.packs import PackPlanConfig
from .enable import disable_packing, enable_packing, packing_disabled
from .registry import family_of

_LIMITS = {torch.float64: (1e-10, 1e-6), torch.float32: (1e-5, 1e-4)}
"""By dtype: the largest difference of outputs and losses, and of gradients relative to their norm."""
_HALF_LIMITS = (5e-2, 2e-1)
_MASKED = ("dense", "flex")
"""Backends that weight other samples' tokens with 0; a NaN passes such a weight, because 0 · NaN is NaN."""


class VerificationCheck(NamedTuple):
    """One comparison: its name, the largest difference found, and the largest allowed."""

    name: str
    difference: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within its limit; a NaN is not."""
        return self.difference <= self.limit


class VerificationReport(NamedTuple):
    """The checks of [`verify_packing`]; `str` makes a table of them."""

    checks: tuple[VerificationCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks hold."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        rows = [f"{'check':44} {'difference':>10} {'limit':>10}"]
        for check in self.checks:
            rows.append(f"{check.name:44} {check.difference:10.1e} {check.limit:10.1e}  {mark(check.holds)}")
        return "\n".join(rows)


@dataclass(frozen=True, kw_only=True)
class _Samples:
    latents: tuple[torch.Tensor, ...]
    timesteps: torch.Tensor | Sequence[torch.Tensor]
    text: tuple[torch.Tensor, ...]
    conditioning: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
    references: tuple[tuple[torch.Tensor, ...], ...]

    def ordered(self, order: Sequence[int]) -> _Samples:
        return _Samples(
            latents=_chosen(self.latents, order),
            timesteps=_chosen(self.timesteps, order),
            text=_chosen(self.text, order),
            conditioning={name: _chosen(values, order) for name, values in self.conditioning.items()},
            references=_chosen(self.references, order),
        )

    def pack(self, packing: Packing) -> PackedBatch:
        return packing.pack(
            self.latents,
            references=self.references,
            timesteps=self.timesteps,
            text=self.text,
            conditioning=self.conditioning,
        )

    def poisoned(self, victim: int, poison: float) -> _Samples:
        """Return these samples with a number in place of all that one of them is made of."""

        def fill(values: tuple[Any, ...], poisoned: Any) -> tuple[Any, ...]:
            return *values[:victim], poisoned, *values[victim + 1 :]

        latent, *others = (torch.full_like(grid, poison) for grid in (self.latents[victim], *self.references[victim]))
        return replace(self, latents=fill(self.latents, latent), references=fill(self.references, tuple(others)))


def _chosen(values: Any, order: Sequence[int]) -> Any:
    return values[list(order)] if isinstance(values, torch.Tensor) else tuple(values[sample] for sample in order)


def verify_packing(
    transformer: torch.nn.Module,
    latents: Sequence[torch.Tensor],
    *,
    timesteps: torch.Tensor,
    text: Sequence[torch.Tensor] | torch.Tensor,
    references: Sequence[Sequence[torch.Tensor]] | None = None,
    conditioning: Mapping[str, torch.Tensor | Sequence[torch.Tensor]] | None = None,
    strip_length: int = PackPlanConfig.strip_length,
    backend: str = "auto",
) -> VerificationReport:
    """Compare packed with one-by-one runs of a transformer: outputs, loss, gradients, leaks, order, strips.

    Where the model takes several timesteps per sample, outputs are also compared with one per frame, 0 for the first.

    The model is left unchanged: packing is switched off again, and no `.grad` is written. The loss is the mean squared
    error against the latents with their channels rolled by one, over the channels that outputs and latents share:
    models may predict a variance too, or take a condition as channels.

    Args:
        transformer (`torch.nn.Module`): A transformer of a known family, packing not enabled; may have LoRA layers.
        latents (sequence of `(channels, frames, height, width)`): At least two samples, preferably of different
            sizes.
        timesteps (`torch.Tensor` of shape `(n,)`): One per sample.
        text (sequence of `(length, text_dim)` or `torch.Tensor` of shape `(n, length, text_dim)`): One per sample.
        references (sequence of sequences of `(channels, f, h, w)`, *optional*): References of each sample, for models
            that take some.
        conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`, *optional*): See `Packing.pack`; by default
            what the model needs is drawn.
        strip_length (`int`): Tokens per strip; a second run uses twice as many.
        backend (`str`): Backend of attention, see [`enable_packing`].

    Returns:
        [`VerificationReport`]: Differences of outputs are relative to the largest output if that exceeds 1.

    Raises:
        PackingError: If no model family claims the class, packing is enabled already, or the inputs make no pack.
    """
    model = unwrap(transformer)
    if conditioning is None:
        conditioning = _draw_conditioning(model, latents)
    samples = _Samples(
        latents=tuple(latents),
        timesteps=timesteps,
        text=tuple(text),
        conditioning=conditioning,
        references=tuple(map(tuple, [()] * len(latents) if references is None else references)),
    )
    output_limit, gradient_limit = _LIMITS.get(samples.latents[0].dtype, _HALF_LIMITS)
    with _packing(model, strip_length, backend) as packing:
        samples.pack(packing)  # refuses what cannot be packed before running the samples alone
    outputs, loss, gradients = _one_by_one(model, samples)
    scale = max(1.0, *(float(output.abs().max()) for output in outputs))
    order = [*range(1, len(samples.latents)), 0]
    checks = []

    def check(name: str, difference: float, limit: float = output_limit) -> None:
        checks.append(VerificationCheck(name, difference, limit))

    with _packing(model, strip_length, backend) as packing:
        packed, packed_loss, packed_gradients = _packed(model, packing, samples)
        check("outputs, packed against alone", _largest(outputs, packed) / scale)
        check("loss", abs(packed_loss - loss))
        check("gradients, relative", _largest_relative(gradients, packed_gradients), gradient_limit)
        poison = 1e3 if packing.backend in _MASKED else torch.nan
        check(f"leak of {poison:.0f} into other samples (bits)", _leak(model, packing, samples, poison), 0.0)
        shuffled = _outputs(model, packing, samples.ordered(order))
        check("outputs, samples in another order", _largest([outputs[sample] for sample in order], shuffled) / scale)
        with _checkpointing(model):
            _, _, again = _packed(model, packing, samples)
            check("gradients, checkpointing, relative", _largest_relative(gradients, again), gradient_limit)
        if packing.family.timesteps_per != "row":
            check("outputs, a timestep per frame", _by_frame(model, packing, samples) / scale)
    longer = min(2 * strip_length, family_of(model).longest_strip(model))
    with _packing(model, longer, backend) as packing:
        check(f"outputs, strips of {longer}", _largest(outputs, _outputs(model, packing, samples)) / scale)
    return VerificationReport(tuple(checks))


def _draw_conditioning(model: Any, latents: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Draw what the model needs of samples beside their texts, the same each time."""
    family = family_of(model)
    grids = [token_grid(latent, family.patch(model.config), sample=sample) for sample, latent in enumerate(latents)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = family.draw_conditioning(model, grids)

    def like_latents(values: torch.Tensor) -> torch.Tensor:
        return values.to(latents[0].device, latents[0].dtype if values.is_floating_point() else None)

    return {
        name: like_latents(values) if isinstance(values, torch.Tensor) else [like_latents(latent) for latent in values]
        for name, values in drawn.items()
    }


def _targets(latents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [latent.roll(1, 0) for latent in latents]


def _alone(model: Any, samples: _Samples) -> list[torch.Tensor]:
    family = family_of(model)
    return [
        family.run_alone(
            model,
            latent,
            timestep=samples.timesteps[sample],
            text=samples.text[sample],
            conditioning={name: values[sample] for name, values in samples.conditioning.items()},
            references=samples.references[sample],
        )
        for sample, latent in enumerate(samples.latents)
    ]


def _one_by_one(model: Any, samples: _Samples) -> tuple[list[torch.Tensor], float, list[torch.Tensor]]:
    outputs = _alone(model, samples)
    channels = min(len(outputs[0]), len(samples.latents[0]))
    pairs = zip(outputs, _targets(samples.latents), strict=True)
    losses = [masked_mse(output[None, :channels], target[None, :channels]) for output, target in pairs]
    loss = torch.cat(losses).mean()
    return [output.detach() for output in outputs], float(loss.detach()), _gradients(model, loss)


def _packed(
    model: torch.nn.Module, packing: Packing, samples: _Samples
) -> tuple[list[torch.Tensor], float, list[torch.Tensor]]:
    batch = samples.pack(packing)
    prediction = packed_forward(model, batch)
    target = batch.pack_like(_targets(samples.latents))
    channels = min(prediction.shape[1], target.shape[1])
    loss = packed_mse(prediction[:, :channels], target[:, :channels], batch.layout).mean()
    return batch.unpack(prediction.detach()), float(loss.detach()), _gradients(model, loss)


@torch.no_grad()
def _outputs(model: torch.nn.Module, packing: Packing, samples: _Samples) -> list[torch.Tensor]:
    batch = samples.pack(packing)
    return batch.unpack(packed_forward(model, batch))


@torch.no_grad()
def _by_frame(model: torch.nn.Module, packing: Packing, samples: _Samples) -> float:
    """Return the largest difference of outputs with timesteps that rise from 0 over the frames of each sample.

    All samples have the conditioning of the first one, as some models take timesteps of frames for one frame rate.
    """
    grids = samples.pack(packing).layout.grids
    rising = [
        timestep * torch.linspace(0, 1, grid[0], device=timestep.device)
        for timestep, grid in zip(samples.timesteps, grids, strict=True)
    ]
    conditioning = {name: _chosen(values, [0] * len(grids)) for name, values in samples.conditioning.items()}
    samples = replace(samples, timesteps=rising, conditioning=conditioning)
    packed = _outputs(model, packing, samples)
    with packing_disabled(model):
        return _largest(_alone(model, samples), packed)


def _leak(model: torch.nn.Module, packing: Packing, samples: _Samples, poison: float) -> float:
    """Count the output values of other samples that change in any bit when one sample after another is poisoned."""
    before, changed = _outputs(model, packing, samples), 0
    for victim in range(len(before)):
        after = _outputs(model, packing, samples.poisoned(victim, poison))
        pairs = [pair for sample, pair in enumerate(zip(before, after, strict=True)) if sample != victim]
        changed += sum(int((output != other).sum()) for output, other in pairs)
    return float(changed)


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True))


def _largest(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(float((output - other).abs().max()) for output, other in zip(outputs, others, strict=True))


def _largest_relative(gradients: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest difference relative to its own norm, or to a thousandth of the largest norm if that is more.

    Some gradients are pure rounding: softmax cannot see a bias that all keys of an attention share.
    """
    norms = [float(gradient.norm()) for gradient in gradients]
    floor = max(1e-3 * max(norms), 1e-30)
    pairs = zip(gradients, others, strict=True)
    differences = [float((gradient - other).norm()) for gradient, other in pairs]
    return max(difference / max(norm, floor) for difference, norm in zip(differences, norms, strict=True))


@contextmanager
def _packing(model: torch.nn.Module, strip_length: int, backend: str) -> Iterator[Packing]:
    packing = enable_packing(model, strip_length=strip_length, backend=backend)
    try:
        yield packing
    finally:
        disable_packing(model)


@contextmanager
def _checkpointing(model: Any) -> Iterator[None]:
    if model.is_gradient_checkpointing:
        yield
        return
    model.enable_gradient_checkpointing()
    try:
        yield
    finally:
        model.disable_gradient_checkpointing()
