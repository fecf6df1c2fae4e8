"""How Lumina 2 is packed: refiners of tokens and of text, then both in one sequence, at positions after the text.

The pipeline masks the padding of a text: pass what the mask keeps. The stock model sees every strip as an image with a
text of `text_slots` tokens; `rope_embedder` gets hooks that replace the positions by those in the strips' own samples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...devices import to_device
from ...packing.batch import Rows
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import Tables
from ..joint import hook_row_modulation, joint_tables
from ..refined import RefinedFamily


class Lumina2Family(RefinedFamily):
    """Packing of `Lumina2Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "Lumina2Transformer2DModel"
    tested_forwards = ("5a928d818acb",)
    stock_processors = ("Lumina2AttnProcessor2_0",)
    text = replace(RefinedFamily.text, shortest=1)
    latents_as = "images"
    width_settings = ("hidden_size",)
    attention_kwargs = "attention_kwargs"

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions, and the norms, to modulate text by its own sample's timestep."""
        locate = partial(_locate, Tables(_positions))
        return [
            transformer.rope_embedder.register_forward_pre_hook(_without_waiting),
            transformer.rope_embedder.register_forward_hook(locate),
            *hook_row_modulation([layer.norm1 for layer in transformer.layers], text_first=True),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the time from noise to data, as the pipeline does, and the mask of the text."""
        return {
            **super().inputs(rows),
            "timestep": 1 - rows.timesteps / 1000,
            "encoder_attention_mask": rows.known_mask.long(),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Move the model's tables of positions to the device once, instead of a copy in each forward."""
        _move_tables(transformer.rope_embedder, rows.latents.device)
        return {}


def _positions(module: Any, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the rotary tables of a sample's tokens, `(h·w, D/2)`, and of its text, `(length, D/2)`, by the module."""
    (_, rows, columns), length = key
    _move_tables(module, device)
    image = torch.empty(1, 0, rows * module.patch_size, columns * module.patch_size, device=device)
    mask = torch.ones(1, length, dtype=torch.long)  # on the CPU, where its length is read
    _, of_text, of_tokens, *_ = module.forward(image, mask)  # instead of module(…), which would call the hook again
    return of_tokens[0], of_text[0]


def _without_waiting(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Put the mask of the text slots, whose sums the module reads, on the CPU: in a pack all of them count.

    The module's tables, which it would copy to the device in each forward, are moved there once.
    """
    tokens, mask = args
    _move_tables(module, tokens.device)
    return tokens, torch.ones(mask.shape, dtype=mask.dtype)


def _move_tables(module: Any, device: torch.device) -> None:
    module.freqs_cis = [to_device(table, device) for table in module.freqs_cis]


def _locate(tables: Tables, module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the tables of text slots, of tokens, and of rows of both, in what the module returns."""
    tokens, _, _, _, *lengths = output
    strips, slots = joint_tables(tables, module)
    return tokens, slots, strips, torch.cat([slots, strips], 1), *lengths


FAMILY = Lumina2Family()
