"""Settings of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import BucketingError
from ..settings import check_at_least, setting

LoraFormat: TypeAlias = Literal["diffusers", "comfyui", "both"]
"""Whose names and scales a file of LoRA weights has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters.

    Args:
        lora_rank (`int`, *optional*): Rank of the adapters; by default the whole transformer is trained, without
            adapters.
        lora_alpha (`int`, *optional*): Numerator of the scale, which is alpha ÷ rank; by default the alpha of
            `init_from_adapters`, or else the rank.
        lora_targets (`str`, *optional*): Module-name suffixes that receive LoRA, separated by commas; by default the
            model's projections of attention.
        init_from_adapters (`str`, *optional*): LoRA weights to start from, by default none: a file of diffusers,
            ComfyUI or another trainer, or a folder with pytorch_lora_weights.safetensors.
        lora_format (`"diffusers"`, `"comfyui"` or `"both"`): Programs that the saved adapters are for; `both` writes
            diffusers' file alone for models whose names in ComfyUI are not proven.

    Raises:
        BucketingError: On a number below 1, or a setting of adapters without a rank.
    """

    lora_rank: int | None = None
    lora_alpha: int | None = setting(None, left_open=None)
    lora_targets: str | None = setting(None, left_open=None)
    init_from_adapters: str | None = setting(None, on_resume="free")
    lora_format: LoraFormat = setting("both", on_resume="free")

    def __post_init__(self) -> None:
        check_at_least(1, self, "lora_rank", "lora_alpha")
        if self.lora_alpha is not None and self.lora_rank is None:
            raise BucketingError("`lora_alpha` scales adapters; give their rank too (`lora_rank`).")
        if self.lora_format != "both" and self.lora_rank is None:
            raise BucketingError("`lora_format` is that of saved adapters; give their rank too (`lora_rank`).")
        if self.init_from_adapters is not None and self.lora_rank is None:
            raise BucketingError("`init_from_adapters` starts from LoRA weights; give their rank too (`lora_rank`).")
