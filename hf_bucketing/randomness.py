"""All random draws of the package: one registry of purposes, and one generator per purpose and key.

Every draw is a function of what it is for and of a key of whole numbers, such as seed, epoch and sample index. Nothing
reads or changes a global random state, so results depend on neither workers, processes nor restarts.
"""

from __future__ import annotations

from enum import IntEnum, unique
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import BucketingError, ColumnError

COLUMN_PREFIX = "hf_bucketing_"
"""Beginning of the names of columns that this package adds, and no table may bring."""

ROW = f"{COLUMN_PREFIX}row"
"""Column of the number that names a row: its draws follow from it, and batches and logs have it as `index`. Columns of
a table named `index` mean something else."""

ADD_ROWS = f'add one with dataset.add_column("{ROW}", range(len(dataset)))'
"""Advice where the column is missing."""


@unique
class Purpose(IntEnum):
    """What random numbers are drawn for; a comment names the key that goes with each: `sample` means `sample_key`."""

    BUCKET_PLAN = 1  # seed, epoch, consumed samples
    PACK_PLAN = 2  # seed, epoch, consumed samples
    LENGTH_PLAN = 3  # seed, epoch, consumed samples
    WEIGHTS = 4  # seed
    VIEW = 5  # sample: first frame, crop, flip
    NOISE = 6  # sample: timestep and noise
    CAPTION_DROPOUT = 7  # sample
    REPLACEMENT = 8  # seed, epoch, index of the unreadable sample
    RANDOM_RESIZE = 9  # seed, epoch
    TOKEN_DROP = 10  # whatever key the caller gives each sample
    LOADER = 11  # seed and epoch, of a stream the epoch: base seed of DataLoader workers
    LADDER_MIX = 12  # seed: samples on which reports compare ladders
    CAPTION = 13  # sample, or without a seed a number from torch: which of several captions
    TAG_ORDER = 14  # as CAPTION
    STREAM = 15  # seed: order of the files of a stream, and of the rows in its shuffle buffer
    HELD_OUT_ROWS = 16  # number of files: the files of a split; without a seed, so that no run trains on them
    HELD_OUT_NOISE = 17  # index, number of the noise level: timestep and noise of a held-out sample
    STREAM_SOURCES = 18  # seed: which of several sources of a stream comes next
    PRESERVATION = 19  # sample: whether the base model's own prediction is its target
    SLIDER = 20  # sample: which of several pairs of captions
    AUDIO_NOISE = 22  # as NOISE, or as HELD_OUT_NOISE: noise of the audio of a sample
    CONDITION = 23  # sample, or the index of a held-out one: which parts of it are shown, and whether its references
    REPORT_SAMPLES = 24  # seed: samples that the page of a report shows
    CACHED_VIEW = 25  # sample, its first occurrence: which of several cached views; others take the next ones
    FIRST_VIEW = 26  # seed: which of several cached views of several sizes each row has first
    CONDITION_NOISE = 27  # as NOISE, or as HELD_OUT_NOISE: noise of what a sample is shown


def _differ(rows: npt.NDArray[Any]) -> bool:
    """Return whether all numbers differ; those of prepared rows ascend, so that nothing is sorted."""
    return bool((rows[1:] > rows[:-1]).all()) or len(np.unique(rows)) == len(rows)


def check_rows(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the numbers that name rows, `(n,)`, as `int64`.

    Those of all rows are 0 to n − 1; where rows were removed, the others keep theirs.

    Raises:
        ColumnError: Unless they are whole numbers of 0 or more, each once.
    """
    if rows.dtype.kind not in "iu" or rows.min(initial=0) < 0 or not _differ(rows):
        raise ColumnError(
            f"The column {ROW} names rows, so that it must hold whole numbers of 0 or more, each once; remove it from "
            f"the data set, and {ADD_ROWS}."
        )
    return rows.astype(np.int64, copy=False)


def sample_key(*, seed: int, epoch: int, index: int, occurrence: int = 0) -> tuple[int, ...]:
    """Return the key of the draws of a sample: seed, epoch, index, and where it is above 0 the occurrence.

    Args:
        seed (`int`): Seed of the run.
        epoch (`int`): Epoch.
        index (`int`): The sample's row.
        occurrence (`int`): How often the epoch held the row before.

    Example:
        >>> sample_key(seed=3, epoch=1, index=7), sample_key(seed=3, epoch=1, index=7, occurrence=2)
        ((3, 1, 7), (3, 1, 7, 2))
    """
    return (seed, epoch, index, occurrence) if occurrence else (seed, epoch, index)


def seed_sequence(purpose: Purpose, *key: int) -> np.random.SeedSequence:
    """Return the seed sequence of a purpose and a key.

    numpy splits seeds into 32-bit words and pads them with zeros, so that `(s, e, i)` and `(s, e, i, 0)` start the
    same stream. Here the purpose and the length of the key come first and every number takes two words, so that
    different arguments never give the same words.

    Args:
        purpose ([`Purpose`]): What is drawn.
        key (`int`): Numbers from 0 to 2**64 - 1.

    Raises:
        BucketingError: If a number of the key is not whole or out of range.
    """
    words = [int(purpose), len(key)]
    for number in key:
        if not isinstance(number, Integral) or not 0 <= number < 2**64:
            raise BucketingError(
                f"Seeds, epochs and indices must be whole numbers from 0 to 2**64 - 1, got {number!r} in {key}."
            )
        words += [int(number) & 0xFFFFFFFF, int(number) >> 32]
    return np.random.SeedSequence(words)


def generator(purpose: Purpose, *key: int) -> np.random.Generator:
    """Return the numpy generator of a purpose and a key; arguments and errors as in [`seed_sequence`].

    Example:
        >>> a, b = generator(Purpose.VIEW, 0, 1), generator(Purpose.VIEW, 0, 1, 0)
        >>> a.random() == b.random()
        False
    """
    return np.random.Generator(np.random.PCG64(seed_sequence(purpose, *key)))


def integer_seed(purpose: Purpose, *key: int) -> int:
    """Return a seed from 0 to 2**63 - 1 for `torch.Generator.manual_seed`; arguments as in [`seed_sequence`]."""
    return int(seed_sequence(purpose, *key).generate_state(1, np.uint64)[0] >> np.uint64(1))
