"""The rule of audio where it first was, as a digest of the functions of a saved stream holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..conditions import audio


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRule:
    """Hold the fields of a rule, so that runs from streams of earlier releases resume."""

    rate: int
    samples_per_token: int
    tokens_at_once: int
    rounds_up: bool

    @classmethod
    def of(cls, rule: audio.AudioRule) -> AudioRule:
        """Return that of a rule."""
        return cls(**{item.name: getattr(rule, item.name) for item in fields(cls)})
