"""Saved states: short descriptions of everything that a plan depends on, and the check that a state fits."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets.fingerprint import Hasher

from ..errors import PlanError
from ..settings import plain_number

VERSION = 5


def describe(value: object) -> str:
    """Return a short text that is equal for equal values: the value itself, or a digest if it is long.

    Of a function, it depends on its code and on all values that it holds.

    Raises:
        PlanError: If a function holds what cannot be compared, such as a generator.

    Example:
        >>> describe(16), describe(np.arange(5, dtype=np.int64))
        ('16', '5 values, digest 281b02b10f5f')
    """
    if isinstance(value, np.ndarray):
        plain = value.astype(np.int64 if value.dtype.kind in "iu" else np.float64, copy=False)
        digest = hashlib.sha256(np.ascontiguousarray(plain).data)
        return f"{len(value)} values, digest {digest.hexdigest()[:12]}"
    if callable(value):
        try:
            return f"function of digest {Hasher.hash(value)}"
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise PlanError(
                f"The state of a run cannot say what {value!r} depends on ({error}); give a function whose values can "
                "be pickled."
            ) from error
    text = repr(dict(sorted(value.items())) if isinstance(value, Mapping) else value)
    return text if len(text) <= 60 else f"{text[:30]}…, digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def epoch_number(epoch: Any) -> int:
    """Return the number of an epoch as an `int`.

    Raises:
        PlanError: If it is no whole number from 0.
    """
    number: int = plain_number(epoch, "epoch", integer=True, error=PlanError)
    if number < 0:
        raise PlanError(f"`epoch` must be at least 0, got {number}.")
    return number


def check_state(state: Mapping[str, Any], *, fingerprint: Mapping[str, str], seed: int) -> None:
    """Raise unless a saved state belongs to the present data set, table, configuration, seed and version.

    Args:
        state (mapping): The saved state.
        fingerprint (mapping of `str` to `str`): Present descriptions, by name.
        seed (`int`): Present seed.

    Raises:
        PlanError: If one differs; the message gives the saved and the present value of each difference.
    """
    if state.get("version") != VERSION:
        raise PlanError(
            f"The saved state has version {state.get('version')!r}, this release reads version {VERSION}; resume with "
            "the release that saved it, or start the epoch anew."
        )
    saved = {**state["fingerprint"], "seed": str(state["seed"])}
    present = {**fingerprint, "seed": str(seed)}
    differences = [
        f"{name} was {saved.get(name, 'absent')} and is {present.get(name, 'absent')}"
        for name in sorted({*saved, *present})
        if saved.get(name) != present.get(name)
    ]
    if differences:
        raise PlanError(
            f"The saved state does not fit: {'; '.join(differences)}. Resume with the rows, table, settings and seed "
            "of the saved run, or start anew without the state."
        )
