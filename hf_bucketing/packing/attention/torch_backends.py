"""The backends that torch itself has: `"dense"`, `"segments"` and `"flex"`.

`"dense"` is one call of `scaled_dot_product_attention` with a mask of all queries and keys. `"segments"` is one call
for all segments of the same lengths, and the specification of the other backends. Equal segments at equal distances
are a view of the pack, so a pack of samples of one size is computed like a plain batch. `"flex"` is FlexAttention,
which skips the blocks that no segment touches. N segments of a group, L tokens of a segment, H heads, D head_dim.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ...devices import to_device
from ...errors import PackingError
from ...units import format_bytes
from ..segments import AttentionOptions, SegmentSpans, Span

MASK_LIMIT = 2 * 2**30
"""Largest mask in bytes; a pair of a query and a key takes one byte."""


def attend_densely(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention].

    Raises:
        PackingError: If the mask would be larger than 2 GiB.
    """
    mask, has_key = dense_mask(segments, query.device), segments.has_key(query.device)
    # (tokens, heads, head_dim) -> (1, heads, tokens, head_dim)
    q, k, v = (side.transpose(0, 1)[None] for side in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options.for_sdpa())
    return torch.where(has_key[:, None, None], out[0].transpose(0, 1), 0)


def dense_mask(segments: SegmentSpans, device: torch.device) -> torch.Tensor:
    """Return which queries attend to which keys, `bool`, `(num_queries, num_keys)`.

    A query without keys attends to all keys: kernels disagree on rows without keys, up to NaN gradients.
    """
    size = segments.num_queries * segments.num_keys
    if size > MASK_LIMIT:
        raise PackingError(
            f"A mask of {segments.num_queries} queries and {segments.num_keys} keys takes {format_bytes(size)}, and "
            f"the backend 'dense' takes at most {format_bytes(MASK_LIMIT)}; use 'varlen' on a CUDA device, or "
            "'segments'."
        )

    def make() -> torch.Tensor:
        mask, keys = ~segments.has_key(device)[:, None], torch.arange(segments.num_keys, device=device)
        for start, stop in segments.key_bounds(device):
            mask = mask | ((keys >= start[:, None]) & (keys < stop[:, None]))
        return mask

    return segments.made(("dense", device), make)


class Stretch(NamedTuple):
    """`times` ranges of `length` tokens, one every `step` tokens from `start` on."""

    start: int
    times: int
    step: int
    length: int

    @property
    def stop(self) -> int:
        """The token after the last step."""
        return self.start + self.times * self.step


class Run(NamedTuple):
    """Consecutive segments of the same lengths at the same distances."""

    queries: Stretch
    keys: Stretch

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of each segment."""
        return self.queries.length, self.keys.length


@torch.compiler.disable
def attend_by_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention].

    `torch.compile` breaks its graph here: these calls depend on the composition of a pack, and a graph of them would
    serve no other pack.
    """
    runs = segments.made("runs", lambda: find_runs(segments))
    queries = _cut(query, [run.queries for run in runs])
    keys, values = (
        _cut(side, [run.keys for run in runs])
        if segments.keys_ascend
        else [_by_head(side[run.keys.start : run.keys.stop]) for run in runs]
        for side in (key, value)
    )
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        groups[run.lengths].append(number)
    outputs: dict[int, torch.Tensor] = {}
    for (_, key_length), numbers in groups.items():
        q = _stack([(queries[number], runs[number].queries) for number in numbers])
        if key_length:
            k = _stack([(keys[number], runs[number].keys) for number in numbers])
            v = _stack([(values[number], runs[number].keys) for number in numbers])
            out = _attended(q, k, v, options)
        else:
            out = torch.zeros_like(q)
        outputs.update(zip(numbers, _of_runs(out, [runs[number].queries for number in numbers]), strict=True))
    return _join_outputs([(outputs[number], run.queries) for number, run in enumerate(runs)], segments.num_queries)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Attend with queries `(N, H, L, D)`; to a single key without a kernel, because the result is its value.

    Kernels compute short segments in blocks, with 128 rows of a backward buffer for each. Queries and keys still get
    gradients, of zero, because DDP waits for one from every parameter.
    """
    if k.shape[2] > 1 or options.dropout:
        return F.scaled_dot_product_attention(q, k, v, **options.for_sdpa())
    heads, nothing = q.shape[1] // v.shape[1], q[:0].sum() + k[:0].sum()
    return (v.repeat_interleave(heads, 1) if heads > 1 else v).expand_as(q) + nothing


def find_runs(segments: SegmentSpans) -> list[Run]:
    """Join consecutive segments whose queries and whose keys are views of one range of the pack."""
    spans = list(zip(segments.queries, segments.keys, strict=True))
    runs: list[Run] = []
    first = 0
    while first < len(spans):
        query_run = _stretch([queries for queries, _ in spans[first:]], end=segments.num_queries)
        key_run = _stretch([keys for _, keys in spans[first:]], end=segments.num_keys)
        count = min(query_run.times, key_run.times)
        runs.append(Run(*(run._replace(times=count) if count > 1 else _single(run) for run in (query_run, key_run))))
        first += count
    return runs


def _stretch(spans: Sequence[Span], *, end: int) -> Stretch:
    """Return the longest stretch at the start of the spans; its last step ends before the next span and `end`."""
    start, stop = spans[0]
    length = stop - start
    step = spans[1][0] - start if len(spans) > 1 else length
    if step < length or not length:
        return Stretch(start, 1, length, length)
    count = 1
    while count < len(spans) and spans[count] == (start + count * step, start + count * step + length):
        count += 1
    following = spans[count][0] if count < len(spans) else end
    fits = start + count * step <= min(end, following if following >= start else end)
    return Stretch(start, count if fits else count - 1, step, length)


def _single(run: Stretch) -> Stretch:
    return Stretch(run.start, 1, run.length, run.length)


def _by_head(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[None].transpose(1, 2)  # (N, H, D) -> (1, H, N, D)


def _cut(tokens: torch.Tensor, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
    """Cut tokens `(N, H, D)` into stretches `(1, H, tokens, D)`.

    One split does it: with slices, each stretch's gradient would have the pack's size.
    """
    sizes, places, end = [], [], 0
    for stretch in stretches:
        sizes += [stretch.start - end] if stretch.start > end else []
        places.append(len(sizes))
        sizes.append(stretch.stop - stretch.start)
        end = stretch.stop
    if end < len(tokens):
        sizes.append(len(tokens) - end)
    pieces = _by_head(tokens).split(sizes, 2) if len(sizes) > 1 else [_by_head(tokens)]
    return [pieces[place] for place in places]


def _stack(parts: Sequence[tuple[torch.Tensor, Stretch]]) -> torch.Tensor:
    """Stack parts `(1, H, tokens, D)` to `(N, H, L, D)`; a single part stays a view."""
    stacked = [_unstretched(part, stretch) for part, stretch in parts]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked)


def _unstretched(part: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    if stretch.times == 1:
        return part
    steps = part.squeeze(0).unflatten(1, (stretch.times, stretch.step)).transpose(0, 1)
    return steps if stretch.step == stretch.length else steps[:, :, : stretch.length]


def _of_runs(out: torch.Tensor, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
    """Return what each run of a group computed, `(1, tokens, H, D)`, out of `(N, H, L, D)` of all of them."""
    tokens = out.transpose(1, 2)
    parts = [tokens] if len(stretches) == 1 else tokens.split([stretch.times for stretch in stretches])
    return [_stretched(part, stretch) for part, stretch in zip(parts, stretches, strict=True)]


def _stretched(part: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    padding = stretch.step - stretch.length
    padded = F.pad(part, (0, 0, 0, 0, 0, padding)) if padding else part
    return padded if stretch.times == 1 else padded.flatten(0, 1)[None]


def _join_outputs(parts: Sequence[tuple[torch.Tensor, Stretch]], num_queries: int) -> torch.Tensor:
    """Join outputs `(1, tokens, H, D)` into the tokens of the pack, with zeros for padding."""
    ends = [0, *(stretch.stop for _, stretch in parts)]
    gaps = [start - end for start, end in zip([*(part.start for _, part in parts), num_queries], ends, strict=True)]
    first, _ = parts[0]
    zeros = first.new_zeros(1, max(gaps), *first.shape[2:])
    pieces = [zeros[:, :gap] for gap in gaps[:1] if gap]
    for (part, _), gap in zip(parts, gaps[1:], strict=True):
        pieces += [part, zeros[:, :gap]] if gap else [part]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).squeeze(0)


BLOCK = 128
"""Queries and keys of a block, FlexAttention's default."""


def attend_by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention]."""
    # (tokens, heads, head_dim) -> (1, heads, tokens, head_dim)
    q, k, v = (side.transpose(0, 1)[None] for side in (query, key, value))
    attend: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    mask = block_mask(segments, query.device)
    out: torch.Tensor = attend(q, k, v, block_mask=mask, scale=options.scale, enable_gqa=options.enable_gqa)
    return out[0].transpose(0, 1)


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled; uncompiled it computes all pairs."""
    return torch.compile(flex_attention)


def block_mask(segments: SegmentSpans, device: torch.device) -> BlockMask:
    """Return the blocks that segments touch, made from the segments' bounds alone.

    Evaluating a mask function at every pair would take time and memory quadratic in the tokens.
    """

    def make() -> BlockMask:
        touched, full = block_tables(segments)
        (start, stop), *more = segments.key_bounds(device)

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            inside = (key >= start[query]) & (key < stop[query])
            for first, last in more:
                inside = inside | ((key >= first[query]) & (key < last[query]))
            return inside

        return BlockMask.from_kv_blocks(
            *_ordered(touched & ~full, device),
            *_ordered(full, device),
            BLOCK_SIZE=BLOCK,
            mask_mod=attends,
            seq_lengths=(segments.num_queries, segments.num_keys),
        )

    return segments.made(("flex", device), make)


def block_tables(segments: SegmentSpans) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of queries and keys a segment touches, and which one fills: two `bool` tables."""
    shape = -(-segments.num_queries // BLOCK), -(-segments.num_keys // BLOCK)
    touched, full = np.zeros(shape, bool), np.zeros(shape, bool)
    for side in segments.key_sides:
        for queries, keys in zip(segments.queries, side, strict=True):
            if keys[1] > keys[0]:
                touched[tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in (queries, keys))] = True
                full[tuple(slice(-(-start // BLOCK), stop // BLOCK) for start, stop in (queries, keys))] = True
    return touched, full


def _ordered(table: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks per row, `(1, 1, rows)`, and which they are, `(1, 1, rows, columns)`."""
    indices = torch.from_numpy(np.argsort(~table, axis=1, kind="stable").astype(np.int32))
    counts = torch.from_numpy(table.sum(1, dtype=np.int32))
    return to_device(counts[None, None], device), to_device(indices[None, None], device)
