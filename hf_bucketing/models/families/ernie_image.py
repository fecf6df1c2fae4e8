"""ERNIE-Image: images in 2×2 blocks, at positions after their text, in one sequence with it.

The pipeline masks the padding of a text: pass what the mask keeps. A latent is what the model takes: a pixel of it
holds the channels of 2×2 pixels of the VAE's. Timesteps are the scheduler's, up to 1000.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import Tables, axis_coordinates, over_grid
from ...packing.processors import PackedRowAttnProcessor, turn_halves
from ...packing.texts import TextTokens, pad_texts
from ..joint import JointFamily, ModulatedRows, joint_tables, of_text
from ..texts import TextEmbeddings
from .flux2 import BlockRecipe, encode_blocks

VARIANCE_EPSILON = 1e-5
"""What the pipeline adds to the variance of latents before it takes the root."""


class PackedErnieImageAttnProcessor(PackedRowAttnProcessor):
    """Attention of ERNIE-Image over the strips of a pack."""

    text_first = False

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, given angles `(strips, length, 1, D)`."""
        return super().__call__(attn, hidden_states, freqs_cis=freqs_cis)

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Turn `(N, H, D)` by angles `(N, 1, D)`: the halves of a head's channels against each other."""
        cosines, sines = (function(rotary[0]).to(tokens.dtype) for function in (torch.cos, torch.sin))
        return tokens * cosines + turn_halves(tokens) * sines


class ErnieImageFamily(JointFamily):
    """Packing of `ErnieImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "ERNIE-Image"
    transformer_class = "ErnieImageTransformer2DModel"
    tested_forwards = ("952bee71f366",)
    processor_class = PackedErnieImageAttnProcessor
    stock_processors = ("ErnieImageSingleStreamAttnProcessor",)
    text = TextTokens(rows="slots", channels="text_in_dim", shortest=1)
    cast_inputs = ("hidden_states", "text_bth")
    images_only = True
    latents_as = "images"
    width_settings = ("hidden_size",)
    original_names = (("layers.**", "layers.**"),)  # ComfyUI takes the names of diffusers

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions, and the modulation, to modulate text by its own sample's timestep."""
        return [
            transformer.pos_embed.register_forward_hook(partial(_locate, Tables(_positions))),
            transformer.adaLN_modulation.register_forward_hook(_modulate),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the texts with their lengths; in a pack all slots count, and the layout says what they hold."""
        inputs = super().inputs(rows)
        text = inputs.pop("encoder_hidden_states")
        return {**inputs, "text_bth": text, "text_lens": rows.known_mask.long().sum(1)}


def _positions(module: Any, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the angles of a sample's tokens, `(h·w, 1, D)`, and those of its text before them, `(length, 1, D)`."""
    grid, length = key
    frames, *sides = axis_coordinates(grid, None, device=device)
    tokens = torch.stack(over_grid([frames + length, *sides]), 1)
    text = torch.zeros(length, 3, device=device)
    text[:, 0] = torch.arange(length, device=device)
    # module.forward instead of module(…), which would call the hook again
    return module.forward(tokens[None])[0], module.forward(text[None])[0]


def _locate(tables: Tables, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.cat(joint_tables(tables, module), 1)


class _SequenceFirst(ModulatedRows):
    """Modulation `(strips, dim)` of tokens and text that the model repeats along the sequence, its first axis."""

    def expand(self, *sizes: int) -> torch.Tensor:
        pairs = zip(self.parts, self.sizes, strict=True)
        return torch.cat([part.expand(size, -1, -1) for part, size in pairs])


def _modulate(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | ModulatedRows:
    layout, text = active_layout(), of_text(output)
    return output if text is output else _SequenceFirst([output, text], [layout.strip_length, layout.text_slots])


class ErnieImageRecipe(BlockRecipe):
    """Recipe of `ErnieImagePipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    The pipeline rewrites short prompts by a language model (`use_pe`), where it has one; captions are trained as they
    are. It takes those of any length; here `max_sequence_length` cuts them.
    """

    pipeline_class = "ErnieImagePipeline"
    family = ErnieImageFamily()
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1024, 1024),)

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] to normalised blocks, `(B, 4·C, 1, h/2, w/2)`."""
        return encode_blocks(self.pipeline.vae, pixel_values, epsilon=VARIANCE_EPSILON)[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions one by one, as the pipeline does, and pad them for a mask."""
        values, mask = pad_texts(self._encode_prompt(captions))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)


RECIPES = (ErnieImageRecipe,)
