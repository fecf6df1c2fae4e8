"""Files that hold the weights of one model or of adapters, as people name them."""

from __future__ import annotations

from pathlib import Path

GGUF = ".gguf"
"""End of the name of a GGUF file."""

WEIGHT_FILES = (".safetensors", GGUF)
"""Ends of the names of files of weights."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
"""Types of numbers as files of safetensors name them, and as torch does."""


def is_weight_file(name_or_path: str) -> bool:
    """Return whether a name is that of a file of weights, and not of a pipeline.

    Example:
        >>> is_weight_file("wan2.1_t2v_14B_fp8.safetensors"), is_weight_file("Wan-AI/Wan2.1-T2V-14B-Diffusers")
        (True, False)
    """
    return Path(name_or_path).suffix in WEIGHT_FILES


def is_gguf(file: str | None) -> bool:
    """Return whether a file is GGUF; None is none."""
    return file is not None and Path(file).suffix == GGUF


def split_strength(text: str) -> tuple[str, str]:
    """Return the file or folder of adapters that a text names, and what follows it: nothing, or `=` and a strength.

    Example:
        >>> split_strength("trained=0.8"), split_strength("trained"), split_strength("rank=high")
        (('trained', '=0.8'), ('trained', ''), ('rank=high', ''))
    """
    path, _, strength = text.rpartition("=")
    if not path or Path(text).exists():
        return text, ""
    try:
        float(strength)
    except ValueError:
        return text, ""
    return path, f"={strength}"
