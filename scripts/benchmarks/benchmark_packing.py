r"""Compare packed attention and packed training steps with straightforward code, as ratios of one run.

python scripts/benchmarks/benchmark_packing.py --output scripts/benchmarks/results/packing.json
python scripts/benchmarks/benchmark_packing.py --device cuda --output scripts/benchmarks/results/packing_cuda.json
"""

import argparse
import copy
import ctypes
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from benchmark_tools import benchmark_parser, machine, report, seconds_of
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.losses import masked_mse
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of
from hf_bucketing.packing import PackedLayout, packed_attention, packed_forward, packed_mse

MIXED = ((3, 8, 12), (1, 16, 16), (4, 10, 6), (1, 8, 8), (2, 14, 8), (1, 6, 12))
"""Token grids (frames, rows, columns) of a mixed set: clips and images, landscape and portrait."""
TEXT_LENGTH = 128


def medians(functions: dict[str, Callable[[], object]], *, runs: int, device: str) -> dict[str, float]:
    """Return the median seconds of each function, run in turns.

    On the CPU, processor seconds of this process on its one thread, so that other load is not counted.
    """
    options = {"clock": time.process_time} if device == "cpu" else {"synchronize": torch.cuda.synchronize}
    timed = seconds_of(*functions.values(), runs=runs, **options)
    return {name: seconds.median for name, seconds in zip(functions, timed, strict=True)}


def attention_case(
    lengths: list[int], heads: int, head_dim: int, device: str, dtype: torch.dtype
) -> tuple[PackedLayout, list[torch.Tensor]]:
    layout = PackedLayout(
        grids=tuple((1, 1, length) for length in lengths),
        text_lengths=(0,) * len(lengths),
        strip_length=64,
        device=device,
    )
    shape = (layout.num_tokens, heads, head_dim)
    return layout, [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def measure_attention(runs: int, shrink: int) -> dict[str, float]:
    """Compare `segments` with `dense` on eight equal segments of 1,024 tokens, 8 heads of 64, in float32."""
    layout, tokens = attention_case([1024 // shrink] * 8, 8, 64, "cpu", torch.float32)

    def forward(backend: str) -> torch.Tensor:
        return packed_attention(*tokens, layout.self_segments, backend=backend)

    def both(backend: str) -> object:
        return torch.autograd.grad(forward(backend).sum(), tokens)

    with torch.no_grad():
        difference = float((forward("segments") - forward("dense")).abs().max())
        forwards = medians(
            {name: lambda name=name: forward(name) for name in ("segments", "dense")}, runs=runs, device="cpu"
        )
    trained = medians({name: lambda name=name: both(name) for name in ("segments", "dense")}, runs=runs, device="cpu")
    return {
        "attention_largest_difference": difference,
        "attention_segments_forward_s": forwards["segments"],
        "attention_segments_times_faster_forward": forwards["dense"] / forwards["segments"],
        "attention_segments_both_s": trained["segments"],
        "attention_segments_times_faster_forward_backward": trained["dense"] / trained["segments"],
    }


def make_model(layers: int, heads: int, device: str) -> WanTransformer3DModel:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=64 if device == "cpu" else 128, in_channels=16, out_channels=16,
        text_dim=256, ffn_dim=4 * heads * (64 if device == "cpu" else 128), num_layers=layers,
    )  # fmt: skip
    return model.to(device)


def draw(grids: list[tuple[int, int, int]], device: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    latents = [torch.randn(16, t, 2 * h, 2 * w, device=device) for t, h, w in grids]
    return (
        latents,
        torch.rand(len(grids), device=device) * 1000,
        torch.randn(len(grids), TEXT_LENGTH, 256, device=device),
    )


def pad_all(latents: list[torch.Tensor]) -> torch.Tensor:
    sides = [max(latent.shape[axis] for latent in latents) for axis in (1, 2, 3)]
    padded = [F.pad(x, [p for axis in (3, 2, 1) for p in (0, sides[axis - 1] - x.shape[axis])]) for x in latents]
    return torch.stack(padded)


def measure_step(runs: int, layers: int, heads: int, strip_length: int, shrink: int) -> dict[str, float]:
    """Compare a packed training step of Wan with running the samples one by one, and with padding to the largest."""
    model, grids = make_model(layers, heads, "cpu"), [shrunk(grid, shrink) for grid in MIXED]
    packed_model = make_model(layers, heads, "cpu")
    packing = enable_packing(packed_model, strip_length=strip_length)
    latents, timesteps, text = draw(grids, "cpu")

    def one_by_one() -> None:
        for x, t, e in zip(latents, timesteps, text, strict=True):
            output = model(x[None], t[None], e[None], return_dict=False)[0]
            (masked_mse(output, x[None]).sum() / len(latents)).backward()

    def padded() -> None:
        batch = pad_all(latents)
        model(batch, timesteps, text, return_dict=False)[0].square().mean().backward()

    def packed() -> None:
        batch = packing.pack(latents, timesteps=timesteps, text=text)
        packed_mse(packed_forward(packed_model, batch), batch.pack_like(latents), batch.layout).mean().backward()

    times = medians({"one_by_one": one_by_one, "padded": padded, "packed": packed}, runs=runs, device="cpu")
    layout = packing.pack(latents, timesteps=timesteps, text=text).layout
    width = model.config.num_attention_heads * model.config.attention_head_dim
    return {
        "step_layers": layers,
        "step_width": width,
        "step_samples": len(grids),
        "step_tokens": sum(layout.lengths),
        "step_tokens_padded_to_largest": len(grids)
        * math.prod(max(grid[axis] for grid in grids) for axis in range(3)),
        "step_packed_s": times["packed"],
        "step_packed_times_faster_than_one_by_one": times["one_by_one"] / times["packed"],
        "step_packed_times_faster_than_padding": times["padded"] / times["packed"],
        "modulation_mb_per_strip": modulation_bytes(model, layout.num_strips) / 2**20,
        "modulation_mb_per_token": modulation_bytes(model, layout.num_tokens) / 2**20,
        "modulation_memory_divided_by": layout.num_tokens / layout.num_strips,
    }


ALONE = ((5, 20, 32), (1, 48, 64), (9, 16, 16))
"""Token grids of a sample that runs alone, packed and not; models of images take their frames as one."""


def family_models(layers: int) -> dict[str, torch.nn.Module]:
    """Return a small model of each family whose overhead is measured, 256 channels wide."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": layers}
    rotary, pooled = (16, 24, 24), {"pooled_projection_dim": 64, "num_single_layers": layers}
    return {
        "wan": WanTransformer3DModel(**heads, text_dim=256, ffn_dim=1024),
        "ltx": LTXVideoTransformer3DModel(**heads, cross_attention_dim=256, caption_channels=256),
        "hunyuan": HunyuanVideoTransformer3DModel(**heads, **pooled, rope_axes_dim=rotary, text_embed_dim=256),
        "flux": FluxTransformer2DModel(**heads, **pooled, axes_dims_rope=rotary, joint_attention_dim=256),
        "cogvideox": CogVideoXTransformer3DModel(  # with time embeddings a sixth as wide as the model, as in 5B
            **heads,
            time_embed_dim=42,
            text_embed_dim=256,
            max_text_seq_length=TEXT_LENGTH,
            use_rotary_positional_embeddings=True,
        ),
    }


def keep_memory() -> None:
    """Make glibc keep freed memory: faults of new pages would count for whichever function comes first."""
    allocator = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    allocator.mallopt(m_mmap_threshold, 32 * 2**20)
    allocator.mallopt(m_trim_threshold, 2**30)


def shrunk(grid: tuple[int, int, int], divisor: int) -> tuple[int, int, int]:
    """Return a grid of tokens with its height and width divided."""
    frames, height, width = grid
    return frames, height // divisor, width // divisor


def measure_overhead(runs: int, layers: int, shrink: int) -> dict[str, float]:
    """Compare the forward of a pack of one sample with the stock forward of that sample, in pairs of runs."""
    models = family_models(layers)
    return {f"overhead_of_one_sample_{name}": overhead(model, runs, shrink) for name, model in models.items()}


@torch.no_grad()
def overhead(model: torch.nn.Module, runs: int, shrink: int) -> float:
    """Return packed over stock processor seconds, the median of the pairs of all grids; packing is included."""
    stock, family, ratios = copy.deepcopy(model.eval()), family_of(model), []
    packing = enable_packing(model)
    for grid in (shrunk(grid, shrink) for grid in ALONE):
        grid = (1, grid[0] * grid[1], grid[2]) if family.images_only else grid
        sides = (count * part for count, part in zip(grid, family.patch(model.config), strict=True))
        latent = torch.randn(family.in_channels(model), *sides)
        text, timestep = torch.randn(TEXT_LENGTH, family.text_dim(model)), torch.tensor([500.0])
        conditioning = family.draw_conditioning(model, [grid])

        def packed(latent=latent, text=text, timestep=timestep, conditioning=conditioning) -> torch.Tensor:
            batch = packing.pack([latent], timesteps=timestep, text=[text], conditioning=conditioning)
            return batch.unpack(packed_forward(model, batch))[0]

        def alone(latent=latent, text=text, timestep=timestep, conditioning=conditioning) -> torch.Tensor:
            one = {name: values[0] for name, values in conditioning.items()}
            return family.run_alone(stock, latent, timestep=timestep[0], text=text, conditioning=one)

        torch.testing.assert_close(packed(), alone(), rtol=1e-3, atol=1e-3)
        for run in range(runs):
            pair = (packed, alone) if run % 2 else (alone, packed)
            seconds = {function: seconds_of_one(function) for function in pair}
            ratios.append(seconds[packed] / seconds[alone])
    return statistics.median(ratios)


def seconds_of_one(function: Callable[[], object]) -> float:
    """Return the processor seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def modulation_bytes(model: WanTransformer3DModel, rows: int) -> int:
    """Return the bytes of the modulation that the model computes for a number of rows."""
    with torch.no_grad():
        projected = model.condition_embedder(torch.zeros(rows), torch.zeros(1, 1, model.config.text_dim))[1]
    return projected.numel() * projected.element_size()


def measure_cuda_attention(runs: int, tokens: int, heads: int, head_dim: int) -> dict[str, float]:
    """Compare `varlen` with flash SDPA on equal-length batches of the same FLOPs, forward and backward, in bf16."""
    figures: dict[str, float] = {
        "cuda_attention_tokens": tokens,
        "cuda_attention_heads": heads,
        "cuda_head_dim": head_dim,
    }
    for count in (1, 8):
        layout, packed = attention_case([tokens // count] * count, heads, head_dim, "cuda", torch.bfloat16)
        batch = [
            side.detach().unflatten(0, (count, -1)).transpose(1, 2).contiguous().requires_grad_() for side in packed
        ]
        out = torch.randn_like(packed[0])
        batch_out = out.unflatten(0, (count, -1)).transpose(1, 2).contiguous()

        def varlen(layout=layout, packed=packed, out=out) -> object:
            return torch.autograd.grad(packed_attention(*packed, layout.self_segments, backend="varlen"), packed, out)

        def flash(batch=batch, out=batch_out) -> object:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return torch.autograd.grad(F.scaled_dot_product_attention(*batch), batch, out)

        times = medians({"varlen": varlen, "flash": flash}, runs=runs, device="cuda")
        figures[f"cuda_varlen_of_flash_throughput_{count}_segments"] = times["flash"] / times["varlen"]
        figures[f"cuda_varlen_{count}_segments_s"] = times["varlen"]
    return figures


def measure_cuda_step(runs: int, layers: int, heads: int) -> dict[str, float]:
    """Compare tokens/s of a packed step of mixed samples with a fixed-size step of as much attention per token."""
    model = make_model(layers, heads, "cuda")
    mixed = [(21, 16, 24), (1, 64, 64), (13, 24, 20), (9, 32, 28), (5, 16, 24)]
    fixed = [(10, 24, 28)] * 4
    samples = {"mixed": draw(mixed, "cuda"), "fixed": draw(fixed, "cuda")}
    packing = enable_packing(model, strip_length=64, backend="varlen")

    def packed() -> None:
        latents, timesteps, text = samples["mixed"]
        batch = packing.pack(latents, timesteps=timesteps, text=text)
        with torch.autocast("cuda", torch.bfloat16):
            output = packed_forward(model, batch)
        packed_mse(output, batch.pack_like(latents), batch.layout).mean().backward()

    plain = make_model(layers, heads, "cuda")

    def fixed_size() -> None:
        latents, timesteps, text = samples["fixed"]
        batch = torch.stack(latents)
        with torch.autocast("cuda", torch.bfloat16):
            output = plain(batch, timesteps, text, return_dict=False)[0]
        masked_mse(output, batch).mean().backward()

    times = medians({"packed": packed, "fixed": fixed_size}, runs=runs, device="cuda")
    counts = {name: sum(map(math.prod, grids)) for name, grids in {"packed": mixed, "fixed": fixed}.items()}
    speeds = {name: counts[name] / times[name] for name in times}
    return {
        "cuda_step_layers": layers,
        "cuda_step_width": heads * 128,
        "cuda_step_packed_tokens": counts["packed"],
        "cuda_step_fixed_tokens": counts["fixed"],
        "cuda_step_packed_tokens_per_s": speeds["packed"],
        "cuda_step_packed_of_fixed_size_tokens_per_s": speeds["packed"] / speeds["fixed"],
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="Device to measure on.")
    parser.add_argument("--layers", type=int, default=4, help="Layers of the Wan model.")
    parser.add_argument(
        "--heads", type=int, default=6, help="Attention heads of the Wan model, of 64 channels, 128 on cuda."
    )
    parser.add_argument("--strip_length", type=int, default=32, help="Tokens per strip on the CPU.")
    parser.add_argument("--shrink", type=int, default=1, help="Divisor of the sides of all samples, for a trial.")
    return parser


def main(args: argparse.Namespace) -> None:
    if args.device == "cpu":
        torch.set_num_threads(1)
        keep_memory()
    figures = {
        **machine("torch", "diffusers"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "float32" if args.device == "cpu" else "bfloat16",
        "runs": args.runs,
    }
    if args.device == "cuda":
        figures.update(measure_cuda_attention(args.runs, tokens=32768, heads=24, head_dim=128))
        figures.update(measure_cuda_step(args.runs, args.layers, args.heads))
    else:
        figures.update(measure_attention(args.runs, args.shrink))
        figures.update(measure_step(args.runs, args.layers, args.heads, args.strip_length, args.shrink))
        figures.update(measure_overhead(args.runs, min(2, args.layers), args.shrink))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
