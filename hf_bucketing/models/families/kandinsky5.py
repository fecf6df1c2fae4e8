"""Kandinsky 5: text refined by blocks of its own, then attended to; positions scaled by size; flow matching.

The forward has no mask for text, so all text tokens that it gets are attended to, as in a pack. Blocks of text are
modulated by the timestep and the pooled text of a batch row; hooks give them those of the text's own sample.

The pipelines divide positions by a scale that depends on the size (video) or is 1 (images); it is a conditioning,
`scale_factor`. The stock forward passes `visual_rope_pos` to the module of the tables and reads nothing of it, so a
pack puts each strip's scale there, as a fourth entry, for the hook that makes the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.processors import Processor, attend
from ...packing.segments import SegmentSpans
from ...packing.strips import by_strip
from ...packing.texts import TextTokens
from ..joint import JointFamily
from ..recipe import Recipe
from ..samples import Samples
from ..texts import TextEmbeddings

SCALE, CONDITION = "scale_factor", "visual_cond"


class PackedKandinsky5AttnProcessor(Processor):
    """Attention of Kandinsky 5 over the strips of a pack: of text to itself, of tokens to themselves or to text.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        scope (`"tokens"` or `"text"`): What attends.
    """

    def __init__(self, backend: Backend = "segments", *, scope: Literal["tokens", "text"] = "tokens") -> None:
        super().__init__(backend)
        self.scope = scope

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those in which text attends to itself, or tokens to themselves and to text."""
        if self.scope == "text":
            return (layout.joint.text_segments,)
        return layout.self_segments, layout.joint.token_to_text

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        sparse_params: None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`Kandinsky5Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, length, dim)`): Tokens of strips, or their text slots.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`, *optional*): The text slots, if
                tokens attend to these.
            rotary_emb (`torch.Tensor` of shape `(…, 1, D/2, 2, 2)`, *optional*): Rotations of the queries and keys.
            sparse_params (`None`): Unused; the family refuses models with sparse attention.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        layout = active_layout()
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query = self._heads(attn, attn.to_query(hidden_states), attn.query_norm, rotary_emb)
        key = self._heads(attn, attn.to_key(keys), attn.key_norm, rotary_emb)
        value = attn.to_value(keys).flatten(0, 1).unflatten(-1, (attn.num_heads, -1))
        segments = self.segments(layout)[0 if encoder_hidden_states is None else 1]
        attended = attend(query, key, value, segments, backend=self.backend)
        output: torch.Tensor = attn.out_layer(attended.flatten(1)).view_as(hidden_states)
        return output

    def _heads(self, attn: Any, states: torch.Tensor, norm: Any, rotary: torch.Tensor | None) -> torch.Tensor:
        """Turn `(strips, length, H·D)` into normalised and rotated `(N, H, D)`, rounded as by the stock processor."""
        heads = states.flatten(0, 1).unflatten(-1, (attn.num_heads, -1))
        normed: torch.Tensor = norm(heads.float()).type_as(heads)
        if rotary is None:
            return normed
        return rotated(normed, rotary).to(torch.bfloat16).type_as(normed)


def rotated(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Multiply pairs of channels of `(N, H, D)` by rotations `(…, 1, D/2, 2, 2)`, in float32."""
    rotations = rotary.flatten(0, -5)  # (N, 1, D/2, 2, 2)
    return (rotations * heads.unflatten(-1, (-1, 1, 2)).float()).sum(dim=-1).flatten(-2)


class Kandinsky5Family(JointFamily):
    """Packing of `Kandinsky5Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `scale_factor`, `(n, 3)`, divides the positions of frames, rows and columns; the pipeline chooses it by size.
    Models with a visual condition take it as `visual_cond`, of the latents' sizes: its latent and its mask.
    """

    title = "Kandinsky 5"
    transformer_class = "Kandinsky5Transformer3DModel"
    lora_targets = ("to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer")
    tested_forwards: ClassVar[tuple[str, ...]] = ("6e07c4013e40",)
    processor_class: ClassVar[type[Any]] = PackedKandinsky5AttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = ("Kandinsky5AttnProcessor",)
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (
        ("text_transformer_blocks.**", "text_transformer_blocks.**"),
        ("visual_transformer_blocks.**", "visual_transformer_blocks.**"),
    )
    original_prefix = "transformer."
    channels = "in_visual_dim"
    strips_have_positions = False
    width_settings = ("model_dim",)
    text = TextTokens(rows="slots", channels="in_text_dim")
    text_modulations: ClassVar[tuple[str, ...]] = ("text_transformer_blocks.*.text_modulation",)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse sparse attention."""
        if transformer.config.attention_type != "regular":
            raise PackingError(
                f"This Kandinsky 5 transformer has attention_type={transformer.config.attention_type!r}: it attends "
                "to blocks of 8×8 tokens that it chooses by their means (NABLA), and strips do not keep such blocks "
                "together. Use a model with 'regular' attention, or train this one with bucketed batches."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        frames, rows, columns = transformer.visual_rope_embeddings.max_pos
        return frames, rows, columns

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the pooled text embeddings, the scale of positions, drawn as for 480p, and any visual condition."""
        width, channels = transformer.config.in_text_dim2, self.in_channels(transformer) + 1
        draws: dict[str, Draw] = {
            "pooled_projections": lambda grids: torch.randn(len(grids), width),
            SCALE: lambda grids: torch.tensor([[1.0, 2.0, 2.0]]).repeat(len(grids), 1),
        }
        if transformer.config.visual_cond:
            draws[CONDITION] = lambda grids: self.draw_latents(transformer, grids, channels=channels)
        return draws

    def processor(self, name: str, backend: Backend) -> Any:
        text = name.startswith("text_transformer_blocks.")
        return self.processor_class(backend, scope="text" if text else "tokens")

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the positions of tokens, and the modulation of text."""
        return [transformer.visual_rope_embeddings.register_forward_hook(_locate), *self.hook_norms(transformer)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return latents with channels last, and the positions on each axis, unless they are those of a pack."""
        device = rows.latents.device
        inputs = super().inputs(rows)
        latents = [rows.latents, *([inputs.pop(CONDITION)] if CONDITION in inputs else [])]
        return {
            "visual_rope_pos": [torch.arange(count, device=device) for count in rows.grid],
            "text_rope_pos": torch.arange(rows.text.shape[1], device=device),
            **inputs,
            "hidden_states": torch.cat(latents, 1).movedim(1, -1),
        }

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the scale as the model takes it, the same for all rows."""
        return {SCALE: tuple(rows.conditioning[SCALE][0].tolist())}

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the positions of text by text slot, and, for the hook, the scale by strip."""
        rows, layout, device = super().rows(batch), batch.layout, batch.strips.device
        conditioning = dict(rows.conditioning)
        slots = [torch.arange(length, device=device) for length in layout.text_lengths]
        ignored = [torch.zeros(count, dtype=torch.long, device=device) for count in (1, 1, layout.strip_length)]
        conditioning["visual_rope_pos"] = (*ignored, conditioning.pop(SCALE))
        conditioning["text_rope_pos"] = layout.joint.fill_slots(torch.cat(slots))
        return replace(rows, conditioning=conditioning)

    def laid_out(self, output: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
        return output.movedim(-1, 1)


@torch.compiler.disable  # loops over the samples of the pack
def _locate(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the rotations of each sample's own tokens, `(strips, 1, 1, strip_length, 1, D/2, 2, 2)`."""
    layout, scales = active_layout(), args[1][3]
    firsts = scales.index_select(0, layout.joint.first_strips)
    samples = []
    for grid, scale in zip(layout.grids, firsts, strict=True):
        positions = [torch.arange(count, device=output.device) for count in grid]
        # module.forward instead of module(…), which would call the hook again
        samples.append(module.forward((1, *grid), positions, tuple(scale)).flatten(0, 3))
    return by_strip(samples, layout)[:, None, None]


class KandinskyRecipe(Recipe):
    """Recipe of Kandinsky's models, of which some take a visual condition; see [`Recipe`]."""

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the pooled captions, and zeros for the visual condition, as the pipelines pass them."""
        conditioning = super().conditioning(samples)
        if self.transformer.config.visual_cond:
            latents = samples.noised.latents
            conditioning[CONDITION] = [latent.new_zeros(len(latent) + 1, *latent.shape[1:]) for latent in latents]
        return conditioning


class Kandinsky5Recipe(KandinskyRecipe):
    """Recipe of `Kandinsky5T2VPipeline`; see [`Recipe`].

    The transformer attends to all text that it gets, so a stack holds captions of one length; packs may mix them.
    """

    pipeline_class = "Kandinsky5T2VPipeline"
    family = Kandinsky5Family()
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((512, 768),)
    """The pipeline's default."""

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, ends = self._encode_prompt(captions)
        mask = torch.arange(values.shape[1], device=values.device) < ends.diff()[:, None]
        text = TextEmbeddings(values, mask.long(), {"pooled_projections": pooled})
        return text.padded(self.max_sequence_length)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return also the scale of positions that the pipeline chooses for each size."""
        stride, latents = self.spec.spatial_stride, samples.noised.latents
        scales = [
            self.pipeline._get_scale_factor(latent.shape[-2] * stride, latent.shape[-1] * stride) for latent in latents
        ]
        return {**super().conditioning(samples), SCALE: torch.tensor(scales)}

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of captions of several lengths, because the model would attend to their padding."""
        assert samples.text.mask is not None
        lengths = samples.text.mask.sum(1)
        if len(lengths.unique()) == 1:
            return None
        return (
            "The forward of Kandinsky 5 has no mask for text and would attend to padding, and the captions of this "
            f"batch have {lengths.tolist()} tokens. Train packs, or batches of one sample."
        )


RECIPES = (Kandinsky5Recipe,)
