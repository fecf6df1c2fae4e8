"""Saved states: short descriptions of all that a plan depends on, and the refusal of a state that does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ..errors import PlanError

VERSION = 2


def describe(value: object) -> str:
    """Return a short text that is equal for equal values: the value itself, or a digest where it is long.

    Example:
        >>> describe(16), describe(np.arange(5, dtype=np.int64))
        ('16', '5 values, digest 281b02b10f5f')
    """
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).data)
        return f"{len(value)} values, digest {digest.hexdigest()[:12]}"
    text = repr(dict(sorted(value.items())) if isinstance(value, Mapping) else value)
    return text if len(text) <= 60 else f"{text[:30]}…, digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def settings(config: Any) -> dict[str, object]:
    """Return the fields of a configuration by name; `vars` for dataclasses with slots."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def check_state(state: Mapping[str, Any], *, fingerprint: Mapping[str, str], seed: int) -> None:
    """Refuse a saved state that another data set, table, configuration, seed or version made.

    Args:
        state (mapping): As saved.
        fingerprint (mapping of `str` to `str`): What there is now, by name.
        seed (`int`): The present one.

    Raises:
        PlanError: Names each part that differs, with its value then and now.
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
