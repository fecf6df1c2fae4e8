"""Recipes that are kin: one of them runs the long tests on every commit, all of them with `-m every`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

KIN = (
    ("auraflow",),
    ("cogvideox-i2v", "cogvideox", "cogvideox-1.5", "cogvideox-2b", "cogvideox-5b-i2v", "cogvideox-fun-control"),
    ("cogview4-control", "cogview4", "cogview3plus"),
    ("cosmos2-v2w", "cosmos2-t2i", "cosmos", "cosmos-v2w", "anima"),
    ("easyanimate",),
    ("ernie-image",),
    ("flux-kontext", "flux", "flux-control", "bria", "chroma", "longcat-image", "ovis-image"),
    ("flux2-klein", "flux2", "flux2-klein-kv"),
    ("flux3",),
    ("hunyuan-video-1.5", "hunyuan-video", "hunyuan-video-1.5-image", "hunyuan-image"),
    ("ideogram4",),
    ("kandinsky5",),
    ("kandinsky6",),
    ("krea2",),
    ("latte",),
    ("ltx-condition", "ltx", "ltx-i2v"),
    ("ltx2-i2v", "ltx2", "ltx2-in-context"),
    ("minimax-h3",),
    ("mochi",),
    ("motif-video",),
    ("pixart-sigma", "pixart-alpha"),
    ("prx", "prx-dc"),
    ("qwen-image-edit-2511", "qwen-image", "qwen-image-edit", "qwen-image-edit-2509"),
    ("qwen-image-2.1",),
    ("sd3", "sd3-without-t5"),
    ("wan-2.2-i2v", "wan", "wan-i2v", "wan-2.2-ti2v", "wan-flf2v", "wan-2.2-t2v-5b", "chronoedit"),
    ("skyreels-v2-df", "skyreels-v2", "skyreels-v2-i2v"),
    ("wan-vace", "wan-animate"),
    ("wan-animate-2",),
    ("z-image", "lumina2"),
)
"""Names of recipes that share most of their code, those with the most conditions first."""


FEW = (
    *("wan-2.2-i2v", "wan-vace", "ltx2-i2v", "hunyuan-video-1.5", "flux-kontext", "flux2-klein"),
    *("qwen-image-edit-2511", "z-image", "minimax-h3"),
)
"""Recipes that many train, or that differ most from others."""


def one_per_kin(names: Iterable[str], *values: Any, fast: Iterable[str] = (), few: bool = False) -> list[Any]:
    """Return parameters of a long test: fast ones, a slow one of each kin, and the others with `-m every`.

    Args:
        names (iterable of `str`): Recipes.
        values (any): Further values of each parameter.
        fast (iterable of `str`): Recipes whose tests are fast ones.
        few (`bool`): Whether slow ones are those of [`FEW`] alone, where other tests run each kin.
    """
    names, fast = list(names), set(fast)
    slow = {next((name for name in kin if name in names), None) for kin in KIN} - fast
    slow = slow & {*FEW} if few else slow
    marks = {name: () if name in fast else pytest.mark.slow if name in slow else pytest.mark.every for name in names}
    return [pytest.param(name, *values, marks=marks[name]) for name in names]
