"""Attention processors that run a pack, one per way of attending, named as diffusers names its own.

N tokens of all strips in order, H heads, D channels of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch

from ..errors import PackingError
from .context import active_layout
from .layout import PackedLayout, permute
from .names import Backend
from .segments import SegmentSpans
from .ulysses import all_tokens, local_heads, local_part, local_tokens

Scope: TypeAlias = Literal["sample", "frame", "spatial_position"]

RowScope: TypeAlias = Literal["joint", "tokens", "text"]

Rotary: TypeAlias = tuple[torch.Tensor, ...]
"""Cosines and sines `(strips, strip_length, channels)` in turn: a pair for each equal part of a head's channels."""


class Keys(NamedTuple):
    """Keys and values `(keys, H, D)`, and the segments in which the tokens attend to them."""

    key: torch.Tensor
    value: torch.Tensor
    segments: SegmentSpans


class Processor:
    """Base of the packed processors: says which segments of a pack it reads, and refuses diffusers' own backends.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
    """

    _parallel_config: Any = None
    """diffusers' `ParallelConfig`, if each process has a part of every strip; set as on its own processors."""

    def __init__(self, backend: Backend = "segments") -> None:
        self.backend = backend

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return the segments in which this processor attends, for [`PackedLayout.prepare`]."""
        return layout.self_segments, layout.joint.segments if layout.holds_text else layout.cross_segments

    @property
    def _attention_backend(self) -> None:
        return None

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if backend is not None:
            raise PackingError(
                f"set_attention_backend({getattr(backend, 'value', backend)!r}) does not apply while packing is "
                "enabled, which has attention backends of its own: choose one with enable_packing(transformer, "
                "backend=…), or call disable_packing(transformer) first."
            )


class PackedAttnProcessor(Processor):
    """Self- and cross-attention of `diffusers.models.attention_processor.Attention` over the strips of a pack.

    Latte, PixArt and Cosmos use it directly. Families with an attention module of their own derive from it: they say
    how that module normalises and rotates queries and keys, and which keys its text has.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        scope (`"sample"`, `"frame"` or `"spatial_position"`): What a token attends to in self-attention: its sample,
            its frame (Latte's spatial blocks), or its row and column in all frames (Latte's temporal blocks).

    Raises:
        PackingError: If the scope is unknown.
    """

    norms_whole_width: ClassVar[bool] = False
    """Whether the norms of queries and keys take all heads together."""

    def __init__(self, backend: Backend = "segments", *, scope: Scope = "sample") -> None:
        if scope not in get_args(Scope):
            raise PackingError(f"scope must be one of {get_args(Scope)}, got {scope!r}.")
        super().__init__(backend)
        self.scope = scope

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of its scope, and those of cross-attention."""
        if self.scope == "sample":
            return layout.self_segments, layout.cross_segments
        frames = layout.by_frame
        return frames.frames if self.scope == "frame" else frames.spatial_positions, layout.cross_segments

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips; of Latte's temporal
                blocks, `(num_tokens, 1, dim)`.
            encoder_hidden_states (`torch.Tensor` of shape `(any, tokens, dim)`, *optional*): The texts, one after
                another over all rows, padding at the end.
            attention_mask (`None`): Unused; the layout takes its place.
            image_rotary_emb (`tuple`, *optional*): Cosines and sines of the tokens, see [`rotate`]; text is not
                rotated.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.

        Raises:
            PackingError: If no pack is being computed, or the module has norms over the tokens or a residual.
        """
        _refuse_mixing(attn)
        layout, rows, states = active_layout(), len(hidden_states), hidden_states.flatten(0, 1)
        if encoder_hidden_states is None:
            norms = (attn.norm_q, attn.norm_k, None)
            parts = zip(project(attn, states, "to_q", "to_k", "to_v"), norms, strict=True)
            query, key, value = (self.split_heads(attn, part, norm) for part, norm in parts)
            if image_rotary_emb is not None:
                rotary = tuple(local_part(table, self._parallel_config) for table in image_rotary_emb)
                query, key = self.rotate(query, rotary), self.rotate(key, rotary)
            query, key, value = (self._all_tokens(part, rows) for part in (query, key, value))
            attended = self._attend_to_tokens(query, key, value, layout)
        else:
            query = self._all_tokens(self.split_heads(attn, attn.to_q(states), attn.norm_q), rows)
            texts = self.text_keys(attn, encoder_hidden_states, layout)
            attended = functools.reduce(torch.add, (self._attend_to_text(query, keys) for keys in texts))
        if self._parallel_config is not None:
            by_strip = attended.unflatten(0, (rows, -1))
            attended = local_tokens(by_strip, self._parallel_config, heads=attn.heads).flatten(0, 1)
        attended = self.gate(attn, attended, hidden_states)
        attended = _through(attn.to_out, attended.flatten(1)).view_as(hidden_states)
        factor = getattr(attn, "rescale_output_factor", 1.0)
        return attended if factor == 1.0 else attended / factor

    def _all_tokens(self, heads: torch.Tensor, rows: int) -> torch.Tensor:
        if self._parallel_config is None:
            return heads
        return all_tokens(heads.unflatten(0, (rows, -1)), self._parallel_config).flatten(0, 1)

    def _attend_to_text(self, query: torch.Tensor, keys: Keys) -> torch.Tensor:
        key, value = (local_heads(side, self._parallel_config) for side in (keys.key, keys.value))
        return attend(query, key, value, keys.segments, backend=self.backend)

    def _attend_to_tokens(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        segments, _ = self.segments(layout)
        if self.scope != "spatial_position":
            return attend(query, key, value, segments, backend=self.backend)
        frames = layout.by_frame
        query, key, value = (permute(side, frames.order, frames.inverse) for side in (query, key, value))
        return permute(attend(query, key, value, segments, backend=self.backend), frames.inverse, frames.order)

    def text_keys(self, attn: Any, text: torch.Tensor, layout: PackedLayout) -> Sequence[Keys]:
        """Return the keys of the texts `(any, tokens, dim)`; the results of several are added up."""
        if getattr(attn, "norm_cross", None):
            text = attn.norm_encoder_hidden_states(text)
        key, value = project(attn, text.flatten(0, 1), "to_k", "to_v")
        key, value = self.split_heads(attn, key, attn.norm_k), self.split_heads(attn, value)
        if torch.compiler.is_compiling() or layout.text_index is not None:  # one graph serves both kinds of packs
            # from the stored texts to the samples' texts, one after another
            key, value = key[layout.text_order], value[layout.text_order]
        elif len(key) > layout.num_text_tokens:  # padding of rows
            key, value = key[: layout.num_text_tokens], value[: layout.num_text_tokens]
        return [Keys(key, value, layout.cross_segments)]

    def rotate(self, tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Rotate `(N, H, D)`: the two halves of each part of a head's channels against each other."""
        parts = zip(tokens.chunk(len(rotary) // 2, dim=-1), rotary[::2], rotary[1::2], strict=True)
        return torch.cat([rotate_channels(part, tables, halves=True) for part, *tables in parts], dim=-1)

    def gate(self, attn: Any, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Scale what tokens attended to, `(N, H, D)`, where the module does so; `hidden_states` are its input."""
        return attended

    def split_heads(self, attn: Any, states: torch.Tensor, norm: Any = None) -> torch.Tensor:
        """Turn `(…, H·D)` into `(N, H, D)`, normalised."""
        if norm is not None and self.norms_whole_width:
            states, norm = norm(states), None
        heads = states.flatten(0, -2).unflatten(1, (attn.heads, -1))
        return heads if norm is None else norm(heads)


class PackedJointAttnProcessor(Processor):
    """Attention of SD3, CogVideoX, HunyuanVideo and Flux over the strips of a pack, each with its text slots.

    Each sample's tokens and its text tokens attend to each other. Text has projections of its own where the module has
    them (`add_q_proj`), else those of the tokens. Where a module gets no text, the text slots precede the tokens of
    each strip (Flux), or tokens attend to tokens alone (SD3.5). Text is rotated where there are tables for it.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend inside each sample.

        Args:
            attn (`Attention` or `FluxAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips; of shape `(strips,
                text_slots + strip_length, dim)` where text comes in the same tensor.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`, *optional*): The text slots.
            attention_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.
            image_rotary_emb (`tuple`, *optional*): Cosines and sines of the tokens, `(strips, strip_length,
                head_dim)`, and of the text, `(strips, text_slots, head_dim)`; without the latter text is not rotated.
            encoder_hidden_states_mask (`torch.Tensor`, *optional*): Unused, like the other mask.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`, and with `encoder_hidden_states` another in its shape.

        Raises:
            PackingError: If no pack is being computed.
        """
        layout, has_text_layers = active_layout(), encoder_hidden_states is not None and _has(attn, "add_q_proj")
        _, length = layout.row_sizes
        text, tokens = hidden_states.split([hidden_states.shape[1] - length, length], 1)
        text = text if encoder_hidden_states is None else encoder_hidden_states
        of_tokens, of_text = _sides(image_rotary_emb, self._parallel_config)
        if not text.shape[1]:
            query, key, value = (part.flatten(0, 1) for part in self.heads(attn, tokens, of_tokens))
            attended = attend(query, key, value, layout.self_segments, backend=self.backend)
            return _through(attn.to_out, attended.flatten(1).view_as(hidden_states))
        joint = layout.joint
        if has_text_layers or self._parallel_config is not None:
            at_once = self._parallel_config is None and of_tokens is not None and of_text is not None
            tables = (None, None) if at_once else (of_tokens, of_text)
            words = self._all_heads(attn, text, tables[1], added=has_text_layers)
            pairs = zip(self._all_heads(attn, tokens, tables[0]), words, strict=True)
            query, key, value = (joint.join(*pair) for pair in pairs)
            if at_once:
                both = joint.gather_tables(of_tokens or (), of_text or ())
                query, key = self.rotate(query, both), self.rotate(key, both)
        elif of_tokens is None or of_text is not None:
            both = joint.gather_tables(of_tokens or (), of_text or ())
            query, key, value = self.heads(attn, joint.gather(tokens, text), both or None)
        else:
            query, key, value = self.heads(attn, joint.gather(tokens, text))
            sides = (joint.scatter(part) for part in (query, key))
            query, key = (joint.gather(self.rotate(states, of_tokens), words) for states, words in sides)
        attended = attend(query, key, value, joint.segments, backend=self.backend)
        if not has_text_layers and _has(attn, "to_out"):  # of tokens and text alike
            attended = _through(attn.to_out, attended.flatten(1)).unsqueeze(1)
        tokens, text = (self._local_tokens(attn, side) for side in joint.separate(attended))
        if has_text_layers:
            tokens = _through(attn.to_out, tokens) if _has(attn, "to_out") else tokens
            text = attn.to_add_out(text) if _has(attn, "to_add_out") else text
        tokens, text = (side.unflatten(0, (joint.strips, -1)) for side in (tokens, text))
        return torch.cat([text, tokens], 1) if encoder_hidden_states is None else (tokens, text)

    def _all_heads(
        self, attn: Any, states: torch.Tensor, rotary: Rotary | None, *, added: bool = False
    ) -> Sequence[torch.Tensor]:
        """Return query, key and value of all tokens in rows, `(N, H, D)`: of those of other processes, too."""
        if self._parallel_config is None:
            tables = rotary if rotary is None else tuple(table.flatten(0, 1) for table in rotary)
            return self.heads(attn, states.flatten(0, 1), tables, added=added)
        parts = self.heads(attn, states, rotary, added=added)
        return [all_tokens(part, self._parallel_config).flatten(0, 1) for part in parts]

    def _local_tokens(self, attn: Any, attended: torch.Tensor) -> torch.Tensor:
        """Return what this process's tokens attended to, `(N, H·D)`, of all tokens of as many rows, `(N, H, D)`."""
        if self._parallel_config is not None:
            by_strip = attended.unflatten(0, (active_layout().joint.strips, -1))
            attended = local_tokens(by_strip, self._parallel_config, heads=_num_heads(attn)).flatten(0, 1)
        return attended.flatten(1)

    def heads(
        self, attn: Any, states: torch.Tensor, rotary: Sequence[torch.Tensor] | None = None, *, added: bool = False
    ) -> Sequence[torch.Tensor]:
        """Return query, key and value, each of shape `(…, H, D)`, normalised by head, and rotated if there are tables.

        With `added`, by the projections and norms that the module has for text.
        """
        norms = (attn.norm_added_q, attn.norm_added_k) if added else (attn.norm_q, attn.norm_k)
        names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
        parts = project(attn, states, *names)
        width = parts[0].shape[-1] // _num_heads(attn)  # keys and values may have fewer heads
        heads = [part.unflatten(-1, (-1, width)) for part in parts]
        query, key = (part if norm is None else norm(part) for part, norm in zip(heads, norms, strict=False))
        if rotary is not None:
            query, key = self.rotate(query, rotary), self.rotate(key, rotary)
        return query, key, heads[2]

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate neighbouring channels of `(…, H, D)` by tables `(…, D)`."""
        return rotate_channels(tokens, rotary)


class PackedRowAttnProcessor(PackedJointAttnProcessor):
    """Attention over whole batch rows: of a strip's tokens, of its text slots, or of both side by side.

    For models that refine tokens and text apart before they join them (Lumina 2, Z-Image).

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        scope (`"joint"`, `"tokens"` or `"text"`): What the rows hold.

    Raises:
        PackingError: If the scope is unknown.
    """

    text_first: ClassVar[bool] = True
    """Whether the text slots precede the tokens in rows of both."""

    def __init__(self, backend: Backend = "segments", *, scope: RowScope = "joint") -> None:
        if scope not in get_args(RowScope):
            raise PackingError(f"scope must be one of {get_args(RowScope)}, got {scope!r}.")
        super().__init__(backend)
        self.scope = scope

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of its scope."""
        if self.scope == "tokens":
            return (layout.self_segments,)
        return (layout.joint.segments if self.scope == "joint" else layout.joint.text_segments,)

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: torch.Tensor | None = None,
        freqs_cis: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`Attention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, length, dim)`): The rows.
            encoder_hidden_states (`torch.Tensor`, *optional*): Unused; the same rows once more.
            attention_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.
            image_rotary_emb (`torch.Tensor` of shape `(strips, length, D/2)`, *optional*): Complex rotations.
            freqs_cis (`torch.Tensor`, *optional*): Their name in Z-Image.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        layout, rotary = active_layout(), image_rotary_emb if freqs_cis is None else freqs_cis
        assert rotary is not None, "the models rotate all rows"
        (segments,) = self.segments(layout)
        if self.scope == "joint":
            sides = (self._tokens_and_text(part, layout) for part in (hidden_states, rotary))
            states, table = (layout.joint.gather(tokens, text) for tokens, text in sides)
        else:
            states, table = (part.flatten(0, 1) for part in (hidden_states, rotary))
        query, key, value = self.heads(attn, states, [table])
        attended = _through(attn.to_out, attend(query, key, value, segments, backend=self.backend).flatten(1))
        if self.scope != "joint":
            return attended.view_as(hidden_states)
        tokens, text = layout.joint.scatter(attended)
        return torch.cat([text, tokens] if self.text_first else [tokens, text], 1)

    def _tokens_and_text(self, rows: torch.Tensor, layout: PackedLayout) -> Sequence[torch.Tensor]:
        sizes = [*layout.row_sizes]
        return rows.split(sizes, 1)[::-1] if self.text_first else rows.split(sizes[::-1], 1)

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate `(…, H, D)` by complex tables `(…, D/2)`, as the stock processors do."""
        turned = torch.view_as_complex(tokens.float().unflatten(-1, (-1, 2))) * rotary[0].unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(tokens)


def _sides(rotary: Rotary | None, parallel_config: Any) -> tuple[Rotary | None, Rotary | None]:
    """Return the cosines and sines of this process's tokens, and those of its text."""
    if rotary is None:
        return None, None
    tables = tuple(local_part(table, parallel_config) for table in rotary)
    return tables[:2], tables[2:] or None


def _num_heads(attn: Any) -> int:
    return int(attn.heads if _has(attn, "heads") else attn.num_heads)


def rotate_channels(tokens: torch.Tensor, tables: Sequence[torch.Tensor], *, halves: bool = False) -> torch.Tensor:
    """Rotate pairs of channels of `(N, H, D)` as diffusers' `apply_rotary_emb` does, in float32.

    Tokens may also come by strip, `(strips, strip_length, H, D)`. Cosines and sines have shape `(strips, strip_length,
    D)`, or `(strips, strip_length, H·D)` where heads differ. With `halves`, a channel of the first half and its
    counterpart in the second make a pair, else two neighbours.
    """
    if halves:
        turned = turn_halves(tokens)
    else:
        even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    # (strips, strip_length, D or H·D) -> (N, 1 or H, D) or (strips, strip_length, 1 or H, D)
    cosines, sines = (table.reshape(*tokens.shape[:-2], -1, tokens.shape[-1]) for table in tables)
    return (tokens.float() * cosines + turned.float() * sines).to(tokens.dtype)


def turn_halves(tokens: torch.Tensor) -> torch.Tensor:
    """Turn the halves of the channels of `(…, D)` by a right angle: the second, negated, and then the first."""
    first, second = tokens.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


_FUSED = {
    ("to_q", "to_k", "to_v"): "to_qkv",
    ("to_k", "to_v"): "to_kv",
    ("add_q_proj", "add_k_proj", "add_v_proj"): "to_added_qkv",
    ("add_k_proj", "add_v_proj"): "to_added_kv",
}


def project(attn: Any, states: torch.Tensor, *names: str) -> Sequence[torch.Tensor]:
    """Project states by a module's layers of these names, or by the layer into which diffusers fused them."""
    if getattr(attn, "fused_projections", False):
        fused: torch.Tensor = getattr(attn, _FUSED[names])(states)
        return fused.chunk(len(names), dim=-1)
    return [getattr(attn, name)(states) for name in names]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, *, backend: Backend
) -> torch.Tensor:
    """Attend inside each segment; the result, `(N, H, D)`, has the dtype of the queries."""
    from .attention.dispatch import packed_attention

    grouped = query.shape[1] != key.shape[1]
    return packed_attention(query, key, value, segments, backend=backend, enable_gqa=grouped).type_as(query)


def attend_if_any(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, *, backend: Backend
) -> torch.Tensor:
    """Attend as [`attend`] does, also where no sample has anything to attend to; keys may have padding at their end.

    Without segments the result is 0, and weights get gradients of 0, for which other processes may wait.
    """
    if not segments.queries:
        return 0 * (query + key.sum() + value.sum())
    count = segments.num_keys
    return attend(query, key[:count], value[:count], segments, backend=backend)


def _through(modules: Iterable[torch.nn.Module], states: torch.Tensor) -> torch.Tensor:
    for module in modules:
        states = module(states)
    return states


def _has(attn: Any, name: str) -> bool:
    """Return whether a part exists: diffusers leaves it out, or sets it to None."""
    return getattr(attn, name, None) is not None


def _refuse_mixing(attn: Any) -> None:
    """Refuse what diffusers' `Attention` can have and a pack cannot run."""
    if _has(attn, "group_norm") or _has(attn, "spatial_norm") or getattr(attn, "residual_connection", False):
        raise PackingError("An attention module with a group norm, spatial norm or residual cannot run a pack.")
