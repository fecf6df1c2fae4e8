r"""Count what a step of a small model dispatches, packed and not, and the graphs that torch.compile makes of it.

python scripts/benchmarks/benchmark_operations.py wan flux --graphs

An operation is what torch dispatches once: on a GPU, its launch costs Python some microseconds, whatever its size.
"""

import argparse
import functools
import io
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_bucketing.adapters.lora import add_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.models import enable_packing
from hf_bucketing.models.compilation import compile_blocks
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.batch import Rows
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

FAMILIES = ("wan", "ltx", "flux", "hunyuan-video", "qwen-image")
LAYERS = "num_layers"
"""Setting of the transformers' configurations that adds blocks of one kind."""
TEXT_LENGTHS = (23, 9, 14, 30)
VIEWS = {"view", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand", "slice", "select", "split",
         "split_with_sizes", "alias", "detach", "unbind", "_unsafe_view", "as_strided", "_reshape_alias",
         "view_as_complex", "view_as_real"}  # fmt: skip
"""Operations that give a tensor another shape without touching its elements."""
Grid = tuple[int, int, int]


class Operations(NamedTuple):
    """Operations of one block in a training step: forward, its recomputation, and backward."""

    all: int
    without_views: int


class Counted(TorchDispatchMode):
    """Count the operations that are dispatched inside, by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.name().partition("::")[2].partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


@functools.cache
def _config(name: str) -> dict[str, Any]:
    """Return the configuration of the transformer of a small pipeline."""
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        make_tiny_pipeline(folder, family=name)
        config: dict[str, Any] = json.loads((Path(folder) / "transformer" / "config.json").read_text())
    return config


class SmallModel:
    """A transformer of small random weights and its samples."""

    def __init__(self, name: str, *, lora: bool = True, **config: int) -> None:
        torch.manual_seed(0)
        settings = _config(name)
        self.model: Any = getattr(diffusers, settings["_class_name"]).from_config({**settings, **config})
        self.family = family_of(self.model)
        if lora:
            add_adapters(self.model, AdapterConfig(lora_rank=4))
        self.model.enable_gradient_checkpointing()
        self.model.train()

    def rows(self, grids: Sequence[Grid]) -> Rows:
        """Draw samples of one size, unpacked."""
        latents, text, conditioning = self._draw(grids)
        lengths = {len(words) for words in text}
        text = [words[: min(lengths)] for words in text]
        return Rows(
            latents=torch.stack(latents),
            timesteps=torch.rand(len(grids)) * 1000,
            text=torch.stack(text),
            patch=self.family.patch(self.model.config),
            conditioning={name: torch.as_tensor(values) for name, values in conditioning.items()},
        )

    def pack(self, packing: Any, grids: Sequence[Grid]) -> Any:
        """Draw samples and pack them."""
        latents, text, conditioning = self._draw(grids)
        return packing.pack(latents, timesteps=torch.rand(len(grids)) * 1000, text=text, conditioning=conditioning)

    def _draw(self, grids: Sequence[Grid]) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
        latents = self.family.draw_latents(self.model, grids, channels=self.family.in_channels(self.model))
        fixed, width = self.family.text_length(self.model.config), self.family.text_dim(self.model)
        lengths = [fixed or TEXT_LENGTHS[sample % len(TEXT_LENGTHS)] for sample in range(len(grids))]
        text = [torch.randn(length, width) for length in lengths]
        return latents, text, self.family.draw_conditioning(self.model, grids)

    def grids(self) -> list[Grid]:
        """Return grids of samples of three sizes."""
        frames = 1 if self.family.images_only else 3
        return [(frames, 5, 6), (frames, 4, 4), (1, 7, 5)]


def operations_of_a_block(name: str, *, backend: str | None) -> Operations:
    """Count what a block adds to a step with LoRA under autocast, packed with a backend or of one unpacked sample."""
    fewer, more = (_operations(SmallModel(name, **{LAYERS: layers}), backend) for layers in (1, 2))
    more.subtract(fewer)
    return Operations(more.total(), sum(count for kind, count in more.items() if kind not in VIEWS))


def _operations(small: SmallModel, backend: str | None) -> Counter[str]:
    step = _step(small, backend)
    step()  # tables and masks that are made once
    with Counted() as counted:
        step()
    return counted.names


def _step(small: SmallModel, backend: str | None) -> Callable[[], None]:
    if backend is None:
        rows = small.rows(small.grids()[:1])

        def predict() -> torch.Tensor:
            return small.family.run(small.model, rows)
    else:
        batch = small.pack(enable_packing(small.model, strip_length=4, backend=backend), small.grids())

        def predict() -> torch.Tensor:
            return packed_forward(small.model, batch)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = predict()
        output.float().square().mean().backward()

    return step


class Graphs:
    """A compiler for `torch.compile` that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Compiled(NamedTuple):
    """Graphs that there were after each batch, and the kinds of blocks that were compiled."""

    graphs: list[int]
    kinds: list[str]


def graphs_of(name: str, *, backend: str | None, batches: int = 20, lora: bool = True) -> Compiled:
    """Compile the blocks of a model and train on batches of ever new composition, packed or in buckets."""
    torch._dynamo.reset()
    small, graphs = SmallModel(name, lora=lora, **{LAYERS: 2}), Graphs()
    packing = None if backend is None else enable_packing(small.model, strip_length=4, backend=backend)
    kinds, counts = compile_blocks(small.model, backend=graphs), []
    for grids in compositions(small, batches):
        if packing is None:
            output = small.family.run(small.model, small.rows([grids[0]] * len(grids)))
        else:
            output = packed_forward(small.model, small.pack(packing, grids))
        output.square().mean().backward()
        counts.append(graphs.count)
    present = {type(module).__name__ for module in small.model.modules()}
    return Compiled(counts, [kind for kind in kinds if kind in present])


def compositions(small: SmallModel, count: int) -> Iterator[list[Grid]]:
    """Yield batches of two to five samples."""
    numbers = random.Random(0)
    for _ in range(count):
        frames = 1 if small.family.images_only else numbers.randint(2, 4)
        yield [(frames, numbers.randint(2, 6), numbers.randint(2, 6)) for _ in range(numbers.randint(2, 5))]


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES, help="Small pipelines, see make_tiny_pipeline.py.")
    parser.add_argument("--backend", default="segments", help="Backend of packed attention.")
    parser.add_argument("--graphs", action="store_true", help="Compile the blocks too, and count graphs.")
    return parser


def main(args: argparse.Namespace) -> None:
    print(f"{'of a block':16} {'operations':>10} {'no views':>9}   packed ÷ not")
    for name in args.families:
        stock, packed = (operations_of_a_block(name, backend=backend) for backend in (None, args.backend))
        ratios = " ".join(f"{ours / theirs:.3f}" for ours, theirs in zip(packed, stock, strict=True))
        print(f"{name:16} {packed.all:10,} {packed.without_views:9,}   {ratios}")
        if args.graphs:
            for what, backend in (("packs", args.backend), ("buckets", None)):
                graphs, kinds = graphs_of(name, backend=backend)
                print(f"  graphs after each of {len(graphs)} {what}, {len(kinds)} kinds of blocks: {graphs}")


if __name__ == "__main__":
    run_script(main, make_parser)
