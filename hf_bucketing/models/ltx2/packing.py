"""How LTX-2 is packed: its video stream alone; positions in seconds and pixels, text modulated by the noise level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb

from ...devices import to_device
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import Tables, position_strips
from ...packing.processors import PackedAttnProcessor, Rotary
from ...packing.texts import TextTokens
from ..ltx.packing import over_sample


class PackedLTX2AttnProcessor(PackedAttnProcessor):
    """Self- and cross-attention of LTX-2's video stream, `LTX2Attention`, over the strips of a pack."""

    norms_whole_width = True

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: Rotary | None = None,
        key_rotary_emb: None = None,
        perturbation_mask: None = None,
        all_perturbed: bool | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; the last three are those of cross-modal attention and of perturbed guidance."""
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, query_rotary_emb)

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate `(N, H, D)` as the model does, by tables of strips: by head where it splits heads into halves."""
        turn = apply_split_rotary_emb if rotary[0].ndim == 4 else apply_interleaved_rotary_emb
        rotated: torch.Tensor = turn(tokens.flatten(1).unflatten(0, (len(rotary[0]), -1)), rotary)
        return rotated.reshape(tokens.shape)

    def gate(self, attn: Any, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scale each head by its gate, which the model computes from the tokens that attend."""
        if attn.to_gate_logits is None:
            return attended
        return attended * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))).flatten(0, 1).unsqueeze(-1)


class LTX2Family(Family):
    """Packing of `LTX2VideoTransformer3DModel` without audio; see [`Family`][hf_bucketing.packing.family.Family].

    Attention between video and audio is switched off (`isolate_modalities`), which is how LTX-2's own trainer trains
    video without audio. The stock forward needs some audio all the same: each row gets one token of zeros.

    `fps`, `(n,)`, are frames per second. Models that modulate their text by the noise level (LTX-2.3) also take
    `sigma`, `(n,)`: the sample's timestep, while its tokens may have others, such as 0 for a clean first frame.
    """

    transformer_class = "LTX2VideoTransformer3DModel"
    tested_forwards = ("7fd2cf36be02",)
    processor_class = PackedLTX2AttnProcessor
    stock_processors = ("LTX2AudioVideoAttnProcessor", "LTX2PerturbedAttnProcessor")
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)
    timesteps_per = "token"
    max_references = UNLIMITED
    text = TextTokens(rows="per_strip")
    cast_inputs = (*Family.cast_inputs, "audio_hidden_states", "audio_encoder_hidden_states")

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return the parts of the audio stream, and of the attention between both."""
        return "audio", "av_cross_attn", "video_a2v", "keyframes"

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding, which the model or the connectors before it project."""
        config = transformer.config
        return int(config.caption_channels if config.use_prompt_embeddings else config.cross_attention_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return frames per second, drawn as 24, and the noise level of models that modulate their text by it."""
        draws: dict[str, Draw] = {"fps": lambda grids: torch.full((len(grids),), 24.0)}
        if modulates_text(transformer):
            draws["sigma"] = lambda grids: 1000 * torch.rand(len(grids))
        return draws

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the processor of the video's self- and cross-attention; audio keeps its own."""
        return super().processor(name, backend) if name.split(".")[-1] in ("attn1", "attn2") else None

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the transformer each token's own coordinates, and the audio."""
        complete = partial(_complete, Tables(_coordinates), Tables(_reference_coordinates))
        return [transformer.register_forward_pre_hook(complete, with_kwargs=True)]

    def parallel_plan(self, transformer: Transformer) -> dict[str, Any]:
        """Split the tables of models that rotate by head, `(rows, H, tokens, channels)`, by tokens."""
        plan = transformer._cp_plan
        if transformer.config.rope_type != "split":
            return dict(plan)
        tables = {table: replace(rule, split_dim=2, expected_dims=4) for table, rule in plan["rope"].items()}
        return {**plan, "rope": tables}

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Give each sample a text of its own, since the model may modulate it by the sample's noise level."""
        return replace(layout, caption_ids=None), pad_text_to

    def rows(self, batch: PackedBatch) -> Rows:
        """Give each text token the noise level of its own sample."""
        rows = super().rows(batch)
        if "sigma" not in batch.conditioning:
            return rows
        layout = batch.layout
        lengths = to_device(torch.tensor(layout.text_lengths), layout.device)
        sigmas = batch.conditioning["sigma"].repeat_interleave(lengths, output_size=sum(layout.text_lengths))
        padded = F.pad(sigmas, (0, layout.text_padding))
        by_row = replace(batch, text=padded[:, None]).text_by_strip().squeeze(-1)
        return replace(rows, conditioning={**rows.conditioning, "sigma": by_row})

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Isolate the video, and add the noise level of the audio and the mask of the text."""
        clean = torch.zeros(len(rows.latents), device=rows.latents.device)
        return {
            "sigma": clean,
            **super().inputs(rows),
            "encoder_attention_mask": rows.text_mask,
            "audio_timestep": clean,
            "audio_sigma": clean,
            "audio_num_frames": 1,
            "isolate_modalities": True,
            "use_cross_timestep": True,
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the coordinates of the tokens, which each row has by its own frame rate, and the audio."""
        device = rows.latents.device
        (pixels,) = _coordinates(transformer, rows.grid, device=device)
        if rows.references:
            pixels = torch.cat([pixels, *_reference_coordinates(transformer, rows.grids, device=device)])
        coordinates = _in_seconds(pixels.expand(len(rows.latents), -1, -1, -1), rows.conditioning["fps"])
        return {"video_coords": coordinates, **_audio(transformer, rows.latents)}


def modulates_text(transformer: Transformer) -> bool:
    """Return whether a transformer modulates its text by the noise level."""
    return bool(transformer.prompt_modulation and transformer.config.use_prompt_adaln_single)


def _coordinates(transformer: Any, grid: Grid, *, device: torch.device) -> tuple[torch.Tensor]:
    """Return the first and the last frame, row and column of pixels of each token of a grid, `(t·h·w, 3, 2)`."""
    rope = transformer.rope
    frames, height, width = grid[0] * rope.patch_size_t, grid[1] * rope.patch_size, grid[2] * rope.patch_size
    return (rope.prepare_video_coords(1, frames, height, width, device, fps=1.0)[0].transpose(0, 1),)


def _reference_coordinates(transformer: Any, grids: tuple[Grid, ...], *, device: torch.device) -> tuple[torch.Tensor]:
    """Place references over their sample: tokens of one that is smaller by a factor cover as much more."""
    located = [_coordinates(transformer, grid, device=device)[0] for grid in grids[1:]]
    return (over_sample(located, grids),)


def _in_seconds(pixels: torch.Tensor, fps: torch.Tensor) -> torch.Tensor:
    """Return the coordinates of the tokens of rows, `(rows, tokens, 3, 2)`, as the model takes them: time first."""
    frames, sides = pixels.transpose(1, 2).split([1, 2], 1)
    return torch.cat([frames / to_device(fps, frames.device, dtype=frames.dtype).view(-1, 1, 1, 1), sides], 1)


def _audio(transformer: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an audio of one token for each row, and a text of one token for it."""
    config, shape = transformer.config, (len(rows), 1)
    text_dim = config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim
    return {
        "audio_hidden_states": rows.new_zeros(*shape, config.audio_in_channels),
        "audio_encoder_hidden_states": rows.new_zeros(*shape, text_dim),
    }


def _complete(
    tables: Tables, references: Tables, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    rows = kwargs["hidden_states"]
    (pixels,) = position_strips(
        active_layout(),
        lambda grid: tables(transformer, grid, rows.device),
        lambda grids: references(transformer, grids, rows.device),
    )
    return args, {**kwargs, "video_coords": _in_seconds(pixels, kwargs["fps"]), **_audio(transformer, rows)}


FAMILY = LTX2Family()
