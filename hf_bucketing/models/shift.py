"""Laws for the shift of flow matching's noise levels, `σ → shift·σ / (1 + (shift − 1)·σ)`, by a sample's size.

More tokens show more of the same picture, so more noise is needed to hide it (Esser et al., 2024, "Scaling Rectified
Flow Transformers for High-Resolution Image Synthesis", section 5.3.2). A law is a function of a sample's tokens and of
the pixels of one of its frames; a number is the same shift for all samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from ..buckets.sizes import LatentSpec
from ..errors import BucketingError

_RESOLUTION = re.compile(r"(\d+)x(\d+):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftByTokens:
    """A shift whose logarithm, or which itself, is linear in the tokens: Flux, LTX, Qwen-Image and others.

    It is `calculate_shift` of diffusers' pipelines, and the defaults are those of Flux's (`pipeline_flux.py`), but for
    the bound: beyond the largest number of tokens that the authors give, the pipelines extrapolate. For LTX-Video that
    is a shift near 400 at 0.5 megapixels and 10 seconds, where the redundancy of such videos suggests 9 to 13
    (Lightricks/LTX-2, issue 291).

    Args:
        base_tokens (`int`): Tokens at which the line has the value `base_shift`, at least 1.
        max_tokens (`int`): Tokens at which it has the value `max_shift`, more than `base_tokens`.
        base_shift (`float`): Value at `base_tokens`.
        max_shift (`float`): Value at `max_tokens`.
        kind (`"exponential"` or `"linear"`): Whether the values of the line are logarithms of shifts, or shifts; as
            `time_shift_type` of diffusers' schedulers.
        bounded (`bool`): Whether samples of more than `max_tokens` have the shift of `max_tokens`.

    Raises:
        BucketingError: On impossible numbers of tokens, or linear values that are not positive.

    Example:
        >>> [round(ShiftByTokens()(tokens=tokens), 3) for tokens in (256, 4096, 100_000)]
        [1.649, 3.158, 3.158]
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_shift: float = 0.5
    max_shift: float = 1.15
    kind: Literal["exponential", "linear"] = "exponential"
    bounded: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.base_tokens < self.max_tokens:
            raise BucketingError(
                f"A shift by tokens needs 1 or more base_tokens and a larger max_tokens, got {self.base_tokens} and "
                f"{self.max_tokens}."
            )
        if self.kind == "linear" and min(self.base_shift, self.max_shift) <= 0:
            raise BucketingError(f"Shifts must be above 0, got {self.base_shift} and {self.max_shift}.")

    def __call__(self, *, tokens: int, pixels: int = 0) -> float:
        """Return the shift of a sample; pixels make no difference."""
        count = min(tokens, self.max_tokens) if self.bounded else tokens
        share = (count - self.base_tokens) / (self.max_tokens - self.base_tokens)
        value = self.base_shift + share * (self.max_shift - self.base_shift)
        return math.exp(value) if self.kind == "exponential" else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftByRoot:
    """A shift that grows with the square root of tokens or pixels: fourfold pixels have twice the shift.

    By default that of Stable Diffusion 3: √(m/n), which Esser et al. (section 5.3.2) chose as 3 at 1024×1024 pixels.
    CogView4 takes `offset + factor·√(tokens/256)` (`calculate_shift` in `pipeline_cogview4.py`).

    Args:
        of (`"pixels"` or `"tokens"`): Pixels of a frame, however many frames there are, or tokens of the sample.
        base (`int`): Pixels or tokens at which the shift is `factor + offset`, at least 1.
        factor (`float`): What grows with the root, above 0.
        offset (`float`): What does not, not negative.

    Raises:
        BucketingError: On an impossible value.

    Example:
        >>> law = ShiftByRoot()
        >>> [round(law(tokens=0, pixels=h * w), 2) for h, w in ((480, 832), (1024, 1024), (2048, 2048))]
        [1.85, 3.0, 6.0]
    """

    of: Literal["pixels", "tokens"] = "pixels"
    base: int = 1024 * 1024
    factor: float = 3.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.base < 1 or self.factor <= 0 or self.offset < 0:
            raise BucketingError(f"A shift by a root needs positive numbers, got {self}.")

    def __call__(self, *, tokens: int, pixels: int) -> float:
        """Return the shift of a sample of so many tokens, and pixels per frame."""
        count = pixels if self.of == "pixels" else tokens
        return self.offset + self.factor * math.sqrt(count / self.base)


@dataclass(frozen=True, slots=True)
class ShiftByResolution:
    """A shift for each of some resolutions; a sample has that of the resolution nearest in pixels, by their ratio.

    Args:
        steps (`tuple` of `(int, int, float)`): Height and width in pixels, and the shift of such samples, above 0.

    Raises:
        BucketingError: If there is no step, or one is impossible.

    Example:
        >>> law = ShiftByResolution(((480, 832, 3.0), (720, 1280, 5.0)))
        >>> law(tokens=0, pixels=512 * 512), law(tokens=0, pixels=1080 * 1920)
        (3.0, 5.0)
    """

    steps: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        if not self.steps or any(min(step) <= 0 for step in self.steps):
            raise BucketingError(f"Expected resolutions and shifts above 0, got {self.steps}.")

    def __call__(self, *, tokens: int = 0, pixels: int) -> float:
        """Return the shift of a sample of so many pixels per frame; tokens make no difference."""
        return min((abs(math.log(pixels / (height * width))), shift) for height, width, shift in self.steps)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftBySteps:
    """The shift with which FLUX.2's pipelines render: the fewer steps, the larger.

    It is `compute_empirical_mu` of diffusers' `pipeline_flux2.py`, which follows Black Forest Labs' own code, with its
    jump at 4,300 tokens. With 200 steps, and with any number beyond those tokens, its logarithm is Flux's line
    ([`ShiftByTokens`], without the bound).

    Args:
        steps (`int`): Steps of a render, at least 1; 50 is the default of the pipelines' call.

    Raises:
        BucketingError: If there is no step.

    Example:
        >>> [round(ShiftBySteps(steps=steps)(tokens=4096), 2) for steps in (28, 50, 200)]
        [8.6, 7.56, 3.16]
    """

    steps: int = 50

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BucketingError(f"A shift by steps needs 1 step or more, got {self.steps}.")

    def __call__(self, *, tokens: int, pixels: int = 0) -> float:
        """Return the shift of a sample of so many tokens; pixels make no difference."""
        with_200_steps = 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return math.exp(with_200_steps)
        with_10_steps = 8.73809524e-05 * tokens + 1.89833333
        return math.exp(with_10_steps + (with_200_steps - with_10_steps) * (self.steps - 10) / 190)


ShiftLaw: TypeAlias = ShiftByTokens | ShiftByRoot | ShiftByResolution | ShiftBySteps
"""A shift that depends on a sample's size."""

ShiftName: TypeAlias = Literal["tokens", "pixels", "resolution", "unbounded", "flux2"]
"""Name of a law, see [`read_shift`]."""


@dataclass(frozen=True, slots=True)
class ShiftOfLatents:
    """A law as a function of a latent's `(F, H, W)`, which has as many tokens and pixels as a spec says.

    Args:
        law (`ShiftLaw`): The law.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides of the VAE and patch of the transformer.
    """

    law: ShiftLaw
    spec: LatentSpec

    def __call__(self, size: tuple[int, ...]) -> float:
        """Return the shift of a latent of that size."""
        _, height, width = size
        tokens = math.prod(size) // math.prod(self.spec.patch)
        return self.law(tokens=tokens, pixels=height * width * self.spec.spatial_stride**2)


def shift_of_scheduler(config: Mapping[str, Any], *, by_root: bool = False) -> float | ShiftLaw:
    """Return the shift that a pipeline's scheduler has, bounded by the largest size that its configuration names.

    Args:
        config (mapping): Configuration of the scheduler.
        by_root (`bool`): Whether the pipeline's `calculate_shift` is that of CogView4, which takes the square root of
            the tokens; else it is Flux's. It matters for schedulers that shift by size (`use_dynamic_shifting`).

    Raises:
        BucketingError: If the scheduler shifts in an unknown way.
    """
    if not config.get("use_dynamic_shifting", False):
        return float(config.get("flow_shift") or config.get("shift") or 1.0)
    kind = config.get("time_shift_type", "exponential")
    known = ("linear",) if by_root else ("exponential", "linear")
    if kind not in known:
        raise BucketingError(
            f"The scheduler shifts by time_shift_type={kind!r}; here it can be {' or '.join(map(repr, known))}."
        )
    base_tokens = config.get("base_image_seq_len", 256)
    if by_root:
        offset, factor = config.get("base_shift", 0.25), config.get("max_shift", 0.75)
        return ShiftByRoot(of="tokens", base=base_tokens, factor=factor, offset=offset)
    return ShiftByTokens(
        base_tokens=base_tokens,
        max_tokens=config.get("max_image_seq_len", 4096),
        base_shift=config.get("base_shift", 0.5),
        max_shift=config.get("max_shift", 1.15),
        kind=kind,
    )


def chosen_shift(
    setting: float | str | ShiftLaw,
    *,
    model_shift: float | ShiftLaw,
    resolutions: tuple[tuple[int, int, float], ...] = (),
) -> float | ShiftLaw:
    """Return the shift that a setting names for a model.

    Args:
        setting (`float`, `str` or `ShiftLaw`): A number, a law, or the name of one that [`read_shift`] lists.
        model_shift (`float` or `ShiftLaw`): Shift of the model's scheduler.
        resolutions (`tuple`, *optional*): Shifts by resolution that the model's authors name, as
            [`ShiftByResolution`] takes them.

    Raises:
        BucketingError: If the setting is impossible, or the model has no such law.
    """
    if not isinstance(setting, (int, float, str)):
        return setting
    chosen = read_shift(setting)
    if not isinstance(chosen, str):
        return chosen
    if chosen == "unbounded" and not isinstance(model_shift, ShiftByTokens):
        raise BucketingError('`shift="unbounded"` has no effect: the scheduler of this model has no bound to lift.')
    if chosen == "resolution" and not resolutions:
        raise BucketingError(
            "The authors of this model name no shifts by resolution; give them, such as "
            '`shift="480x832:3,720x1280:5"`.'
        )
    by_tokens = model_shift if isinstance(model_shift, ShiftByTokens) else ShiftByTokens()
    laws: dict[ShiftName, Callable[[], ShiftLaw]] = {
        "tokens": lambda: by_tokens,
        "pixels": ShiftByRoot,
        "resolution": lambda: ShiftByResolution(resolutions),
        "unbounded": lambda: replace(by_tokens, bounded=False),
        "flux2": ShiftBySteps,
    }
    return laws[chosen]()


def read_shift(setting: float | str) -> float | ShiftByResolution | ShiftName:
    """Return what a setting says: a shift, a law by resolution, or the name of a law that depends on the model.

    The names are `"tokens"`, linear in the tokens as Flux; `"pixels"`, the square root of the pixels as Stable
    Diffusion 3; `"resolution"`, what the model's authors name for some resolutions; `"unbounded"`, the scheduler's law
    as the pipeline extrapolates it; and `"flux2"`, what FLUX.2's pipelines render with in 50 steps. Resolutions are
    written as `480x832:3,720x1280:5`: height, width, shift.

    Raises:
        BucketingError: On anything else.

    Example:
        >>> read_shift(3), read_shift("pixels"), read_shift("480x832:2,720x1280:5")
        (3.0, 'pixels', ShiftByResolution(steps=((480, 832, 2.0), (720, 1280, 5.0))))
    """
    if setting in get_args(ShiftName):
        return setting  # type: ignore[return-value]
    if isinstance(setting, str):
        steps = [_RESOLUTION.fullmatch(part.strip()) for part in setting.split(",")]
        matched = [step.groups() for step in steps if step is not None]
        if len(matched) == len(steps):
            return ShiftByResolution(tuple((int(h), int(w), float(shift)) for h, w, shift in matched))
    elif not isinstance(setting, bool) and 0 < setting < math.inf:
        return float(setting)
    names = ", ".join(f'"{name}"' for name in get_args(ShiftName))
    raise BucketingError(
        f"`shift` must be a number above 0, one of {names}, or shifts by resolution such as "
        f'"480x832:3,720x1280:5"; got {setting!r}.'
    )
