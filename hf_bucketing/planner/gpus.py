"""GPUs: their peak speed, the share of it that training reaches, and their price. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import BucketingError


class Gpu(NamedTuple):
    """GPU by its memory in GiB and its peak in TFLOP/s: products of bf16 summed in float32, without sparsity.

    `name` is what its driver calls it.
    """

    memory: float
    tflops: float
    name: str


GPUS = {
    "rtx-4080": Gpu(16, 97.5, "NVIDIA GeForce RTX 4080"),
    "rtx-4090": Gpu(24, 165.2, "NVIDIA GeForce RTX 4090"),
    "rtx-3090": Gpu(24, 71.0, "NVIDIA GeForce RTX 3090"),
    "rtx-5090": Gpu(32, 209.5, "NVIDIA GeForce RTX 5090"),
    "a100-40": Gpu(40, 312.0, "NVIDIA A100-SXM4-40GB"),
    "l40s": Gpu(48, 362.0, "NVIDIA L40S"),
    "h100": Gpu(80, 989.4, "NVIDIA H100 80GB HBM3"),
    "a100": Gpu(80, 312.0, "NVIDIA A100-SXM4-80GB"),
    "h200": Gpu(141, 989.4, "NVIDIA H200"),
    "b200": Gpu(180, 2250.0, "NVIDIA B200"),
}
"""GPUs by name, of those of equal memory the usual one first. Sources: NVIDIA's whitepapers of GA102, AD102, AD103 and
GB202, and its data sheets of A100, L40S, H100, H200 and HGX B200, of whose figures with sparsity half counts."""


class Utilisation(NamedTuple):
    """Share of the peak that all operations of a step reach, recomputation included, from the least to the most.

    `block_tflop` are the TFLOP of a step in each block from which on it holds.
    """

    block_tflop: float
    least: float
    most: float


MEASURED = (Utilisation(0, 0.12, 0.31), Utilisation(16, 0.24, 0.45))
"""Shares that were measured on one H100 with checkpointing, by size of the step; below 16 TFLOP the range is that of
both sizes around it. 4 TFLOP in each block (LoRA of Wan 1.3B, three images of 3,600 tokens): 0.12; 16 to 19 (LoRA and
all weights of Wan 1.3B, 32,760 tokens): 0.24 to 0.31; 124 to 221 (all weights at the width of Wan 14B, 37,440
tokens): 0.38 to 0.45, by the faster of two kernels, so that 0.24 stays the least. Nothing was measured on several
GPUs, nor on others. NVIDIA's DFM publishes 176 and 229 TFLOP/s per H100 for Wan 14B through diffusers' model on 8 and
64 of them, and 326 through Megatron's on 128; by which count is not stated."""


def peak_of_device(name: str) -> float | None:
    """Return the peak in TFLOP/s of the GPU that a driver calls so; None of one that is not in the table.

    A name must be that of the table as a whole: an RTX 4080 SUPER or an H100 PCIe has another peak.

    Example:
        >>> peak_of_device("NVIDIA H100 80GB HBM3"), peak_of_device("NVIDIA H100 PCIe")
        (989.4, None)
    """
    return next((gpu.tflops for gpu in GPUS.values() if gpu.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeConfig:
    """Speed and price of GPUs.

    Args:
        gpu (`str`, *optional*): GPU whose peak counts: rtx-4080, rtx-3090, rtx-4090, rtx-5090, a100-40, a100, l40s,
            h100, h200 or b200 (default: guessed from its memory).
        peak_tflops (`float`, *optional*): Peak of another GPU in TFLOP/s: dense products of bf16, summed in float32.
        utilisation (`list` of `float`, *optional*): Least and largest share of the peak that training reaches
            (default: as measured on an H100, by the size of a step).
        price_per_hour (`float`, *optional*): Price of an hour of one GPU, in any currency.

    Raises:
        BucketingError: If the GPU is not known, or a number is out of range.
    """

    gpu: str | None = None
    peak_tflops: float | None = None
    utilisation: list[float] | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu not in GPUS:
            raise BucketingError(f"`gpu` must be one of {', '.join(GPUS)}, got {self.gpu!r}; give `peak_tflops`.")
        if self.gpu is not None and self.peak_tflops is not None:
            raise BucketingError("`gpu` and `peak_tflops` both name the peak of the GPU; give one of them.")
        if self.peak_tflops is not None and not self.peak_tflops > 0:
            raise BucketingError(f"`peak_tflops` must be above 0, got {self.peak_tflops}.")
        shares = self.utilisation
        if shares is not None and (len(shares) != 2 or not 0 < shares[0] <= shares[1] <= 1):
            raise BucketingError(
                "`utilisation` must be two shares of the peak, the least and the most, above 0 and at most 1; got "
                f"{shares}."
            )
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise BucketingError(f"`price_per_hour` must be at least 0, got {self.price_per_hour}.")

    def peak_of(self, memory: float) -> tuple[float, str]:
        """Return the peak in TFLOP/s, and of what it is: of the GPU that is given, or of one with `memory` GiB."""
        if self.peak_tflops is not None:
            return self.peak_tflops, "the GPU, as given"
        nearest = min(GPUS, key=lambda name: abs(GPUS[name].memory - memory))
        name = self.gpu or nearest
        return GPUS[name].tflops, name if self.gpu else f"{name}, a guess from {memory:g} GiB"
