"""FLUX.3: images in 2×2 blocks; blocks of image and of text alone before those of both; text at timestep 0.

Positions are those of FLUX.2, with rows and columns half as far apart. The model attends to the padding of texts: pass
the embeddings with that of their window (see the recipe).

References have an embedding, a modulation and blocks of their own, in which those of a sample attend to each other. In
a pack they lie behind their sample's own tokens, and hooks put what these modules make of them in the place of what
those of the sample's tokens do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.processors import PackedRowAttnProcessor, Rotary, RowScope, project, rotate_channels
from ...packing.segments import SegmentSpans
from ...packing.texts import TextTokens, pad_texts
from ..modular import ModularRecipe
from ..texts import TextEmbeddings
from .flux import token_ids
from .flux2 import REFERENCES_OF_FLUX2, Flux2Family, Flux2Recipe, number_tokens

POSITION_SCALE = 0.5
"""Distance of neighbouring rows and columns on the axes of positions."""

_SCOPES: dict[str, RowScope] = {
    "mode_blocks": "tokens",
    "txt_mode_blocks": "text",
    "single_transformer_blocks": "joint",
}


class PackedFlux3AttnProcessor(PackedRowAttnProcessor):
    """Attention of `Flux3Attention` over the strips of a pack; blocks of tokens attend to a sample's own."""

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of its scope, without references in blocks of tokens."""
        if self.scope != "tokens" or layout.shown is None:
            return super().segments(layout)
        spans = layout.own_spans, layout.num_tokens
        return (layout.self_segments.made("own", lambda: SegmentSpans.within(*spans)),)

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample, given cosines and sines of all text slots and then of all tokens."""
        assert image_rotary_emb is not None, "the model always makes them"
        table, strips = torch.stack(image_rotary_emb, -1), len(hidden_states)
        sizes = [strips * active_layout().row_sizes[0]] if self.scope == "joint" else []
        sides = table.split([*sizes, len(table) - sum(sizes)])
        rows = torch.cat([side.unflatten(0, (strips, -1)) for side in sides], 1)
        return super().__call__(attn, hidden_states, image_rotary_emb=rows)

    def heads(
        self, attn: Any, states: torch.Tensor, rotary: Sequence[torch.Tensor] | None = None, *, added: bool = False
    ) -> Sequence[torch.Tensor]:
        """Return query, key and value; the former two are normalised and rotated in float32, as by the model."""
        parts = project(attn, states, "to_q", "to_k", "to_v")
        query, key, value = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
        assert rotary is not None, "the model rotates all rows"
        normed = attn.norm_q(query.float()), attn.norm_k(key.float())
        return *(self.rotate(part, rotary).to(value.dtype) for part in normed), value

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate neighbouring channels of `(…, H, D)` by a table of cosines and sines, `(…, D, 2)`."""
        return rotate_channels(tokens, rotary[0].unbind(-1))


class PackedFlux3ReferenceAttnProcessor(PackedFlux3AttnProcessor):
    """Attention of the references of each sample to each other, in one row of those of a pack."""

    def __init__(self, backend: Backend = "segments") -> None:
        super().__init__(backend, scope="tokens")

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of references; none where a pack has none."""
        if layout.shown is None:
            return ()
        _reference_index(layout)  # which a compiled model needs made beforehand, too
        return (layout.self_segments.made("references", lambda: _reference_segments(layout)),)


def _reference_segments(layout: PackedLayout) -> SegmentSpans:
    stops = list(itertools.accumulate(layout.shown_lengths))
    spans = [(stop - count, stop) for stop, count in zip(stops, layout.shown_lengths, strict=True) if count]
    return SegmentSpans.within(spans, stops[-1])


def _reference_index(layout: PackedLayout) -> torch.Tensor:
    """Return where the tokens of references lie among those of a pack."""

    def make() -> torch.Tensor:
        spans = zip(layout.spans, layout.own_lengths, strict=True)
        return to_device(
            torch.cat([torch.arange(start + count, stop) for (start, stop), count in spans]), layout.device
        )

    return layout.self_segments.made("reference index", make)


class Flux3Family(Flux2Family):
    """Packing of `Flux3Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "FLUX.3"
    transformer_class = "Flux3Transformer2DModel"
    tested_forwards = ("b18615a4edc8",)
    lora_targets = Family.lora_targets
    without_lora = ("image_cond",)
    stock_processors = ("Flux3AttnProcessor",)
    attention_kwargs = "attention_kwargs"
    text = TextTokens(rows="slots", channels="joint_attention_dim", shortest=1)
    runs_alone = True
    unused_parts = ("image_cond",)
    takes = ()
    original_names = None

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse flow maps, which also take the timestep that a step of the pipeline jumps to."""
        if transformer.config.flow_map:
            raise PackingError(
                "This FLUX.3 transformer is distilled to a flow map (`flow_map`), which predicts the way to another "
                "timestep and not the velocity that a flow is trained on; train the model that it was distilled from."
            )
        super().check(transformer, strip_length=strip_length)

    def processor(self, name: str, backend: Backend) -> Any:
        if "image_cond" in name:
            return PackedFlux3ReferenceAttnProcessor(backend)
        return PackedFlux3AttnProcessor(backend, scope=_SCOPES[name.partition(".")[0]])

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the positions of a sample's tokens, `(h·w, 4)`, as those of FLUX.2 but closer."""
        (tokens,) = super().positions(module, grid, base_size, device=device)
        return (tokens * POSITION_SCALE,)

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Return the positions of references, whose last coordinates are −1, −2 and so on."""
        ids = [
            F.pad(token_ids(grid, device=device) * POSITION_SCALE, (0, 1), value=-number)
            for number, grid in enumerate(grids[1:], 1)
        ]
        return (torch.cat(ids),)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass the positions of the pack; text has the modulation of timestep 0 in each sample, as references do."""
        number = partial(number_tokens, self.pack_tables(base_size))
        blocks = transformer.mode_blocks
        replaced = [
            (transformer.x_embedders["image"], partial(_embed_references, transformer.x_embedders["image_cond"])),
            *(
                (
                    modulations["image"],
                    partial(
                        _modulate_references,
                        modulations["image_cond"],
                        transformer.time_proj,
                        transformer.timestep_embedder,
                    ),
                )
                for modulations in (transformer.early_stream_modulations, transformer.single_stream_modulations)
            ),
            *(
                (block, partial(_run_references, of_references))
                for block, of_references in zip(blocks["image"], blocks["image_cond"], strict=True)
            ),
        ]
        hooks = [transformer.register_forward_pre_hook(number, with_kwargs=True)]
        return hooks + [module.register_forward_hook(hook) for module, hook in replaced]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Number tokens and text as the pipeline does, and pass references apart."""
        device = rows.latents.device
        (image_ids,), (text,) = (
            self.positions(None, rows.grid, None, device=device),
            self.text_positions(None, rows.grids, rows.text.shape[1], device=device),
        )
        inputs = {"img_ids": image_ids, "txt_ids": text}
        if not rows.references:
            return inputs
        (reference_ids,) = self.reference_positions(None, rows.grids, device=device)
        return {
            **inputs,
            "hidden_states": self.arranged([rows.latents], rows.patch),
            "image_cond_hidden_states": self.arranged(rows.references, rows.patch),
            "image_cond_ids": reference_ids,
        }


def _embed_references(embed: Any, module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> Any:
    """Embed references by a module of their own; a forward hook."""
    layout = active_layout()
    if layout.shown is None:
        return None
    return _with_references(output, embed(args[0].flatten(0, 1).index_select(0, _reference_index(layout))), layout)


def _modulate_references(
    modulate: Any, project_time: Any, embed: Any, module: Any, args: tuple[torch.Tensor], output: torch.Tensor
) -> Any:
    """Modulate references by a module of their own, as at timestep 0; a forward hook."""
    layout = active_layout()
    if layout.shown is None:
        return None
    projected = project_time(args[0].new_zeros(1))
    clean = modulate(F.silu(embed(projected.to(args[0].dtype))))
    return _with_references(output, clean.expand(sum(layout.shown_lengths), -1), layout)


def _run_references(block: Any, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> Any:
    """Run the references of a pack through a block of their own; a forward hook of that of a sample's tokens."""
    layout = active_layout()
    if layout.shown is None:
        return None
    states, modulation, tables = args
    index = _reference_index(layout)
    rows = [part.flatten(0, 1).index_select(0, index)[None] for part in (states, modulation)]
    return _with_references(output, block(*rows, tuple(table.index_select(0, index) for table in tables))[0], layout)


def _with_references(output: torch.Tensor, references: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return the output of strips with that of references in their places."""
    rows = output.flatten(0, 1).index_copy(0, _reference_index(layout), references.to(output.dtype))
    return rows.view_as(output)


class Flux3Recipe(ModularRecipe, Flux2Recipe):
    """Recipe of `Flux3ModularPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A caption is encoded as it is: the block that rewrites prompts (`prompt_upsampler`) is neither loaded nor called.
    Captions are padded to the next multiple of 80 tokens, and the model attends to that padding. The pipeline itself
    cuts them at 8192 tokens.

    A sample may have any number of references. The modules that read them alone (`image_cond`) are not trained.
    """

    pipeline_class = "Flux3ModularPipeline"
    dropped_blocks = ("prompt_upsampler",)
    output = "images"
    family = Flux3Family()
    default_sequence_length = 640
    guidance_factor = None
    conditions = (replace(REFERENCES_OF_FLUX2, max_ratio=None, alone_pixels=4 * 1024**2),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode each caption in its own window, and pad windows to `max_sequence_length`, with a mask."""
        from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

        encode: Any = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        encoder, tokenizer = self.pipeline.text_encoder, self.pipeline.tokenizer
        length = self.max_sequence_length
        texts = [encode(encoder, tokenizer, caption, max_sequence_length=length)[0] for caption in captions]
        values, mask = pad_texts(texts)
        return TextEmbeddings(values, mask.long()).padded(length)


REFUSED = MappingProxyType(
    {
        "Flux3DistilledModularPipeline": (
            "its transformer is distilled to a flow map, which predicts the way from one timestep to another; train "
            "FLUX.3 itself"
        )
    }
)


RECIPES = (Flux3Recipe,)
