"""The commands of `hf_bucketing` in the order of the work: what each is for, and its module."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        module (`str`): Its module in this package, which has `make_parser` and `main`.
        does (`str`): What it is for, in a line of `hf_bucketing --help`.
        launched (`bool`): Whether several processes may run it together, as `accelerate launch` starts them.
    """

    module: str
    does: str
    launched: bool = False

    def load(self) -> ModuleType:
        """Import its module."""
        return importlib.import_module(f"{__package__}.{self.module}")


COMMANDS = {
    "demo data": Command("demo_data", "write a small data set of generated clips, to try the others"),
    "demo pipeline": Command("demo_pipeline", "write a pipeline of small random weights"),
    "demo trained": Command("demo_trained", "write the demo's pipeline, which was trained on such clips"),
    "suggest": Command("suggest", "suggest runs that fit a machine, as config files"),
    "plan": Command("plan", "plan the memory of a run, and say what makes it fit a GPU"),
    "prepare": Command("prepare", "read the sizes of a data set, and assign buckets"),
    "report buckets": Command("report_buckets", "compare padding, buckets and packs on prepared rows"),
    "report data": Command("report_data", "show prepared rows as the model will see them"),
    "report ladders": Command("report_ladders", "compare bucket tables on a mix of sizes"),
    "compare": Command("compare", "say which rows of two prepared data sets differ"),
    "verify": Command("verify", "check that packing computes the same on your model"),
    "cache": Command("cache", "encode latents and captions once", launched=True),
    "train": Command("train", "fine-tune a model on prepared or cached rows", launched=True),
    "launch": Command("launch", "start train or cache with flags of accelerate launch"),
    "report run": Command("report_run", "check runs by their logs, and draw their losses"),
    "sample": Command("sample", "render prompts with what was trained"),
    "merge": Command("merge", "merge adapters into a model"),
    "convert": Command("convert", "convert LoRA files to those of diffusers or ComfyUI"),
    "env": Command("env", "print versions and the last error, for reports of bugs"),
}
"""The commands, by their names."""
