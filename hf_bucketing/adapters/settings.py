"""Settings of adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from ..errors import BucketingError
from ..formats import split_strength
from ..settings import check_at_least, check_literals, plain_number, setting

AdapterKind: TypeAlias = Literal["lora", "dora", "loha", "lokr"]
"""Kinds of adapters, as peft names them."""

ADAPTER_NAMES: Mapping[str, str] = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr"}
"""Names of the kinds in prose."""

LoraFormat: TypeAlias = Literal["diffusers", "comfyui", "both"]
"""Whose names and scales a file of LoRA weights has."""

SETTINGS = "training_config.json"
"""File in the output folder of a run that holds its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Adapters: LoRA and its relatives.

    Args:
        adapter (`"lora"`, `"dora"`, `"loha"` or `"lokr"`): Kind of the adapters. DoRA (Liu et al., 2024) also trains
            the norm of each output's weights; LoHa (Hyeon-Woo et al., 2022) and LoKr (Yeh et al., 2024) make the
            change of two products, elementwise and as Kronecker's.
        lora_rank (`int`, *optional*): Rank of the adapters; by default the whole transformer is trained, without
            adapters.
        lora_alpha (`float`, *optional*): Numerator of the scale, which is alpha ÷ rank; by default the alpha of
            `init_from_adapters`, or else the rank.
        lora_targets (`str`, *optional*): Module-name suffixes that receive adapters, separated by commas; by default
            the model's projections of attention.
        lora_rslora (`bool`): Whether the scale of LoRA or DoRA is alpha ÷ √rank (Kalajdzievski, 2023), which keeps
            large ranks effective.
        lora_dropout (`float`): Share of the inputs of LoRA or DoRA, or of the outputs of LoHa and LoKr, that training
            sets to zero.
        lora_rank_pattern (`str`, *optional*): Ranks of some modules as `PATTERN=RANK`, separated by spaces; a pattern
            is a regular expression of a whole name, or of its end after a dot. By default all have `lora_rank`.
        lora_alpha_pattern (`str`, *optional*): Alphas of some modules, in the same form; by default all have
            `lora_alpha`, also those of another rank.
        init_from_adapters (`str`, *optional*): Adapters to start from, by default none: LoRA in a file of diffusers,
            ComfyUI or another trainer, or the folder of a run, which alone has the scales of other adapters.
        frozen_adapters (`list` of `str`, *optional*): LoRA in files of any trainer, as `FILE` or `FILE=STRENGTH`, that
            is on in training and off in what is rendered and saved, such as an adapter that undoes the distillation
            of a few-step model. Of both experts, each has its file in a folder of its name. By default none.
        lora_format (`"diffusers"`, `"comfyui"` or `"both"`): Programs that the saved adapters are for; `both` writes
            diffusers' file alone for models whose names in ComfyUI are not proven.

    Raises:
        BucketingError: On a rank below 1, an alpha that is not positive, a pattern that cannot be read, or a setting
            of adapters without a rank.
    """

    adapter: AdapterKind = setting("lora", on_resume="equal")
    lora_rank: int | None = setting(None, common=True)
    lora_alpha: float | None = setting(None, left_open=None, planned=False)
    lora_targets: str | None = setting(None, left_open=None)
    lora_rslora: bool = False
    lora_dropout: float = setting(0.0, on_resume="applied")
    lora_rank_pattern: str | None = None
    lora_alpha_pattern: str | None = None
    init_from_adapters: str | None = setting(None, on_resume="free", planned=False)
    frozen_adapters: list[str] | None = setting(None, on_resume="equal")
    lora_format: LoraFormat = setting("both", on_resume="free", planned=False)

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "lora_rank")
        if self.lora_alpha is not None:
            object.__setattr__(self, "lora_alpha", plain_number(self.lora_alpha, "lora_alpha", integer=False))
            if self.lora_alpha <= 0:
                raise BucketingError(f"`lora_alpha` must be more than 0, got {self.lora_alpha}.")
        for field in fields(self):
            if self.lora_rank is None and field.name != "lora_targets" and getattr(self, field.name) != field.default:
                raise BucketingError(f"`{field.name}` is a setting of adapters; give their rank too (`lora_rank`).")
        if not 0 <= self.lora_dropout < 1:
            raise BucketingError(f"`lora_dropout` must be at least 0 and less than 1, got {self.lora_dropout}.")
        if self.lora_rslora and not self.has_pairs:
            raise BucketingError(f'Omit `lora_rslora`, a scale of LoRA and DoRA, or `adapter="{self.adapter}"`.')
        if self.frozen_adapters and not self.has_pairs:
            raise BucketingError(
                f'Omit `frozen_adapters`, which are LoRA, or `adapter="{self.adapter}"`: a layer holds LoRA and DoRA '
                "alone beside LoRA."
            )
        ranks_by_pattern(self.lora_rank_pattern)
        alphas_by_pattern(self.lora_alpha_pattern)

    @property
    def has_pairs(self) -> bool:
        """Whether each layer has the two matrices of LoRA, so that diffusers loads the adapters."""
        return self.adapter in ("lora", "dora")

    def frozen_in(self, folder: str) -> list[Adapter]:
        """Return the frozen adapters of a transformer whose files lie in this folder; `""` if it is alone."""
        adapters = [parse_adapter(text) for text in self.frozen_adapters or ()]
        return [adapter._replace(path=str(Path(adapter.path) / folder)) for adapter in adapters]

    @property
    def plain(self) -> bool:
        """Whether all layers are of LoRA and have one rank, alpha and scale, alpha ÷ rank."""
        return self.adapter == "lora" and not (self.lora_rslora or self.lora_rank_pattern or self.lora_alpha_pattern)


def ranks_by_pattern(text: str | None) -> dict[str, int]:
    r"""Read ranks as `PATTERN=RANK`, separated by spaces.

    Raises:
        BucketingError: If a pattern is no regular expression, or its rank no whole number of at least 1.

    Example:
        >>> ranks_by_pattern(r"blocks\.0\..*=4 to_out.0=16")
        {'blocks\\.0\\..*': 4, 'to_out.0': 16}
    """
    return _numbers_by_pattern(text, integers=True)


def alphas_by_pattern(text: str | None) -> dict[str, float]:
    """Read alphas as `PATTERN=ALPHA`, separated by spaces.

    Raises:
        BucketingError: If a pattern is no regular expression, or its alpha no positive number.

    Example:
        >>> alphas_by_pattern("to_q=0.5 to_out.0=16")
        {'to_q': 0.5, 'to_out.0': 16}
    """
    return _numbers_by_pattern(text, integers=False)


def _numbers_by_pattern(text: str | None, *, integers: bool) -> dict[str, Any]:
    """Read `PATTERN=NUMBER`, separated by spaces."""
    numbers = {}
    for entry in (text or "").split():
        pattern, _, number = entry.rpartition("=")
        try:
            re.compile(pattern)
            numbers[pattern] = plain_number(float(number), "NUMBER", integer=integers)
        except (re.error, ValueError) as error:
            raise BucketingError(f"Expected PATTERN=NUMBER, a regular expression, got {entry!r}: {error}") from error
        if not pattern or numbers[pattern] <= 0:
            smallest = "a number of at least 1" if integers else "a positive number"
            raise BucketingError(f"Expected PATTERN=NUMBER with {smallest}, got {entry!r}.")
    return numbers


class Adapter(NamedTuple):
    """Adapters, by their folder, file or repository on the hub, and their strength, where 1 is that of training."""

    path: str
    strength: float = 1.0


def parse_adapter(text: str) -> Adapter:
    """Read `PATH` or `PATH=STRENGTH`.

    Example:
        >>> parse_adapter("trained=0.8"), parse_adapter("trained")
        (Adapter(path='trained', strength=0.8), Adapter(path='trained', strength=1.0))
    """
    path, strength = split_strength(text)
    return Adapter(path, float(strength[1:])) if strength else Adapter(path)
