"""The peers that `--compare` names, with the settings of their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...buckets.sizes import LatentSpec
from ...buckets.table import BucketTable
from ...columns.toml_tables import read_tables
from ...errors import BucketingError, did_you_mean
from .ai_toolkit import AIToolkit
from .diffusers_examples import DiffusersExamples
from .diffusion_pipe import DiffusionPipe
from .ltx_trainer import LTXTrainer
from .musubi_tuner import MusubiTuner
from .novelai import NovelAI
from .simple_tuner import SimpleTuner
from .views import Peer

PEERS: Mapping[str, Any] = {
    "novelai": NovelAI,
    "musubi-tuner": MusubiTuner,
    "diffusion-pipe": DiffusionPipe,
    "simpletuner": SimpleTuner,
    "ai-toolkit": AIToolkit,
    "ltx-trainer": LTXTrainer,
    "diffusers": DiffusersExamples,
}
"""Rules of trainers by name, in the order of their tables."""


def choose_peers(text: str, *, table: BucketTable, spec: LatentSpec) -> dict[str, Peer]:
    """Return the peers that a text names, separated by commas, each with its file after an equals sign or without.

    Args:
        text (`str`): `"all"`, or names such as `"musubi-tuner=dataset.toml,diffusion-pipe"`.
        table ([`BucketTable`][hf_bucketing.BucketTable]): Table whose area and frames a peer without a file has.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.

    Raises:
        BucketingError: If a name is unknown, a file is given to a trainer whose files are not read, or it lacks a
            setting.
        MediaError: If a file cannot be read.
    """
    peers: dict[str, Peer] = {}
    parts = [*PEERS] if text == "all" else text.split(",")
    for name, equals, path in (part.strip().partition("=") for part in parts):
        kind = PEERS.get(name)
        if kind is None:
            known = ", ".join(PEERS)
            raise BucketingError(f"--compare takes {known} or all, not {name!r}{did_you_mean(name, PEERS)}")
        if not equals:
            peers[name] = kind.like(table, spec)
            continue
        if not hasattr(kind, "read"):
            raise BucketingError(f"--compare reads no file of {name}; name it alone, to compare its defaults.")
        tables = read_tables(path)
        try:
            peers[name] = kind.read(tables, table, spec)
        except BucketingError as error:
            raise BucketingError(f"{path}: {error}") from error
        except (TypeError, ValueError) as error:
            raise BucketingError(f"{path}: a setting of {name} has another type ({error}); correct it.") from error
    return peers
