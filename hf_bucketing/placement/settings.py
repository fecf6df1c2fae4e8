"""How a model is kept in memory while it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import BucketingError
from ..settings import check_at_least, check_literals, setting

Precision: TypeAlias = Literal["no", "fp16", "bf16"]

Quantization: TypeAlias = Literal["int8", "float8", "nf4"]


def checkpointing(text: str) -> bool | int | Literal["auto"]:
    """Read the value of the flag of gradient checkpointing.

    Raises:
        BucketingError: If it is neither true, false, a number nor auto.
    """
    known: dict[str, bool | Literal["auto"]] = {"true": True, "yes": True, "false": False, "no": False, "auto": "auto"}
    if text.lower() in known:
        return known[text.lower()]
    if text.isdecimal():
        return _checked(int(text))
    raise BucketingError(f"`gradient_checkpointing` must be true, false, a number of blocks or auto, got {text!r}.")


def _checked(blocks: object) -> bool | int | Literal["auto"]:
    """Return which blocks are checkpointed; as flags of 1 and 0 do, the numbers 1 and 0 mean true and false."""
    if isinstance(blocks, int) and blocks >= 0:
        return bool(blocks) if blocks < 2 else int(blocks)
    if blocks == "auto":
        return "auto"
    raise BucketingError(
        f'`gradient_checkpointing` must be true, false, a number of blocks from 2 on or "auto", got {blocks!r}.'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Precision, quantisation, offload, parallelism and compilation of the transformer.

    Args:
        gradient_checkpointing (`bool`, `int` or `"auto"`): Whether the backward pass computes activations of blocks
            again, to save memory: of all blocks, or of a number of them, from 2 on, spread evenly. With `"auto"`, a
            run plans how few of them are enough for its most expensive step, with a margin.
        trained_dtype (`"float32"` or `"bf16"`): Precision in which trained weights and the optimizer's moments are
            kept. In bf16 a step changes a weight only if the update is more than 1/256 of it; smaller ones are lost,
            so that low learning rates may learn nothing.
        quantize_base (`"int8"`, `"float8"` or `"nf4"`, *optional*): Format of the frozen weights under LoRA; by
            default they are not quantised. int8 and float8 need torchao, nf4 bitsandbytes and a GPU.
        vae_tiling (`bool`): Whether the VAE encodes and decodes sample by sample and tile by tile, which takes less
            memory and changes results slightly: tiles do not see each other. Caches are made with the flag of the same
            name of hf_bucketing cache.
        offload_blocks (`int`): Blocks of the frozen transformer that wait on the CPU and come to the device when they
            are computed; they need LoRA and gradient checkpointing.
        offload_idle_expert (`bool`): Whether the frozen weights of the transformer that a step does not train wait on
            the CPU, with `trained_component="both"` and LoRA. By default both transformers stay on the device.
        offload_activations (`bool`): Whether activations that the backward pass needs wait on the CPU.
        context_parallel_degree (`int`): Processes that share each sample, with a part of its tokens each (Ulysses),
            for samples that one device cannot hold. Batches are those of such a group, in place of a process.
        compile (`bool`): Whether the transformer's blocks are compiled by torch: steps take less time and memory after
            the first ones, which compile.

    Raises:
        BucketingError: On an impossible value.
    """

    gradient_checkpointing: bool | int | Literal["auto"] = setting(
        False, common=True, parse=checkpointing, left_open="auto"
    )
    trained_dtype: Literal["float32", "bf16"] = setting("float32", on_resume="equal")
    quantize_base: Quantization | None = setting(None, on_resume="equal")
    vae_tiling: bool = False
    offload_blocks: int = 0
    offload_idle_expert: bool = False
    offload_activations: bool = False
    context_parallel_degree: int = setting(
        1, chosen=True, on_resume="plan", needs_rows="processes that share their samples read them from a plan"
    )
    compile: bool = setting(False, on_resume="free", planned=False)

    def __post_init__(self) -> None:
        check_literals(self)
        object.__setattr__(self, "gradient_checkpointing", _checked(self.gradient_checkpointing))
        check_at_least(0, self, "offload_blocks")
        check_at_least(1, self, "context_parallel_degree")
