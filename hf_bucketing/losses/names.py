"""Names of ways to reduce losses; they need no torch."""

from typing import Literal

Reduction = Literal["sample", "token"]
