"""Values of a report as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any


def as_json(value: Any) -> Any:
    """Turn dataclasses and mappings into dicts, sequences into lists (named tuples into dicts) and NaN into None."""
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): as_json(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
