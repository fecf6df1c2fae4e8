"""Ideogram 4: images whose tokens attend with their text in one sequence, at positions apart from those of text.

The pipeline masks the padding of a text: pass what the mask keeps. A latent is what the model takes: a pixel of it
holds the channels of 2×2 pixels of the VAE's. The model runs from noise at time 0 to data at time 1 and predicts
data − noise. Its pipeline turns that round, and so does this family: timesteps are the scheduler's, up to 1000. The
model embeds times in the dtype in which they come, so they get that of the latents, as from the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import Tables, axis_coordinates, over_grid
from ...packing.processors import PackedRowAttnProcessor, Rotary, turn_halves
from ...packing.texts import TextTokens, apply_text_mask, pad_texts
from ..joint import JointFamily, ModulatedRows, joint_tables, of_text
from ..shift import ShiftByRoot, ShiftLaw
from ..texts import TextEmbeddings
from .flux2 import BlockRecipe, encode_blocks

IMAGE, TEXT = 2, 3
"""What the model calls a token of the image and one of the text; it leaves all others out."""
FIRST_POSITION = 65536
"""Position of the first row and column of an image, behind those of any text."""


class PackedIdeogram4AttnProcessor(PackedRowAttnProcessor):
    """Attention of Ideogram 4 over the strips of a pack."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary = (),
    ) -> torch.Tensor:
        """Attend inside each sample, given cosines and sines `(strips, length, D)`."""
        return super().__call__(attn, hidden_states, freqs_cis=torch.cat(image_rotary_emb, -1))

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate `(N, H, D)` by cosines and sines side by side, `(N, 2·D)`, in their own dtype, as stock."""
        cosines, sines = rotary[0].unsqueeze(-2).chunk(2, -1)
        return tokens * cosines + turn_halves(tokens) * sines


class Ideogram4Family(JointFamily):
    """Packing of `Ideogram4Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Ideogram 4"
    transformer_class = "Ideogram4Transformer2DModel"
    tested_forwards = ("2551376274f6",)
    processor_class = PackedIdeogram4AttnProcessor
    stock_processors = ("Ideogram4AttnProcessor",)
    text = TextTokens(rows="slots", channels="llm_features_dim")
    cast_inputs = ("hidden_states", "encoder_hidden_states", "timestep")
    images_only = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    negates = True
    original_names = (
        *((f"layers.*.attention.to_{name}", "layers.*.attention.qkv") for name in "qkv"),
        ("layers.*.attention.to_out.0", "layers.*.attention.o"),
        ("layers.*.feed_forward.**", "layers.*.feed_forward.**"),
        ("layers.*.adaln_modulation", "layers.*.adaln_modulation"),
    )
    token_patch = (1, 1, 1)
    timestep_unit = 1000
    turns_timesteps = True

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions, and the modulation, to modulate text by its own sample's timestep."""
        modulations = [layer.adaln_modulation for layer in transformer.layers]
        return [
            transformer.rotary_emb.register_forward_hook(partial(_locate, Tables(_positions))),
            *(modulation.register_forward_hook(_modulate_row) for modulation in modulations),
        ]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return rows of text and tokens, and what says which is which; hooks replace the positions in a pack."""
        inputs, kept = super().inputs(rows), rows.known_mask.long()
        length, count = rows.text.shape[1], math.prod(rows.grid)
        return {
            **inputs,
            "hidden_states": F.pad(inputs["hidden_states"], (0, 0, length, 0)),
            "encoder_hidden_states": F.pad(rows.text, (0, 0, 0, count)),
            "timestep": inputs["timestep"].to(rows.latents.dtype),
            "position_ids": _position_ids(kept, rows.grid),
            "segment_ids": F.pad(kept, (0, count), value=1),
            "indicator": F.pad(TEXT * kept, (0, count), value=IMAGE),
        }

    def restored(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        """Return latents without the text, which the model returns in front of them."""
        return super().restored(output[:, -math.prod(grid) :], grid, patch)


def _position_ids(kept: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return positions `(rows, length + h·w, 3)`; texts count what their mask `kept`, `(rows, length)`, keeps."""
    axes = over_grid(axis_coordinates(grid, None, device=kept.device, dtype=kept.dtype))
    image, words = FIRST_POSITION + torch.stack(axes, 1), kept.cumsum(1)[..., None] - 1
    return torch.cat([words.expand(-1, -1, 3), image.expand(len(kept), -1, -1)], 1)


def _positions(module: Any, key: tuple[Grid, int], *, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines, side by side, of a sample's tokens, `(h·w, 2·D)`, and of its text, `(length, 2·D)`."""
    grid, length = key
    ids = _position_ids(torch.ones(1, length, dtype=torch.long, device=device), grid)
    table = torch.cat(module.forward(ids), -1)[0]  # instead of module(…), which would call the hook again
    return table[length:], table[:length]


def _locate(tables: Tables, module: Any, args: Any, output: Rotary) -> Rotary:
    tokens, text = joint_tables(tables, module)
    return torch.cat([text, tokens], 1).chunk(2, -1)


class _Modulation(ModulatedRows):
    """Modulation whose gates the blocks pass to `torch.tanh`."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0].tanh() if function is torch.tanh else NotImplemented


def _modulate_row(
    module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor | ModulatedRows | None:
    """Modulate the text before each row's tokens as its own sample."""
    layout, text = active_layout(), of_text(output)
    return None if text is output else _Modulation([text, output], [*layout.row_sizes])


class Ideogram4Recipe(BlockRecipe):
    """Recipe of `Ideogram4Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    The `transformer` is trained; the `unconditional_transformer`, which guides it and takes no text, stays as it is.
    The pipeline takes no caption of more than `max_sequence_length` tokens, and can rewrite prompts as JSON by a
    language model (`prompt_upsampling`); captions are trained as they are.
    """

    pipeline_class = "Ideogram4Pipeline"
    family = Ideogram4Family()
    default_sequence_length = 2048
    trims_text = True
    native_sizes = ((1024, 1024), (2048, 2048))
    call_defaults = MappingProxyType({"guidance_scale": 7.0, "guidance_schedule": None})

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] to normalised blocks, `(B, 4·C, 1, h/2, w/2)`, channels last."""
        vae = self.pipeline.vae
        blocks = encode_blocks(vae, pixel_values, epsilon=vae.config.batch_norm_eps, channels_first=False)
        return blocks[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as beside an image without tokens; the padding, in front of a text, is moved behind it."""
        encoder = self.pipeline.text_encoder
        values, _, _, kinds = self.pipeline.encode_prompt(captions, 0, 0, self.max_sequence_length, encoder.device)
        values, mask = pad_texts(apply_text_mask("masked", values, mask=kinds == TEXT))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)

    def shift(self) -> ShiftLaw:
        """Return the shift of the pipeline's call, whose noise levels do not depend on its scheduler's configuration.

        It draws their logits from a normal distribution, of deviation 1.5, around half the logarithm of the pixels,
        compared with 512×512.
        """
        return ShiftByRoot(base=512 * 512, factor=1.0)


RECIPES = (Ideogram4Recipe,)
