"""FLUX.2 dev and klein: images in 2×2 blocks, four axes of positions, also of text; one modulation for all blocks.

The pipelines mask no text: pass the embeddings with their padding. The model computes rotary tables of whatever
positions it is given, so a pack gives it those of all its tokens and texts. The latent of a sample is that of the VAE,
normalised as its blocks are (see the recipe), not yet cut into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...buckets.sizes import Size
from ...conditions.condition import Condition
from ...conditions.references import ReferenceRule
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Transformer
from ...packing.names import Backend, Grid
from ...packing.processors import PackedJointAttnProcessor, Rotary
from ..joint import JointFamily, of_text
from ..recipe import Recipe
from .flux import BLOCK, FluxFamily, FluxRecipe, token_ids


class PackedFlux2AttnProcessor(PackedJointAttnProcessor):
    """Attention of `Flux2Attention` over the strips of a pack."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend inside each sample, given cosines and sines of all text slots and then of all tokens."""
        assert image_rotary_emb is not None, "the model always makes them"
        joint = active_layout().joint
        words = joint.strips * joint.text_slots
        sides = [(table[words:], table[:words]) for table in image_rotary_emb]  # tokens, text
        rotary = tuple(side.unflatten(0, (joint.strips, -1)) for pair in zip(*sides, strict=True) for side in pair)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary)


class PackedFlux2ParallelSelfAttnProcessor(PackedFlux2AttnProcessor):
    """Attention of `Flux2ParallelSelfAttention`, whose projections are also those of the feed-forward part."""

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample; text slots precede the tokens of each strip."""
        projected = attn.to_qkv_mlp_proj(hidden_states)
        states, inner = projected.split([3 * attn.inner_dim, projected.shape[-1] - 3 * attn.inner_dim], -1)
        attention = SimpleNamespace(
            heads=attn.heads, norm_q=attn.norm_q, norm_k=attn.norm_k, fused_projections=True, to_qkv=_unchanged
        )
        attended: Any = super().__call__(attention, states, image_rotary_emb=image_rotary_emb)
        projected_back: torch.Tensor = attn.to_out(torch.cat([attended, attn.mlp_act_fn(inner)], -1))
        return projected_back


def _unchanged(states: torch.Tensor) -> torch.Tensor:
    return states


class Flux2Family(FluxFamily):
    """Packing of `Flux2Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "FLUX.2 dev and klein"
    transformer_class = "Flux2Transformer2DModel"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")
    tested_forwards = ("f8c4f809f3a8",)
    stock_processors: ClassVar[tuple[str, ...]] = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")
    guidance = 4.0
    max_references = UNLIMITED
    reference_step = 10
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (
        ("transformer_blocks.*.attn.to_q", "double_blocks.*.img_attn.qkv"),
        ("transformer_blocks.*.attn.to_k", "double_blocks.*.img_attn.qkv"),
        ("transformer_blocks.*.attn.to_v", "double_blocks.*.img_attn.qkv"),
        ("transformer_blocks.*.attn.add_q_proj", "double_blocks.*.txt_attn.qkv"),
        ("transformer_blocks.*.attn.add_k_proj", "double_blocks.*.txt_attn.qkv"),
        ("transformer_blocks.*.attn.add_v_proj", "double_blocks.*.txt_attn.qkv"),
        ("transformer_blocks.*.attn.to_out.0", "double_blocks.*.img_attn.proj"),
        ("transformer_blocks.*.attn.to_add_out", "double_blocks.*.txt_attn.proj"),
        ("transformer_blocks.*.ff.linear_in", "double_blocks.*.img_mlp.0"),
        ("transformer_blocks.*.ff.linear_out", "double_blocks.*.img_mlp.2"),
        ("transformer_blocks.*.ff_context.linear_in", "double_blocks.*.txt_mlp.0"),
        ("transformer_blocks.*.ff_context.linear_out", "double_blocks.*.txt_mlp.2"),
        ("single_transformer_blocks.*.attn.to_qkv_mlp_proj", "single_blocks.*.linear1"),
        ("single_transformer_blocks.*.attn.to_out", "single_blocks.*.linear2"),
    )
    original_prefix = "diffusion_model."

    def variant(self, transformer: Transformer) -> Flux2Family:
        """Return the family of FLUX.2 [klein] KV where the transformer has the processors of its pipeline."""
        processor = next(iter(transformer.attn_processors.values()))
        return KV_FAMILY if type(processor).__name__ in KV_FAMILY.stock_processors else self

    def processor(self, name: str, backend: Backend) -> PackedFlux2AttnProcessor:
        single = name.startswith("single_")
        return (PackedFlux2ParallelSelfAttnProcessor if single else PackedFlux2AttnProcessor)(backend)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the positions of a sample's tokens themselves, `(h·w, 4)`: zero, row, column and zero."""
        return (F.pad(token_ids(grid, base_size, device=device), (0, 1)),)

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Return the positions of references, whose first coordinates are 10, 20 and so on."""
        return (F.pad(self.ids(grids, device=device)[math.prod(grids[0]) :], (0, 1)),)

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Return the positions of text, `(length, 4)`: its tokens are numbered on the last axis."""
        return (F.pad(torch.arange(length, device=device, dtype=torch.float32)[:, None], (3, 0)),)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the positions of the pack, and make modulation of text that of its own sample."""
        number = partial(number_tokens, self.pack_tables(base_size))
        return [
            transformer.register_forward_pre_hook(number, with_kwargs=True),
            transformer.double_stream_modulation_txt.register_forward_hook(_modulate_text),
            transformer.single_stream_modulation.register_forward_hook(_modulate_rows),
        ]

    def parallel_plan(self, transformer: Transformer) -> dict[str, Any]:
        """Split positions of two dimensions, which all rows share."""
        plan = transformer._cp_plan
        ids = {name: replace(plan[""][name], split_dim=0, expected_dims=2) for name in ("img_ids", "txt_ids")}
        return {**plan, "": {**plan[""], **ids}}

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Pass no positions, which a hook provides in a pack."""
        return JointFamily.inputs(self, rows)

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        device, length = rows.latents.device, rows.text.shape[1]
        tokens = F.pad(self.ids(rows.grids, device=device), (0, 1))
        (words,) = self.text_positions(None, rows.grids, length, device=device)
        return {"img_ids": tokens, "txt_ids": words}


def number_tokens(tables: Callable[[Any], Rotary], module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass the positions of a pack's tokens and texts to its transformer; a forward pre-hook."""
    tokens, words = tables(module)
    return args, {**kwargs, "img_ids": tokens.flatten(0, 1), "txt_ids": words.flatten(0, 1)}


def _modulate_text(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return of_text(output)


def _modulate_rows(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Return modulation for each text slot and token of the strips, `(strips, text_slots + strip_length, …)`."""
    sides = zip((of_text(output), output), active_layout().row_sizes, strict=True)
    return torch.cat([values[:, None].expand(-1, count, -1) for values, count in sides], 1)


def _modulate_references(embed: Any, module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> Any:
    """Modulate references as at timestep 0, and all else of the strips as they are; `embed` embeds timesteps."""
    layout = active_layout()
    if layout.shown is None:
        return None
    by_token = output if output.ndim == 3 else output[:, None]  # (strips, text_slots + strip_length or 1, …)
    of_references = (layout.own_ids < 0).unflatten(0, (-1, layout.strip_length))
    of_references = F.pad(of_references, (max(0, by_token.shape[1] - layout.strip_length), 0))
    clean = module.forward(embed(args[0].new_zeros(1), None))
    return torch.where(of_references[..., None], clean, by_token)


class Flux2KVFamily(Flux2Family):
    """Packing of `Flux2Transformer2DModel` in FLUX.2 [klein] KV, whose pipeline keeps keys and values of references.

    References attend to themselves alone, at timestep 0, so that they are the same in each step of the pipeline: packs
    and stacks compute what its first step does. Its attention processors tell the model from others.
    """

    stock_processors = ("Flux2KVAttnProcessor", "Flux2KVParallelSelfAttnProcessor")
    references_apart = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models that embed guidance, which the pipeline does not pass."""
        if transformer.config.guidance_embeds:
            raise PackingError("The pipeline of FLUX.2 [klein] KV passes no guidance, and this model embeds one.")
        super().check(transformer, strip_length=strip_length)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the modulation of references."""
        modulate = partial(_modulate_references, transformer.time_guidance_embed)
        modulations = transformer.double_stream_modulation_img, transformer.single_stream_modulation
        hooks = super().hook_positions(transformer, base_size)
        return [*hooks, *(module.register_forward_hook(modulate) for module in modulations)]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Put references in front of the sample, and let the model treat them so."""
        inputs = super().unpacked_inputs(transformer, rows)
        if not rows.references:
            return inputs
        num_tokens, ids = math.prod(rows.grid), inputs["img_ids"]
        return {
            **inputs,
            "hidden_states": self.arranged((*rows.references, rows.latents), rows.patch),
            "img_ids": ids.roll(-num_tokens, 0),
            "kv_cache_mode": "extract",
            "num_ref_tokens": len(ids) - num_tokens,
        }


FAMILY = Flux2Family()
KV_FAMILY = Flux2KVFamily()


REFERENCES_OF_FLUX2 = ReferenceRule(
    max_pixels=1024**2, cropped=True, resample="lanczos", min_side=64, max_ratio=8, argument="image"
)


class Flux2Recipe(FluxRecipe):
    """Recipe of `Flux2Pipeline`, for FLUX.2 [dev]; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A sample may have references of any sizes that the pipelines take.

    Text follows a system message in the chat that the text encoder reads, and both count as text tokens.

    The pipelines do not shift as their scheduler is configured: they compute a shift from the number of steps too
    ([`ShiftBySteps`][hf_bucketing.models.shift.ShiftBySteps], `shift="flux2"`), which makes up for the error of few
    steps. Training has no steps, so it takes what this law tends to with many: the scheduler's line, which is Flux's.
    musubi-tuner's `flux2_shift` is the same line.
    """

    pipeline_class = "Flux2Pipeline"
    family = FAMILY
    conditions: ClassVar[tuple[Condition, ...]] = (REFERENCES_OF_FLUX2,)
    prompt_outputs = ("values",)

    @torch.no_grad()
    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1], normalised by the statistics of the channels of a block."""
        vae = self.pipeline.vae
        blocks = encode_blocks(vae, pixel_values, epsilon=vae.config.batch_norm_eps)
        return F.pixel_shuffle(blocks, BLOCK)[:, :, None]


@torch.no_grad()
def encode_blocks(
    vae: Any, pixel_values: torch.Tensor, *, epsilon: float, channels_first: bool = True
) -> torch.Tensor:
    """Encode images `(B, 3, 1, H, W)` in [−1, 1] to blocks of latent pixels, `(B, 4·C, h/2, w/2)`, normalised.

    The mode of the posterior is normalised by the VAE's mean and variance of a block's channels; `epsilon` is added to
    the variance. A block lists its pixels channel by channel, or, without `channels_first`, the channels pixel by
    pixel.
    """
    raw = vae.encode(pixel_values[:, :, 0].to(vae.dtype)).latent_dist.mode()
    blocks = F.pixel_unshuffle(raw, BLOCK)
    if not channels_first:
        blocks = blocks.unflatten(1, (-1, BLOCK**2)).transpose(1, 2).flatten(1, 2)
    mean, variance = (statistic.view(1, -1, 1, 1) for statistic in (vae.bn.running_mean, vae.bn.running_var))
    normalised: torch.Tensor = (blocks - mean) / torch.sqrt(variance + epsilon)
    return normalised


class BlockRecipe(Recipe):
    """Recipe of models to which a block of the latent pixels of Flux.2's VAE is one pixel."""

    image_vae = True

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        temporal, spatial = super().vae_strides(vae)
        return temporal, spatial * BLOCK

    @property
    def latent_channels(self) -> int:
        """Channels of a block of the VAE's latents."""
        return super().latent_channels * BLOCK**2


class Flux2KleinRecipe(Flux2Recipe):
    """Recipe of `Flux2KleinPipeline`, for FLUX.2 [klein]; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "Flux2KleinPipeline"

    @classmethod
    def text_rule(cls) -> str:
        """Return a name of its own: the pipelines of [klein] put captions into the template of another model."""
        return "Flux2KleinRecipe"


class Flux2KleinKVRecipe(Flux2KleinRecipe):
    """Recipe of `Flux2KleinKVPipeline`, for FLUX.2 [klein] KV; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "Flux2KleinKVPipeline"
    family = KV_FAMILY
    constructor_reads = ("trained",)
    """The pipeline sets the transformer's processors."""

    def render(self, prompt: str, size: Size, *, guidance_scale: float | None = None, **options: Any) -> np.ndarray:
        """Call the pipeline, which takes no scale of guidance; see [`Recipe.render`]."""
        return super().render(prompt, size, **options)


RECIPES = (
    Flux2Recipe,
    Flux2KleinRecipe,
    Flux2KleinKVRecipe,
)
