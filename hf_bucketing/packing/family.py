"""The class in which packing and a model family meet: packing defines it, each model family implements it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch

from ..errors import PackingError
from .attention.dispatch import Backend
from .batch import PackedBatch
from .layout import Grid, PackedLayout
from .processors import PackedAttnProcessor, PackedJointAttnProcessor
from .texts import TextRule

Transformer: TypeAlias = Any
"""A diffusers model; its attributes differ by family."""

UNLIMITED = sys.maxsize
"""Limit of an axis whose positions can be computed for any length."""


class Family(ABC):
    """How the transformers of one diffusers class attend, place their tokens and are called.

    A family holds no state; each method is given the transformer. The defaults suit a model that takes latents
    `(batch, channels, frames, height, width)`, one timestep per batch row, and text that each row attends to.

    Attributes:
        transformer_class (`str`): Name of the class in `diffusers`.
        processor_class (`type`): Packed processor of the attention modules.
        text_channels (`str`): Setting of the transformer's configuration that holds the channels of a text embedding.
        text_rule (`"masked"`, `"keep_padding"` or `"encoded_padding"`): What the pipeline does with the padding of a
            text: leaves it out of attention, attends to it as zeros, or attends to it as the text encoder makes it.
        shares_texts (`bool`): Whether samples of one caption can read one copy of it: texts are only ever attended to.
        interpolates (`bool`): Whether positions can be stretched to a base size.
        drops_tokens (`bool`): Whether tokens may be dropped: between attentions the model works on each token alone,
            and attention depends on positions, not on which tokens there are.
        by_frame (`bool`): Whether tokens attend inside frames and over frames instead of to their whole sample.
    """

    transformer_class: ClassVar[str]
    processor_class: ClassVar[type[PackedAttnProcessor | PackedJointAttnProcessor]] = PackedAttnProcessor
    text_channels: ClassVar[str] = "caption_channels"
    text_rule: ClassVar[TextRule] = "masked"
    shares_texts: ClassVar[bool] = True
    interpolates: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = True
    by_frame: ClassVar[bool] = False

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Raise PackingError if this transformer cannot run strips of that length."""
        longest = self.longest_strip(transformer)
        if strip_length > longest:
            raise PackingError(f"strip_length={strip_length} exceeds the {longest} positions of this model's axes.")

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Raise PackingError if a sample's grid exceeds the model's positions."""
        for sample, grid in enumerate(grids):
            for axis, count, limit in zip(("frames", "rows", "columns"), grid, self.limits(transformer), strict=True):
                if count > limit:
                    raise PackingError(
                        f"Sample {sample} has a token grid of {grid}, but this model has {limit} positions for "
                        f"{axis}; use a smaller size."
                    )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the largest token grid that the model has positions for."""
        return UNLIMITED, UNLIMITED, UNLIMITED

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the longest strip that the model's positions allow; a strip counts as one row of columns."""
        return self.limits(transformer)[2]

    def patch(self, transformer: Transformer) -> Grid:
        """Return latent frames, rows and columns per token."""
        size = transformer.config.patch_size
        if isinstance(size, int):
            return getattr(transformer.config, "patch_size_t", None) or 1, size, size
        t, h, w = size
        return t, h, w

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent."""
        return int(transformer.config.in_channels)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding."""
        return int(getattr(transformer.config, self.text_channels))

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the names of the per-sample tensors that the transformer's forward needs beside the text."""
        return ()

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return plausible values of [`conditioning`] for samples of these grids, for trying a model out."""
        return {}

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the packed processor for the attention module of that name; `None` keeps the module's own."""
        return self.processor_class(backend)

    @abstractmethod
    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Register hooks that give each token its position in its own sample; return their handles.

        Args:
            transformer: A transformer of this family.
            base_size (`(t, h, w)` or `None`): Token grid to which positions are stretched; `None` for the model's own.
        """

    def attach(
        self, transformer: Transformer, backend: Backend, *, base_size: Grid | None = None
    ) -> Callable[[], None]:
        """Swap the attention processors and hook the positions; return a function that undoes both."""
        handles = self.hook_positions(transformer, base_size)
        originals = {name: module.processor for name, module in _attentions(transformer)}
        for name, module in _attentions(transformer):
            module.set_processor(self.processor(name, backend) or originals[name])

        def detach() -> None:
            for handle in handles:
                handle.remove()
            for name, module in _attentions(transformer):
                module.set_processor(originals[name])

        return detach

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Return the layout with text where this family has it, and the text tokens to pad the pack to, if any.

        Args:
            transformer: A transformer of this family.
            layout ([`PackedLayout`]): The pack's layout, without padding and text slots.
            pad_to (`int`, *optional*): Strips of the padded pack.
            pad_text_to (`int`, *optional*): Text tokens of the padded pack.

        Raises:
            PackingError: If the model cannot run such texts or samples.
        """
        return layout, pad_text_to

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the transformer's forward: one timestep per strip, all texts in one batch row."""
        return {
            "hidden_states": batch.strips,
            "timestep": batch.strip_timesteps,
            "encoder_hidden_states": batch.text[None],
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the transformer's output as strips `(num_strips, channels, p_t, p_h, strip_length·p_w)`."""
        return output

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run the unpacked transformer on one sample as its pipeline does.

        Args:
            transformer: A transformer of this family, packing not enabled.
            latent (`torch.Tensor` of shape `(channels, frames, height, width)`): The sample.
            timestep (`torch.Tensor` of shape `()`): The sample's timestep.
            text (`torch.Tensor` of shape `(length, text_dim)`): The sample's text.
            conditioning (mapping of `str` to `torch.Tensor`): The sample's row of each further tensor.

        Returns:
            `torch.Tensor` of shape `(out_channels, frames, height, width)`.
        """
        output: torch.Tensor = transformer(
            hidden_states=latent[None],
            timestep=timestep[None],
            encoder_hidden_states=text[None],
            return_dict=False,
            **{name: values[None] for name, values in conditioning.items()},
        )[0]
        return output[0]


def _attentions(transformer: Transformer) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in transformer.named_modules() if hasattr(module, "set_processor")]
