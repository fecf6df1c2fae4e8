"""What a report of a bug needs: versions, devices, settings from outside, and the last error of a script."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shlex
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__

_PACKAGES = "accelerate av bitsandbytes datasets diffusers flash-attn flash-attn-4 numpy peft ray torch torchao"
_PACKAGES += " torchcodec transformers"
_VARIABLES = re.compile(
    r"(ACCELERATE|CUDA|FSDP|HF|NCCL|PYTORCH|SLURM|TORCH)_\w+|(LOCAL_)?RANK|WORLD_SIZE|OMP_NUM_THREADS"
)
_SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)
"""Variables whose values are hidden."""
_SECRET_FLAG = re.compile(r"--(\w+[_-])?(token|key|secret|password)", re.IGNORECASE)
"""Flags whose values are hidden: `--hub_token`, and not numbers of tokens such as `--max_tokens`."""


def last_error_file() -> Path:
    """Return the file that holds the last error of a script on this machine, beside the caches of Hugging Face."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hf_bucketing" / "last_error.txt"


def keep_error(error: BaseException) -> None:
    """Keep the command and the traceback of an error, for [`describe_environment`]; where that is impossible, do not.

    What could not be written is no reason to end with another error than that of the script.
    """
    command = f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(_without_secrets(sys.argv))}\n"
    file = last_error_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(command + "".join(traceback.format_exception(error)), encoding="utf-8")


def _without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of flags such as `--hub_token`."""
    kept_words, hides = [], False
    for word in words:
        flag, equals, _ = word.partition("=")
        secret = bool(_SECRET_FLAG.fullmatch(flag))
        kept_words.append("HIDDEN" if hides else f"{flag}=HIDDEN" if secret and equals else word)
        hides = secret and not equals
    return kept_words


def describe_environment(more: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return the versions of packages, the variables that libraries read, and the last error of a script.

    Values of variables whose name says that they are secret are hidden. `more` are further lists, by their titles.
    """
    lines = ["Packages:", f"- hf_bucketing {__version__}"]
    for name in _PACKAGES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines.append(f"- {name} {importlib.metadata.version(name)}")
    lines += [f"{title}:\n" + "\n".join(f"- {line}" for line in said) for title, said in (more or {}).items()]
    lines.append("Variables:")
    for name, value in sorted(os.environ.items()):
        if _VARIABLES.fullmatch(name):
            lines.append(f"- {name}={'HIDDEN' if _SECRET.search(name) else value}")
    file = last_error_file()
    lines += ["Last error of a script:", file.read_text(encoding="utf-8") if file.is_file() else "- none"]
    return "\n".join(lines)


def print_environment(more: Mapping[str, Sequence[str]] | None = None) -> None:
    """Print what `accelerate env` does, and [`describe_environment`]."""
    from accelerate.commands.env import env_command

    env_command(Namespace(config_file=None))
    print(describe_environment(more))
