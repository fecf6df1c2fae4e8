"""What waits for a device, and where."""

from __future__ import annotations

import collections
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import hf_bucketing

OURS = tuple(f"{Path(file).parent}/" for file in (hf_bucketing.__file__, __file__))
"""Folders of the package and of its tests."""
_PASSED = ("/torch/", "/warnings.py", "/tests/waits.py", "/tests/devices.py", "/tests/pretended_device.py")
"""Parts of the names of files whose functions wait for others."""
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Names of functions that Python 3.12 and newer have no longer."""
SOME_WAIT = "a wait"
"""What a device says that only knows where it is waited for."""


class Waits(collections.Counter[str]):
    """What waits for a device, by what it is and in which function: `"copy to the device in FOLDER/FILE.py:NAME"`.

    Attributes:
        lines (`dict` of `str` to `set` of `str`): `FOLDER/FILE.py:LINE` of each wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines = collections.defaultdict[str, set[str]](set)

    def record(self, what: str, *, ours: bool = False) -> None:
        """Count a wait in the innermost function outside torch, or not at all where `ours` and that is another's."""
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_name in _COMPREHENSIONS or any(part in frame.f_code.co_filename for part in _PASSED)
        ):
            frame = frame.f_back
        if ours and not frame.f_code.co_filename.startswith(OURS):
            return
        file = "/".join(frame.f_code.co_filename.split("/")[-2:])
        wait = f"{what} in {file}:{frame.f_code.co_name}"
        self[wait] += 1
        self.lines[wait].add(f"{file}:{frame.f_lineno}")

    def clear(self) -> None:
        super().clear()
        self.lines.clear()

    def check(self, named: Collection[str], *, counted: Mapping[str, int] = MappingProxyType({})) -> None:
        """Check that nothing waits but what is named, any number of times, and what is counted, as often."""
        places = {wait.partition(" in ")[2] for wait in {*named, *counted}}
        others = {
            wait: count
            for wait, count in self.items()
            if wait not in named and not (wait.startswith(SOME_WAIT) and wait.partition(" in ")[2] in places)
        }
        lines = sorted(line for wait in others.keys() - counted.keys() for line in self.lines[wait])
        assert others == counted, f"waits at {', '.join(lines)}"
