"""Base of the families whose text attends in one sequence with the tokens: each strip carries some of the text."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from ..buckets.sizes import round_to_multiple
from ..devices import to_device
from ..errors import PackingError
from ..packing.context import active_layout
from ..packing.family import Draw, Family, Transformer
from ..packing.layout import Grid, PackedLayout, best_text_slots
from ..packing.positions import PackTables, Tables
from ..packing.processors import PackedJointAttnProcessor, Rotary
from ..packing.strips import by_strip
from ..packing.texts import TextTokens, pad_texts


class JointFamily(Family):
    """Base of the families whose models attend to tokens and text tokens in one sequence.

    Attributes:
        guidance (`float`): The distilled guidance that the pipeline passes by default.
        takes (`tuple` of `str`): Conditioning that the forward takes where the configuration has channels for it.
        rotates_text (`bool`): Whether the model rotates text tokens too, see [`text_positions`].
        text_norms (`tuple` of `str`): Norms that modulate text alone, such as `transformer_blocks.*.norm1_context`.
        text_modulations (`tuple` of `str`): Modules that make modulation of text alone of an embedding of timesteps.
        joint_norms (`tuple` of `str`): Norms that modulate tokens and text, whose outputs of these numbers
            (`text_outputs`) are the text's.
        row_norms (`tuple` of `str`): Norms that modulate rows of text slots and tokens, the former in front
            (`text_first`) or behind.
    """

    processor_class = PackedJointAttnProcessor
    text: ClassVar[TextTokens] = TextTokens(rows="slots")
    cast_inputs: ClassVar[tuple[str, ...]] = (*Family.cast_inputs, "pooled_projections")
    guidance: ClassVar[float] = 3.5
    takes: ClassVar[tuple[str, ...]] = ("pooled_projections", "guidance")
    rotates_text: ClassVar[bool] = False
    text_norms: ClassVar[tuple[str, ...]] = ()
    text_modulations: ClassVar[tuple[str, ...]] = ()
    joint_norms: ClassVar[tuple[str, ...]] = ()
    text_outputs: ClassVar[Sequence[int]] = ()
    row_norms: ClassVar[tuple[str, ...]] = ()
    text_first: ClassVar[bool] = False

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return any pooled text embeddings, `(n, pooled_projection_dim)`, and any distilled guidance, `(n,)`."""
        width, draws = transformer.config.get("pooled_projection_dim"), dict[str, Draw]()
        if width and "pooled_projections" in self.takes:
            draws["pooled_projections"] = lambda grids: torch.randn(len(grids), width)
        if transformer.config.get("guidance_embeds") and "guidance" in self.takes:
            draws["guidance"] = lambda grids: torch.full((len(grids),), self.guidance)
        return draws

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Return the layout with text slots: as few as hold the texts, or the given number per strip."""
        if pad_text_to is None:
            slots = round_to_multiple(best_text_slots(layout), layout.processes)
            return replace(layout, text_slots=slots), None
        if pad_to is None or pad_text_to % (pad_to * layout.processes) or not pad_text_to:
            shared = f", times the {layout.processes} processes that share a strip" if layout.processes > 1 else ""
            raise PackingError(
                "The strips of this model carry its text, each with the same number of text slots: pad_text_to must "
                f"be a multiple of pad_to{shared}, got {pad_text_to} and {pad_to}."
            )
        layout = replace(layout, text_slots=pad_text_to // pad_to)
        if sum(layout.text_strips_per_sample) > pad_to:
            raise PackingError(
                f"The texts fill {sum(layout.text_strips_per_sample)} strips of {layout.text_slots} text slots, more "
                f"than the {pad_to} to pad to; give a larger pad_text_to, or pack fewer samples."
            )
        return layout, None

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Return the rotary tables of a sample's text, `(length, channels)` each, for models that rotate text.

        The module is that of [`positions`][hf_bucketing.packing.family.Family.positions]; the grids are the sample's
        own and those of its references.
        """
        raise NotImplementedError

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also what modulates text, to do so by its own sample's timestep; see [`hook_norms`]."""
        return [*super().hook_positions(transformer, base_size), *self.hook_norms(transformer)]

    def hook_norms(self, transformer: Transformer) -> list[Any]:
        """Let blocks modulate the text in a strip's slots by its own sample's timestep, not by the strip's."""
        return [
            *hook_text_norms(_modules(transformer, self.text_norms)),
            *hook_joint_norms(_modules(transformer, self.joint_norms), text_outputs=self.text_outputs),
            *hook_row_modulation(_modules(transformer, self.row_norms), text_first=self.text_first),
            *(
                module.register_forward_pre_hook(embeddings_of_text)
                for module in _modules(transformer, self.text_modulations)
            ),
        ]

    def pack_tables(self, base_size: Grid | None) -> PackTables:
        """Return a function of the module that makes the tables of the active pack: of tokens, then of text slots.

        The latter are for families that rotate text (`rotates_text`).
        """
        by_strip = super().pack_tables(base_size)
        return partial(_joint_tables, by_strip, Tables(partial(_of_text, self))) if self.rotates_text else by_strip


def _modules(transformer: Transformer, names: Iterable[str]) -> Iterator[torch.nn.Module]:
    """Yield the modules of all blocks that names such as `transformer_blocks.*.norm1` stand for."""
    for name in names:
        blocks, _, inner = name.partition(".*.")
        for block in getattr(transformer, blocks):
            yield getattr(block, inner)


def _of_text(family: JointFamily, module: Any, key: tuple[tuple[Grid, ...], int], *, device: torch.device) -> Rotary:
    grids, length = key
    return family.text_positions(module, grids, length, device=device)


@torch.compiler.disable  # loops over the samples of the pack, as position_strips does
def _joint_tables(by_strip: PackTables, texts: Tables, module: Any) -> Rotary:
    """Return the tables of the active pack's tokens by strip, then those of its texts by text slot."""
    layout = active_layout()
    samples = zip(layout.sample_grids, layout.text_lengths, strict=True)
    parts = zip(*(texts(module, sample, torch.device(layout.device)) for sample in samples), strict=True)
    return *by_strip(module), *(layout.joint.fill_slots(torch.cat(part)) for part in parts)


@torch.compiler.disable  # loops over the samples of the pack
def joint_tables(
    tables: Tables, module: Any, samples: Iterable[Hashable] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table of the active pack's tokens by strip, and one of its texts by text slot.

    For positions of tokens that follow from the length of their text: the function behind `tables` is given a sample's
    grid with that length, or its entry in `samples`, and returns the table of its tokens and that of its text.
    """
    layout = active_layout()
    device = torch.device(layout.device)
    if samples is None:
        samples = zip(layout.grids, layout.text_lengths, strict=True)
    of_tokens, of_texts = zip(*(tables(module, sample, device) for sample in samples), strict=True)
    return by_strip(of_tokens, layout), layout.joint.fill_slots(torch.cat(of_texts))


def texts_by_sample(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the texts in text slots, `(strips, text_slots, dim)`, as a row per sample, `(n, length, dim)`.

    For modules that work on a whole text. The mask that comes with them, `(n, length)`, is zero for padding.
    """
    layout = active_layout()
    return pad_texts(layout.joint.read_slots(slots).split(layout.text_lengths))


def order_by_sample(layout: PackedLayout, *added: Sequence[int]) -> torch.Tensor:
    """Return where a sample's own tokens lie among all tokens that stand beside those of the latents, for all samples.

    Before the texts, which lie in rows of one length, there are the further tokens, such as those of an image: `added`
    counts them for each sample. A sample's own tokens follow in this order: those added, then its text.

    Example:
        Two samples with two and no further tokens, and texts of one and three tokens:

        >>> layout = PackedLayout(grids=((1, 1, 1), (1, 1, 1)), text_lengths=(1, 3), strip_length=1)
        >>> order_by_sample(layout, (2, 0)).tolist()
        [0, 1, 2, 5, 6, 7]
    """
    spans: list[list[tuple[int, int]]] = [[] for _ in layout.text_lengths]
    start, longest = 0, max(layout.text_lengths)
    for counts in added:
        for sample, count in enumerate(counts):
            spans[sample].append((start, start + count))
            start += count
    for sample, length in enumerate(layout.text_lengths):
        spans[sample].append((start, start + length))
        start += longest
    return to_device(torch.cat([torch.arange(*span) for sample in spans for span in sample]), layout.device)


def hook_text_norms(norms: Iterable[torch.nn.Module]) -> list[Any]:
    """Let norms that are called with the text in slots and an embedding of timesteps take its own sample's."""
    return [norm.register_forward_pre_hook(_modulate_text, with_kwargs=True) for norm in norms]


def hook_joint_norms(norms: Iterable[torch.nn.Module], *, text_outputs: Sequence[int]) -> list[Any]:
    """Let norms of tokens and text, which also return gates, modulate the text by its own sample's timestep.

    Args:
        norms (iterable of `torch.nn.Module`): Norms that are called with tokens, text and an embedding of timesteps.
        text_outputs (sequence of `int`): Positions of the text's tensors in what they return.

    Returns:
        `list`: Handles of the hooks.
    """
    return [norm.register_forward_hook(partial(_modulate_text_outputs, text_outputs)) for norm in norms]


def hook_row_modulation(norms: Iterable[torch.nn.Module], *, text_first: bool) -> list[Any]:
    """Let norms of rows that hold text slots and tokens modulate the text by its own sample's timestep.

    Args:
        norms (iterable of `torch.nn.Module`): Norms that are called with rows and an embedding `emb` of timesteps, and
            return modulated rows and further modulation `(rows, dim)`, such as gates.
        text_first (`bool`): Whether the text precedes the tokens of a row.

    Returns:
        `list`: Handles of the hooks.
    """
    modulate_row = partial(_modulate_row, text_first=text_first)
    return [norm.register_forward_hook(modulate_row, with_kwargs=True) for norm in norms]


def _modulate_text(norm: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    text, *embedding = args
    return (text, *map(of_text, embedding)), {name: of_text(value) for name, value in kwargs.items()}


def _modulate_text_outputs(
    text_outputs: Sequence[int], norm: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    if active_layout().joint.text_strips() is None:
        return output
    hidden_states, text, embedding = args
    # norm.forward instead of norm(…), which would call the hook again; without tokens, whose part is done
    again = norm.forward(hidden_states[:, :0], text, of_text(embedding))
    return tuple(again[part] if part in text_outputs else values for part, values in enumerate(output))


def _modulate_row(
    norm: Any,
    args: tuple[torch.Tensor, ...],
    kwargs: dict[str, torch.Tensor],
    output: tuple[torch.Tensor, ...],
    *,
    text_first: bool,
) -> tuple[torch.Tensor | ModulatedRows, ...] | None:
    """Modulate the text of each row again, and return for each gate one for the text and one for the row's tokens."""
    layout = active_layout()
    strips = layout.joint.text_strips()
    if strips is None:
        return None
    (rows, embedding), (modulated, *gates) = (*args, *kwargs.values()), output
    words, tokens = layout.row_sizes
    sizes, side = ((words, tokens), 0) if text_first else ((tokens, words), 1)
    parts = list(modulated.split(sizes, 1))
    parts[side], *of_text = norm.forward(rows.split(sizes, 1)[side], emb=embedding.index_select(0, strips))
    pairs = zip(of_text, gates, strict=True)
    return torch.cat(parts, 1), *(ModulatedRows(pair if text_first else pair[::-1], sizes) for pair in pairs)


_ADD = (operator.add, torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
_MUL = (operator.mul, torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


class ModulatedRows:
    """Modulation `(rows, …)` of the two parts of rows, in the place of the one tensor that a block computes with."""

    def __init__(self, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.sizes = sizes

    def unsqueeze(self, dim: int) -> ModulatedRows:
        return self._each(lambda part: part.unsqueeze(dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> ModulatedRows:
        return self._each(lambda part: part.unflatten(dim, sizes))

    def tanh(self) -> ModulatedRows:
        return self._each(torch.tanh)

    def chunk(self, count: int, dim: int) -> list[ModulatedRows]:
        return self._zipped(part.chunk(count, dim) for part in self.parts)

    def __getitem__(self, index: Any) -> ModulatedRows:
        return self._each(lambda part: part[index])

    def unbind(self, dim: int) -> list[ModulatedRows]:
        return self._zipped(part.unbind(dim) for part in self.parts)

    def __add__(self, table: torch.Tensor) -> ModulatedRows:
        return self._each(lambda part: part + table)

    def __radd__(self, number_or_rows: float | torch.Tensor) -> ModulatedRows | torch.Tensor:
        if not isinstance(number_or_rows, torch.Tensor):
            return self._each(lambda part: number_or_rows + part)
        pairs = zip(self.parts, number_or_rows.split(self.sizes, 1), strict=True)
        return torch.cat([row + part for part, row in pairs], 1)

    def __mul__(self, rows: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.parts, rows.split(self.sizes, 1), strict=True)
        return torch.cat([part * row for part, row in pairs], 1)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute `tensor + self` and `self * tensor` as above, where torch asks for it, as in `torch.compile`."""
        if function in _ADD:
            left, right = args
            return left.__add__(right) if isinstance(left, cls) else right.__radd__(left)
        if function in _MUL:
            left, right = args
            return left.__mul__(right) if isinstance(left, cls) else right.__rmul__(left)
        return NotImplemented

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ModulatedRows:
        return type(self)([function(part) for part in self.parts], self.sizes)

    def _zipped(self, parts: Iterable[Iterable[torch.Tensor]]) -> list[ModulatedRows]:
        return [type(self)(sides, self.sizes) for sides in zip(*parts, strict=True)]


def embeddings_of_text(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Give a module that modulates text the embeddings of the text's own sample; a forward pre-hook."""
    return tuple(map(of_text, args))


def of_text(values: torch.Tensor) -> torch.Tensor:
    """Return modulation `(strips, …)` of strips' tokens as that of the text in their slots."""
    strips = active_layout().joint.text_strips()
    return values if strips is None else values.index_select(0, strips)
