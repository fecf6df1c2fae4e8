"""Lines of other libraries that scripts do not print, as their users can do nothing about them."""

from __future__ import annotations

import logging
import warnings


class _Without(logging.Filter):
    """Let all lines pass that do not hold a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


_LOGGED = {
    # One for each image processor that diffusers' imports touch; pipelines had the fallback before there was another.
    "transformers.utils.import_utils": _Without("requires torchvision (not installed); falling back to"),
    # At each import on a CPU, where no weights are in 4 bits.
    "bitsandbytes.backends.cpu.ops": _Without("Failed to load CPU gemm_4bit_forward"),
}
"""Filters, by the names of loggers."""

_WARNED = ("Mismatch dtype between input and weight",)
"""Beginnings of warnings: bf16 activations meet the float32 weights of norms, as diffusers keeps them."""


def hide_known_lines() -> None:
    """Hide these lines in this process and in those that it forks; all others are printed."""
    for name, without in _LOGGED.items():
        logging.getLogger(name).addFilter(without)
    for beginning in _WARNED:
        warnings.filterwarnings("ignore", message=beginning)
