"""Training objectives: noise drawn from each sample's own seed, and per-sample losses of stacks and packs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..devices import to_device
from ..errors import BucketingError
from ..losses.per_sample import masked_mse, min_snr_weights
from ..losses.variational import GaussianPosterior, batch_vlb
from ..packing.batch import PackedBatch
from ..packing.losses import packed_mse, packed_vlb
from ..randomness import Purpose, integer_seed, sample_key

WeightingScheme: TypeAlias = Literal["logit_normal", "uniform"]
"""Distribution of noise levels in flow matching, before the shift."""

Shift: TypeAlias = "float | Callable[[tuple[int, ...]], float]"
"""Shift of noise levels: one for all samples, or a function of a latent's `(F, H, W)`."""


class Noised(NamedTuple):
    """Noisy latents, their targets and their timesteps.

    Attributes:
        latents (list of `(C, F, H, W)`): Noisy latents, the model's input.
        targets (list of `(C, F, H, W)`): What the model is trained to predict.
        timesteps (`torch.Tensor` of shape `(n,)`): Timesteps as the model takes them; their means where each frame
            has its own.
        clean (list of `(C, F, H, W)`): Latents without noise.
        frame_timesteps (list of `(F,)`, *optional*): Timesteps of the latent frames of each sample, where each frame
            has its own.
    """

    latents: list[torch.Tensor]
    targets: list[torch.Tensor]
    timesteps: torch.Tensor
    clean: list[torch.Tensor]
    frame_timesteps: list[torch.Tensor] | None = None


class NoisedAudio(NamedTuple):
    """Noisy audio latents and their targets.

    Attributes:
        latents (list of `(tokens, channels)`): Noisy latents, with no tokens where a sample has no audio.
        targets (list of `(tokens, channels)`): What the model is trained to predict.
        timesteps (`torch.Tensor` of shape `(n,)`): Timestep of each sample's audio; 0 where it is shown.
        video_timesteps (`torch.Tensor` of shape `(n,)`): Timestep of its video; 0 where that is shown.
        learned (`torch.Tensor` of shape `(n,)`): 1 where the audio is generated, 0 where it is shown.
    """

    latents: list[torch.Tensor]
    targets: list[torch.Tensor]
    timesteps: torch.Tensor
    video_timesteps: torch.Tensor
    learned: torch.Tensor

    def losses(self, predictions: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean squared error of each sample, `(n,)`, in at least float32; 0 where no audio is generated."""
        pairs = zip(predictions, self.targets, strict=True)
        values = torch.stack([_squared_error(prediction, target) for prediction, target in pairs])
        return values * self.learned.to(values)


def _squared_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    return (prediction.to(dtype) - target.to(dtype)).square().sum() / max(1, target.numel())


def sample_generator(*, seed: int, epoch: int, index: int, occurrence: int = 0) -> torch.Generator:
    """Return the generator of the noise and the timestep of one occurrence of a sample in one epoch.

    It is on the CPU, so that it draws the same on every device, in any batch and on any number of processes.

    Args:
        seed (`int`): Seed of the run, not negative.
        epoch (`int`): Not negative.
        index (`int`): The sample's row, not negative: the `index` of a batch.
        occurrence (`int`): How often the epoch held the row before, not negative.

    Raises:
        BucketingError: On a negative number.

    Example:
        >>> draws = [torch.rand(1, generator=sample_generator(seed=0, epoch=1, index=7)) for _ in range(2)]
        >>> draws[0].equal(draws[1])
        True
    """
    key = sample_key(seed=seed, epoch=epoch, index=index, occurrence=occurrence)
    return torch.Generator().manual_seed(integer_seed(Purpose.NOISE, *key))


class _Draws(NamedTuple):
    """Source of a sample's random numbers, and the quantile of its noise level, which is drawn if there is none."""

    generator: torch.Generator
    quantile: float | None = None


class _Losses(NamedTuple):
    """The losses of stacks or of packs, and what joins separate latents to one stack or pack."""

    join: Callable[[list[torch.Tensor]], torch.Tensor]
    mse: Callable[..., torch.Tensor]
    vlb: Callable[..., torch.Tensor]


def _noise_like(latent: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw noise on the CPU, of a latent's shape, and return it in its dtype on its device."""
    return to_device(torch.randn(latent.shape, generator=generator), latent.device, dtype=latent.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """Adds noise, and scores predictions.

    Args:
        seed (`int`): Seed of noise and timesteps, together with epoch and index.
    """

    seed: int = 0

    def share(self, size: tuple[int, ...]) -> float:
        """Return the share of all noise levels, as they are drawn for latents `(F, H, W)`, that are trained."""
        return 1.0

    @abstractmethod
    def noise_levels(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return how noisy latents are at the model's timesteps, from 0 to 1 (pure noise)."""

    def __call__(
        self,
        latents: Sequence[torch.Tensor],
        *,
        indices: Sequence[int],
        epoch: int,
        occurrences: Sequence[int] | None = None,
    ) -> Noised:
        """Add noise to each latent `(C, F, H, W)`, another one to each occurrence of a sample in an epoch.

        Args:
            latents (sequence of `(C, F, H, W)`): Latents without noise.
            indices (sequence of `int`): The samples' rows: the `index` of a batch.
            epoch (`int`): Epoch of the draws.
            occurrences (sequence of `int`, *optional*): How often the epoch held each row before, by default never.
        """
        keys = zip(indices, [0] * len(indices) if occurrences is None else occurrences, strict=True)
        common = {"seed": self.seed, "epoch": epoch}
        return self._noised(
            latents, [_Draws(sample_generator(**common, index=index, occurrence=before)) for index, before in keys]
        )

    def held_out(
        self, latents: Sequence[torch.Tensor], *, indices: Sequence[int], level: int, num_levels: int
    ) -> Noised:
        """Add noise by which held-out samples are scored, the same on every call, whatever the seed and the epoch.

        The distribution of noise levels in training is cut into `num_levels` equally likely ranges, and each sample
        gets a noise level of one of them, so that the mean loss over all of them estimates that of training.

        Args:
            latents (sequence of `(C, F, H, W)`): Latents without noise.
            indices (sequence of `int`): The samples' rows: the `index` of a batch.
            level (`int`): Number of the range, from 0, the least noise, to `num_levels - 1`.
            num_levels (`int`): Number of ranges.
        """
        draws = []
        for index in indices:
            generator = torch.Generator().manual_seed(integer_seed(Purpose.HELD_OUT_NOISE, index, level))
            place = float(torch.rand((), generator=generator, dtype=torch.float64))
            draws.append(_Draws(generator, (level + place) / num_levels))
        return self._noised(latents, draws)

    def _noised(self, latents: Sequence[torch.Tensor], draws: Sequence[_Draws]) -> Noised:
        """Add noise to each latent by its own draws."""
        noised, targets, timesteps = self._add_noise_to_samples(latents, draws)
        return Noised(noised, targets, to_device(torch.cat(timesteps), latents[0].device), list(latents))

    def _add_noise_to_samples(
        self, latents: Sequence[torch.Tensor], draws: Sequence[_Draws]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return what [`_add_noise`] makes of the samples."""
        drawn = [self._add_noise(latent, draw) for latent, draw in zip(latents, draws, strict=True)]
        noised, targets, timesteps = map(list, zip(*drawn, strict=True))
        return noised, targets, timesteps

    def audio(
        self,
        latents: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        keys: Sequence[tuple[int, ...]],
        shown: Sequence[bool] | None = None,
        video_shown: Sequence[bool] | None = None,
    ) -> NoisedAudio:
        """Add noise to the audio of samples by the timesteps of their video, but where it is shown.

        Args:
            latents (sequence of `(tokens, channels)`): Audio latents without noise.
            timesteps (`torch.Tensor` of shape `(n,)`): Timestep of each sample.
            keys (sequence of tuples of `int`): Key of the noise of each.
            shown (sequence of `bool`, *optional*): Whether the audio of each is shown; by default none is.
            video_shown (sequence of `bool`, *optional*): Whether the video of each is shown; by default none is.
        """
        raise NotImplementedError

    def losses(
        self, prediction: torch.Tensor, noised: Noised, *, weights: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the loss of each sample of a stack `(B, C_out, F, H, W)`: `(B,)`.

        Weights, if there are any, are those of each sample's latent, `(1, F, H, W)` or `(C, F, H, W)`, not negative.
        """
        joined = None if weights is None else torch.stack(list(weights))
        mse, vlb = (partial(loss, weights=joined) for loss in (masked_mse, batch_vlb))
        return self._losses(prediction, noised, _Losses(torch.stack, mse, vlb))

    def packed_losses(
        self,
        prediction: torch.Tensor,
        noised: Noised,
        pack: PackedBatch,
        *,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the loss of each sample of a pack, from the output of `packed_forward`: `(n,)`; see [`losses`]."""
        joined = None if weights is None else pack.pack_like(weights)
        mse, vlb = (partial(loss, layout=pack.layout, weights=joined) for loss in (packed_mse, packed_vlb))
        return self._losses(prediction, noised, _Losses(pack.pack_like, mse, vlb))

    @abstractmethod
    def _add_noise(self, latent: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, ...]:
        """Return the noisy latent, its target, and its timestep `(1,)`, or those of its frames `(F,)`."""

    def _losses(self, prediction: torch.Tensor, noised: Noised, losses: _Losses) -> torch.Tensor:
        """Return the loss of each sample, by default the squared error."""
        return losses.mse(prediction, losses.join(noised.targets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising(Objective):
    """DDPM (Ho et al., 2020) on a discrete schedule, with the hybrid loss for models that predict their variance.

    The noisy latent is `√ᾱ_t·x + √(1 − ᾱ_t)·noise`. A model whose output has twice the latent's channels predicts its
    variance in the second half, trained by the variational bound (Nichol & Dhariwal, 2021).

    Args:
        posterior ([`GaussianPosterior`][hf_bucketing.losses.GaussianPosterior]): The schedule, and what the model
            predicts.
        snr_gamma (`float`, *optional*): Gamma of min-SNR weights of the squared error.
        seed (`int`): Seed of noise and timesteps, together with epoch and index.
    """

    posterior: GaussianPosterior
    snr_gamma: float | None = None

    def noise_levels(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return timesteps over the steps of the schedule."""
        return timesteps / self.posterior.num_timesteps

    def _add_noise(self, latent: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, ...]:
        count, generator = self.posterior.num_timesteps, draws.generator
        if draws.quantile is None:
            step = torch.randint(count, (1,), generator=generator)
        else:
            step = torch.tensor([int(draws.quantile * count)])
        noise = _noise_like(latent, generator)
        signal, spread = (self.posterior.at(name, step, latent[None])[0] for name in ("signal", "noise"))
        velocity = signal * noise - spread * latent
        target = {"epsilon": noise, "v_prediction": velocity}.get(self.posterior.prediction_type, latent)
        return signal * latent + spread * noise, target, step

    def _losses(self, prediction: torch.Tensor, noised: Noised, losses: _Losses) -> torch.Tensor:
        targets = losses.join(noised.targets)
        mean, learns_variance = self._split(prediction, targets)
        values = losses.mse(mean, targets) * self._weights(noised.timesteps)
        if not learns_variance:
            return values
        return values + losses.vlb(
            prediction,
            noised=losses.join(noised.latents),
            clean=losses.join(noised.clean),
            timesteps=noised.timesteps,
            posterior=self.posterior,
        )

    def _split(self, prediction: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the prediction of the mean, and whether a prediction of the variance follows it."""
        channels = targets.shape[1]
        if prediction.shape[1] not in (channels, 2 * channels):
            raise BucketingError(
                f"The model predicts {prediction.shape[1]} channels for latents of {channels}; expected as many, or "
                "twice as many with a learned variance."
            )
        return prediction[:, :channels], prediction.shape[1] > channels

    def _weights(self, timesteps: torch.Tensor) -> torch.Tensor | float:
        if self.snr_gamma is None:
            return 1.0
        signal, spread = (self.posterior.at(name, timesteps, timesteps.float()) for name in ("signal", "noise"))
        snr = signal.square() / spread.square()
        return min_snr_weights(snr, gamma=self.snr_gamma, prediction_type=self.posterior.prediction_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching(Objective):
    """Rectified flow (Liu et al., 2022; Lipman et al., 2022) with the resolution shift of SD3 (Esser et al., 2024).

    The noisy latent is `(1 − σ)·x + σ·noise`, the target `noise − x`, the timestep `σ · num_train_timesteps`.

    Args:
        num_train_timesteps (`int`): Timestep at σ = 1.
        shift (`float`, or callable of a latent's `(F, H, W)`): Shift of σ: `σ → shift·σ / (1 + (shift − 1)·σ)`.
        weighting_scheme (`"logit_normal"` or `"uniform"`): Distribution of σ before the shift.
        sigmas (`tuple[float, float]`): Lowest and highest noise level to train, after the shift; levels outside are
            drawn again.
        audio_shift (`float`): Shift of the σ of audio that is trained with video, relative to that of its video: both
            come from one draw, as the steps of the pipeline's two schedules do.
        seed (`int`): Seed of noise and σ, together with epoch and index.

    Raises:
        BucketingError: If `sigmas` are not two ascending levels from 0 to 1.
    """

    num_train_timesteps: int = 1000
    shift: Shift = 1.0
    weighting_scheme: WeightingScheme = "logit_normal"
    sigmas: tuple[float, float] = (0.0, 1.0)
    audio_shift: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.sigmas[0] < self.sigmas[1] <= 1:
            raise BucketingError(f"sigmas must be two ascending noise levels from 0 to 1, got {self.sigmas}.")

    def noise_levels(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return σ."""
        return timesteps / self.num_train_timesteps

    def audio(
        self,
        latents: Sequence[torch.Tensor],
        *,
        timesteps: torch.Tensor,
        keys: Sequence[tuple[int, ...]],
        shown: Sequence[bool] | None = None,
        video_shown: Sequence[bool] | None = None,
    ) -> NoisedAudio:
        """Add noise to audio as to video, at levels of its own shift, see [`Objective.audio`]."""
        learned, video_learned = (
            to_device(torch.tensor([not clean for clean in flags or [False] * len(latents)]), timesteps.device)
            for flags in (shown, video_shown)
        )
        shift, sigmas = self.audio_shift, self.noise_levels(timesteps)
        levels = learned * (timesteps if shift == 1 else timesteps * shift / (1 + (shift - 1) * sigmas))
        noises = [
            _noise_like(latent, torch.Generator().manual_seed(integer_seed(Purpose.AUDIO_NOISE, *key)))
            for latent, key in zip(latents, keys, strict=True)
        ]
        triples = zip(latents, noises, self.noise_levels(levels), strict=True)
        noisy = [((1 - sigma) * latent + sigma * noise).to(latent.dtype) for latent, noise, sigma in triples]
        targets = [noise - latent for latent, noise in zip(latents, noises, strict=True)]
        return NoisedAudio(noisy, targets, levels, timesteps * video_learned, learned)

    def _add_noise(self, latent: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, ...]:
        sigma = self._draw_sigma(draws.generator, tuple(latent.shape[1:]), draws.quantile)
        noise = _noise_like(latent, draws.generator)
        timestep = torch.tensor([sigma], dtype=torch.float32) * self.num_train_timesteps
        return (1 - sigma) * latent + sigma * noise, noise - latent, timestep

    def _draw_sigma(self, generator: torch.Generator, size: tuple[int, ...], quantile: float | None = None) -> float:
        shift = self.shift(size) if callable(self.shift) else self.shift
        if quantile is not None:
            return float(self._sigmas_at(torch.tensor(quantile, dtype=torch.float64), shift))
        while True:
            if self.weighting_scheme == "logit_normal":
                drawn = torch.sigmoid(torch.randn((), generator=generator, dtype=torch.float64))
            else:
                drawn = torch.rand((), generator=generator, dtype=torch.float64)
            sigma = float(shift * drawn / (1 + (shift - 1) * drawn))
            if self.sigmas[0] <= sigma <= self.sigmas[1]:
                return sigma

    def share(self, size: tuple[int, ...]) -> float:
        """Return the share of the draws that lie within `sigmas`, before those outside are drawn again.

        Example:
            >>> high = FlowMatching(sigmas=(0.875, 1.0), shift=3.0, weighting_scheme="uniform")
            >>> round(high.share((21, 60, 104)), 3)
            0.3
        """
        shift = self.shift(size) if callable(self.shift) else self.shift
        low, high = self._quantiles(torch.tensor(self.sigmas, dtype=torch.float64), shift).tolist()
        return float(high - low)

    def _sigmas_at(self, levels: torch.Tensor, shift: float) -> torch.Tensor:
        """Return σ below which a share of the draws lies, for each share in [0, 1)."""
        low, high = self._quantiles(torch.tensor(self.sigmas, dtype=torch.float64), shift)
        unshifted = low + (high - low) * levels
        if self.weighting_scheme == "logit_normal":
            unshifted = torch.special.ndtri(unshifted).sigmoid()
        return shift * unshifted / (1 + (shift - 1) * unshifted)

    def _quantiles(self, sigmas: torch.Tensor, shift: float) -> torch.Tensor:
        """Return the share of draws that lie below levels of noise, the inverse of the map from levels to σ."""
        unshifted = sigmas / (sigmas + shift * (1 - sigmas))  # 1 remains 1 when rounded
        return torch.special.ndtr(unshifted.logit()) if self.weighting_scheme == "logit_normal" else unshifted


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionForcing(FlowMatching):
    """Flow matching with a noise level per latent frame (Chen et al., 2024), which never falls from frame to frame.

    That is the order in which videos are generated frame after frame: the earlier a frame, the less noise it has. A
    frame is chosen, and its level is drawn as in flow matching; those before it are distributed as this one but below
    it, those after it above it, and sorted. With uniform levels it is the limit, for many timesteps, of AR-Diffusion's
    frame-oriented probability propagation (Sun et al., 2025), which SkyReels-V2 is trained with. Images have one
    level, distributed as in flow matching.

    Args:
        num_train_timesteps (`int`): Timestep at σ = 1.
        shift (`float`, or callable of a latent's `(F, H, W)`): Shift of σ, the same for all frames.
        weighting_scheme (`"logit_normal"` or `"uniform"`): Distribution of σ before the shift.
        sigmas (`tuple[float, float]`): Lowest and highest noise level to train, after the shift.
        seed (`int`): Seed of noise and σ, together with epoch and index.

    Raises:
        BucketingError: If `sigmas` are not two ascending levels from 0 to 1.

    Example:
        >>> noised = DiffusionForcing()([torch.zeros(4, 6, 8, 8)], indices=[0], epoch=0)
        >>> steps = noised.frame_timesteps[0]
        >>> steps.equal(steps.sort().values), noised.timesteps.equal(steps.mean()[None])
        (True, True)
    """

    def _noised(self, latents: Sequence[torch.Tensor], draws: Sequence[_Draws]) -> Noised:
        """Add noise to each latent by its own draws, with a timestep for each frame."""
        noised, targets, timesteps = self._add_noise_to_samples(latents, draws)
        by_frame = [to_device(steps, latents[0].device) for steps in timesteps]
        return Noised(noised, targets, torch.stack([steps.mean() for steps in by_frame]), list(latents), by_frame)

    def _add_noise(self, latent: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, ...]:
        sigmas = self._draw_sigmas(draws.generator, tuple(latent.shape[1:]), draws.quantile).float()
        noise = _noise_like(latent, draws.generator)
        share = to_device(sigmas, latent.device).view(-1, 1, 1)
        noised = ((1 - share) * latent + share * noise).to(latent.dtype)
        return noised, noise - latent, sigmas * self.num_train_timesteps

    def _draw_sigmas(
        self, generator: torch.Generator, size: tuple[int, ...], quantile: float | None = None
    ) -> torch.Tensor:
        """Return σ of each frame, `(F,)`; a quantile is that of the chosen frame."""
        shift = self.shift(size) if callable(self.shift) else self.shift
        chosen = int(torch.randint(size[0], (1,), generator=generator))
        drawn = torch.rand(size[0], generator=generator, dtype=torch.float64)
        level = drawn[chosen] if quantile is None else torch.tensor(quantile, dtype=torch.float64)
        before, after = level * drawn[:chosen], level + (1 - level) * drawn[chosen + 1 :]
        levels = torch.cat([before.sort().values, level[None], after.sort().values])
        return self._sigmas_at(levels, shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class EDM(Objective):
    """Denoising with the preconditioning and the loss weights of EDM (Karras et al., 2022), on latents of deviation 1.

    The pipeline works on latents of deviation `sigma_data`, `x = sigma_data·latent + σ·noise`. The model is given
    `c_in·x` and the timestep `ln(σ) / 4`, and its output makes the clean latent `c_skip·x + c_out·output`, whose error
    EDM weights by `1 / c_out²`. With `s = σ / sigma_data`, this is the mean squared error of a model that is given
    `(latent + s·noise) / √(1 + s²)` and predicts `(s·latent − noise) / √(1 + s²)`, or its negative.

    Args:
        sigma_data (`float`): Deviation of the latents in the pipeline, above 0.
        prediction_type (`"epsilon"` or `"v_prediction"`): Sign of the prediction, as the scheduler names it.
        shift (`float`, or callable of a latent's `(F, H, W)`): Factor of σ, whose logarithm is normal with mean 0 and
            deviation 1 before.
        seed (`int`): Seed of noise and σ, together with epoch and index.

    Raises:
        BucketingError: If `sigma_data` is not positive, or the prediction type is another.
    """

    sigma_data: float = 0.5
    prediction_type: str = "epsilon"
    shift: Shift = 1.0

    def __post_init__(self) -> None:
        if self.sigma_data <= 0:
            raise BucketingError(f"sigma_data must be positive, got {self.sigma_data}.")
        if self.prediction_type not in ("epsilon", "v_prediction"):
            raise BucketingError(
                f"prediction_type must be 'epsilon' or 'v_prediction' with EDM, got {self.prediction_type!r}."
            )

    def noise_levels(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the share of the noise, `σ / (σ + sigma_data)`."""
        sigmas = (4 * timesteps).exp()
        return sigmas / (sigmas + self.sigma_data)

    def _add_noise(self, latent: torch.Tensor, draws: _Draws) -> tuple[torch.Tensor, ...]:
        sigma = self._draw_sigma(draws.generator, tuple(latent.shape[1:]), draws.quantile)
        noise = _noise_like(latent, draws.generator)
        length = math.hypot(sigma, self.sigma_data)
        signal, spread = self.sigma_data / length, sigma / length
        velocity = signal * noise - spread * latent
        target = velocity if self.prediction_type == "v_prediction" else -velocity
        return signal * latent + spread * noise, target, torch.tensor([math.log(sigma) / 4], dtype=torch.float32)

    def _draw_sigma(self, generator: torch.Generator, size: tuple[int, ...], quantile: float | None = None) -> float:
        shift = self.shift(size) if callable(self.shift) else self.shift
        if quantile is None:
            drawn = torch.randn((), generator=generator, dtype=torch.float64)
        else:
            drawn = torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))
        return shift * math.exp(float(drawn))
