"""Captions of which a text encoder reads only the beginning: how many they are, and the longest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..buckets.arrays import IntArray
from ..columns.arrays import column_array, column_batches, is_list_type, spread
from ..columns.prepared import PreparedDataset
from ..errors import BucketingError
from ..hub import from_hub
from .facts import RecipeFacts
from .index import read_index

_SPECIAL_TOKENS = 8
"""Most tokens that a tokenizer adds to a text."""

_TEXTS_AT_ONCE = 1000

MEASURED_ROWS = 100_000
"""Rows that are looked at while a data set is prepared or cached: a minute on two CPUs, if all captions are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionLengths:
    """Captions that have more tokens than the text encoder takes of each.

    Attributes:
        most (`int`): Tokens that it takes.
        looked_at (`int`): Captions that were looked at.
        longer (`int`): Captions that have more.
        longest (`int`): Tokens of the longest of these, 0 without any.
        row (`int`): Row of the longest.
    """

    most: int
    looked_at: int
    longer: int
    longest: int
    row: int

    def describe(self, prepared: PreparedDataset) -> str:
        """Return a sentence on their number with the longest and its row; `""` without any."""
        if not self.longer:
            return ""
        (file,) = prepared.file_names([self.row])
        return (
            f"Of {self.looked_at:,} captions looked at, {self.longer:,} have more than the {self.most:,} tokens "
            "(max_sequence_length) that the text encoder reads of each, from the beginning; the longest, of row "
            f"{self.row} ({file}), has {self.longest:,}."
        )


def caption_lengths(
    prepared: PreparedDataset,
    recipe: type[RecipeFacts],
    name_or_path: str,
    *,
    rows: int,
    max_sequence_length: int | None = None,
) -> CaptionLengths:
    """Count the captions of usable rows that are longer than the text encoder of a pipeline takes.

    A text has no more tokens than bytes, but for those that a tokenizer adds, so that only texts of more bytes are
    tokenized; without one, the tokenizer is not loaded. What a pipeline's template adds is not counted.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): Rows with captions.
        recipe (type of [`RecipeFacts`]): What is known of the pipeline.
        name_or_path (`str`): The pipeline, whose tokenizer alone is loaded.
        rows (`int`): Most rows that are looked at; of more, as many that are spread evenly.
        max_sequence_length (`int`, *optional*): Tokens of each caption; by default the pipeline's own number.

    Raises:
        BucketingError: If the tokenizer cannot be loaded.
    """
    most = max_sequence_length or recipe.read_sequence_length(name_or_path)
    tokenizer, looked_at = None, 0
    longer, longest = 0, (0, 0)
    for numbers, texts in _texts_of(prepared, rows):
        looked_at += len(texts)
        long = pc.greater(pc.binary_length(texts), most - _SPECIAL_TOKENS).to_numpy(zero_copy_only=False)
        candidates, texts = numbers[long], texts.filter(pa.array(long))
        if len(texts) and tokenizer is None:
            tokenizer = load_tokenizer(name_or_path, recipe.caption_tokenizer)
            if tokenizer is None:
                break
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            lengths = _lengths(tokenizer, texts[start : start + _TEXTS_AT_ONCE].to_pylist())
            longer += int((lengths > most).sum())
            longest = max(longest, (int(lengths.max()), -int(candidates[start + lengths.argmax()])))
    longest = longest if longer else (0, 0)
    return CaptionLengths(most=most, looked_at=looked_at, longer=longer, longest=longest[0], row=-longest[1])


def describe_caption_lengths(
    prepared: PreparedDataset,
    recipe: type[RecipeFacts],
    name_or_path: str,
    *,
    rows: int = MEASURED_ROWS,
    max_sequence_length: int | None = None,
) -> list[str]:
    """Return a sentence on captions that are too long, or on why they could not be counted; none if none is.

    The arguments are those of [`caption_lengths`].
    """
    try:
        lengths = caption_lengths(prepared, recipe, name_or_path, rows=rows, max_sequence_length=max_sequence_length)
    except BucketingError as error:
        return [f"Captions that are longer than the text encoder takes were not counted: {error}"]
    return [sentence for sentence in [lengths.describe(prepared)] if sentence]


def load_tokenizer(name_or_path: str, component: str) -> Any:
    """Load the tokenizer of a pipeline, also that of a processor; None for a pipeline that comes without it.

    Raises:
        BucketingError: If it cannot be loaded.
    """
    import transformers

    entry = read_index(name_or_path).components.get(component)
    if entry is None:
        return None
    kind = getattr(transformers, entry.class_name, None) if "Tokenizer" in entry.class_name else None
    with from_hub(entry.name_or_path):
        return (kind or transformers.AutoTokenizer).from_pretrained(
            entry.name_or_path, subfolder=entry.subfolder, revision=entry.revision
        )


def _texts_of(prepared: PreparedDataset, most: int) -> Iterator[tuple[IntArray, pa.Array]]:
    """Yield captions of usable rows in Arrow arrays, each with the numbers of their rows."""
    dataset, column = prepared.dataset, prepared.caption_column
    if column is None:
        return
    usable = spread(np.flatnonzero(column_array(dataset, "bucket_id") >= 0), most)
    chosen = dataset if len(usable) == len(dataset) else dataset.select(usable)  # which reads row by row
    start = 0
    for cells in column_batches(chosen, column):
        numbers = usable[start : start + len(cells)]
        start += len(cells)
        if is_list_type(cells.type):
            parents = pc.list_parent_indices(cells).to_numpy()
            numbers, cells = numbers[parents], pc.list_flatten(cells)
        yield numbers, cells.cast(pa.large_string()).fill_null("")


def _lengths(tokenizer: Any, texts: list[str]) -> npt.NDArray[np.int64]:
    """Return the tokens of texts, with those that the tokenizer adds, `(n,)`."""
    options = {"truncation": False, "padding": False, "return_attention_mask": False}
    return np.array([len(ids) for ids in tokenizer(texts, verbose=False, **options)["input_ids"]], np.int64)
