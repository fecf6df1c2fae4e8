"""CogVideoX 2B, 5B and 1.5: sincos, rotary or learned positions; text before the video in one attention sequence.

CogVideoX attends to the padding of its text (226 tokens) as encoded: hand over the embeddings as the pipeline makes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from ...errors import PackingError
from ..context import active_layout
from ..layout import Grid, PackedLayout
from ..strips import position_rows
from .base import UNLIMITED, Transformer
from .joint import JointFamily, refuse_stale_fusion

if TYPE_CHECKING:
    from diffusers.models.embeddings import CogVideoXPatchEmbed

    from ..pack import PackedBatch


class CogVideoXFamily(JointFamily):
    """Recipe of `CogVideoXTransformer3DModel`; see [`Family`][hf_bucketing.packing.families.Family]."""

    text_rule = "encoded_padding"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse a table of positions for patches of several frames, which the model itself cannot add."""
        refuse_stale_fusion(transformer)
        if _has_table(transformer) and transformer.config.patch_size_t is not None:
            raise PackingError(
                "This CogVideoX transformer has a table of positions and patch_size_t, which do not go together."
            )
        super().check(transformer, strip_length=strip_length)

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Refuse samples beyond the positions of CogVideoX 1.5, or of another size than learned ones are for."""
        super().check_grids(transformer, grids)
        height, width = _base_grid(transformer)
        for sample, grid in enumerate(grids):
            if transformer.config.use_learned_positional_embeddings and grid[1:] != (height, width):
                raise PackingError(
                    f"Sample {sample} has a token grid of {grid}, but the learned positions of this model are for "
                    f"{height}×{width} tokens per frame (sample_height, sample_width); it cannot run other sizes."
                )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides of the sample size for CogVideoX 1.5, whose positions are cut from it."""
        if transformer.config.patch_size_t is None:
            return UNLIMITED, UNLIMITED, UNLIMITED
        return UNLIMITED, *_base_grid(transformer)

    def longest_strip(self, transformer: Transformer) -> int:
        """Return no limit: positions are not looked up for a strip."""
        return UNLIMITED

    def text_dim(self, transformer: Transformer) -> int:
        """Return the configured text channels."""
        return int(transformer.config.text_embed_dim)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return `ofs`, `(n,)`, for the image-to-video model of 1.5."""
        return ("ofs",) if transformer.config.ofs_embed_dim else ()

    def with_text_slots(self, transformer: Transformer, layout: PackedLayout) -> PackedLayout:
        """Refuse texts of another length than a table of positions is for."""
        length = transformer.config.max_text_seq_length
        if _has_table(transformer) and set(layout.text_lengths) != {length}:
            raise PackingError(
                f"This CogVideoX transformer takes texts of {length} tokens, padding included "
                f"(max_text_seq_length); got {layout.text_lengths}."
            )
        return super().with_text_slots(transformer, layout)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass each sample's own rotary positions, and add its own table instead of the module's."""
        handles: list[Any] = []
        if transformer.config.use_rotary_positional_embeddings:
            handles.append(transformer.register_forward_pre_hook(_pass_rotary, with_kwargs=True))
        if _has_table(transformer):
            handles += [_Tableless(transformer.patch_embed), transformer.patch_embed.register_forward_hook(_add_table)]
        return handles

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Put frames before channels."""
        return {**super().forward_kwargs(batch), "hidden_states": batch.strips.transpose(1, 2)}

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Put channels before frames."""
        return output.transpose(1, 2)

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run a batch of one, with the rotary positions of its size."""
        p_t, p_h, p_w = self.patch(transformer)
        grid = (latent.shape[1] // p_t, latent.shape[2] // p_h, latent.shape[3] // p_w)
        rotary = transformer.config.use_rotary_positional_embeddings
        output: torch.Tensor = transformer(
            hidden_states=latent.transpose(0, 1)[None],
            timestep=timestep[None],
            encoder_hidden_states=text[None],
            image_rotary_emb=_rotary(transformer, grid, latent.device) if rotary else None,
            **{name: value[None] for name, value in conditioning.items()},
            return_dict=False,
        )[0]
        return output[0].transpose(0, 1)


class _Tableless:
    """Keep a patch embedding from adding positions, until removed: a strip's table does not fit its text slots."""

    def __init__(self, embed: CogVideoXPatchEmbed) -> None:
        self.embed = embed
        self.flags = embed.use_positional_embeddings, embed.use_learned_positional_embeddings
        embed.use_positional_embeddings = embed.use_learned_positional_embeddings = False

    def remove(self) -> None:
        """Let it add its positions again."""
        self.embed.use_positional_embeddings, self.embed.use_learned_positional_embeddings = self.flags


def _has_table(transformer: Transformer) -> bool:
    """Return whether positions are added to the tokens, instead of or beside rotating queries and keys."""
    config = transformer.config
    return not config.use_rotary_positional_embeddings or bool(config.use_learned_positional_embeddings)


def _base_grid(transformer: Transformer) -> tuple[int, int]:
    config = transformer.config
    return config.sample_height // config.patch_size, config.sample_width // config.patch_size


def _rotary(transformer: Transformer, grid: Grid, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines as the pipelines pass them, two of `(tokens, head_dim)`."""
    base, (frames, height, width) = _base_grid(transformer), grid
    places: dict[str, Any] = {"crops_coords": _centred(height, width, base=base)}
    if transformer.config.patch_size_t is not None:
        places = {"crops_coords": None, "grid_type": "slice", "max_size": base}
    cosines, sines = get_3d_rotary_pos_embed(
        embed_dim=transformer.config.attention_head_dim,
        grid_size=(height, width),
        temporal_size=frames,
        device=device,
        **places,
    )
    return cosines, sines


def _centred(height: int, width: int, *, base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of a grid scaled to fit into the middle of a base grid, as CogVideoX 1.0 places it."""
    scale = min(base[0] / height, base[1] / width)
    fitted = round(scale * height), round(scale * width)
    top, left = (round((side - part) / 2.0) for side, part in zip(base, fitted, strict=True))
    return (top, left), (top + fitted[0], left + fitted[1])


def _pass_rotary(
    transformer: Transformer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass each sample's own cosines and sines, in strips: two of `(rows, strip_length, head_dim)`."""
    layout = active_layout()
    device = torch.device(layout.device)
    rotary = position_rows(layout, lambda grid: _rotary(transformer, grid, device))
    return args, {**kwargs, "image_rotary_emb": rotary}


def _add_table(embed: CogVideoXPatchEmbed, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Add each sample's own positions to the strips' tokens; `output` is text, then tokens."""

    def table(grid: Grid) -> tuple[torch.Tensor]:
        latent_size = grid[1] * embed.patch_size, grid[2] * embed.patch_size
        frames = (grid[0] - 1) * embed.temporal_compression_ratio + 1
        joint = embed.pos_embedding
        if (*latent_size, frames) != (embed.sample_height, embed.sample_width, embed.sample_frames):
            joint = embed._get_positional_embeddings(*latent_size, frames, device=output.device)
        return (joint[0, embed.max_text_seq_length :],)

    (positions,) = position_rows(active_layout(), table)
    slots = output.shape[1] - positions.shape[1]
    return output + F.pad(positions.to(output.dtype), (0, 0, slots, 0))
