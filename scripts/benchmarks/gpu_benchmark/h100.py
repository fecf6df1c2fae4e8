"""Write the tables of docs/benchmarks/h100.md, scripts/benchmarks/results/h100.json, from what was measured in h100/.

python scripts/benchmarks/gpu_benchmark/h100.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PEAK_TFLOPS = 989.4  # as `hf_bucketing/planner/gpus.py` has it
Row = dict[str, Any]

ATTENTION = {
    "mixed video 12": ("six of 64 to 11,776", "12 × 128"),
    "12 lengths 1024-4096, 12": ("twelve of 1,024 to 4,096", "12 × 128"),
    "12 lengths 1024-4096, 40": ("twelve of 1,024 to 4,096", "40 × 128"),
    "24 lengths 512-2048, 12": ("24 of 512 to 2,048", "12 × 128"),
    "64 lengths 256-1024, 12": ("64 of 256 to 1,024, all different", "12 × 128"),
    "64 lengths 256-1024, 24": ("64 of 256 to 1,024, all different", "24 × 128"),
    "48 equal": ("16 of 1,024 and 32 of 512", "12 × 128"),
    "text 512: 6 samples": ("six of 64 to 11,776, to 512 of text each", "12 × 128"),
    "text 512: 24 lengths": ("24 of 512 to 2,048, to 512 of text each", "12 × 128"),
    "gqa 24/8": ("six of 64 to 11,776, 8 heads of keys", "24 × 128"),
    "d64 odd": ("six of 61 to 11,771", "32 × 64"),
}
"""Packs of the second session: their lengths, and heads × channels."""
KERNELS = {
    "varlen:fa4": "FlashAttention 4",
    "segments": "`segments` (cuDNN)",
    "varlen:torch": "FlashAttention 2",
}
FIRST_ATTENTION = {
    "one 32768": ("one of 32,768", "12 × 128"),
    "mixed video": ("six of 64 to 11,776", "12 × 128"),
    "images 16x1024+32x512": ("16 of 1,024 and 32 of 512", "12 × 128"),
    "images 1MP mixed": ("ten images of about a megapixel", "24 × 128"),
}
FIRST_KERNELS = {
    "fa4": "FlashAttention 4",
    "segments": "`segments` (cuDNN)",
    "flex": "`flex`",
    "varlen": "FlashAttention 2",
}


def measured(name: str) -> Any:
    """Return what a file of the sessions holds."""
    return json.loads((RESULTS / "h100" / f"{name}.json").read_text())["measured"]


def speeds(cases: Row, kernels: dict[str, str], packs: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """Yield TFLOP/s of useful pairs: forward, and forward and backward, of each kernel."""
    for case, (lengths, heads) in packs.items():
        row: Row = {"pack": lengths, "heads": heads}
        for kernel, title in kernels.items():
            figures = cases[case][kernel]
            row[title] = f"{figures['fwd_tflops']:.0f} / {figures['fb_tflops']:.0f}"
        yield row


def attention() -> Row:
    first = measured("attention_1")
    first_fa4 = measured("attention_1_fa4")
    second = measured("attention_2")
    fa4 = [second[case]["varlen:fa4"] for case in ATTENTION]
    compiled = [row["first_s"] for row in fa4 if row["first_s"] > 1]
    return {
        "attention": [*speeds(second, KERNELS, ATTENTION)],
        "attention_of_first_session": [
            *speeds({case: first[case] | first_fa4[case] for case in FIRST_ATTENTION}, FIRST_KERNELS, FIRST_ATTENTION)
        ],
        "fa4": {
            "least_compile_s": min(compiled),
            "most_compile_s": max(compiled),
            "most_first_call_ms": 1000 * max(row["first_s"] for row in fa4 if row["first_s"] < 1),
            "most_error": max(row["err"] for row in fa4),
            "most_error_of_gradients": max(row["gerr"] for row in fa4),
            "least_of_fa2": min(ratio(second[case], "varlen:fa4", "varlen:torch") for case in ATTENTION),
            "most_of_fa2": max(ratio(second[case], "varlen:fa4", "varlen:torch") for case in ATTENTION),
            "most_forward_of_fa2": max(
                second[case]["varlen:torch"]["fwd_tflops"] / second[case]["varlen:fa4"]["fwd_tflops"]
                for case in ATTENTION
            ),
            "least_of_segments": min(ratio(second[case], "varlen:fa4", "segments") for case in ATTENTION),
            "most_of_segments": max(ratio(second[case], "varlen:fa4", "segments") for case in ATTENTION),
        },
        "segments": {"short": second["64 lengths 256-1024, 12"]["segments"]["fb_tflops"]},
    }


def ratio(case: Row, kernel: str, other: str) -> float:
    """Return the speed of a kernel, forward and backward, as a multiple of another's."""
    return float(case[kernel]["fb_tflops"] / case[other]["fb_tflops"])


def parity() -> list[Row]:
    part = measured("benchmark_1")["parts"]["parity"]
    rows = []
    for name in ("stock", "segments", "varlen", "flex"):
        row: Row = {
            "computed by": {"stock": "stock model, one by one", "varlen": "FlashAttention 2"}.get(name, f"`{name}`")
        }
        for where in ("attention", "model"):
            for what in ("output", "gradients"):
                error = part[where].get(name, {}).get(f"{what}_relative_error")
                row[f"{where}, {what}"] = None if error is None else 1000 * error
        rows.append(row)
    return rows


STEPS = {
    "2a": [
        ("one size, stock", "four of 8,190, stock model", "–", False),
        ("mixed, segments", "mixed pack", "`segments`", False),
        ("mixed, varlen:torch", "mixed pack", "FlashAttention 2", False),
    ],
    "2b": [
        ("one size, stock", "four of 8,190, stock model", "–", False),
        ("mixed, fa4", "mixed pack", "FlashAttention 4", False),
    ],
    "2c": [
        ("1.3B LoRA, one size, stock", "four of 8,190, stock model", "–", False),
        ("1.3B LoRA, mixed, fa4", "mixed pack", "FlashAttention 4", False),
        ("1.3B LoRA, one size, stock, compiled", "four of 8,190, stock model", "–", True),
        ("1.3B LoRA, mixed, fa4, compiled", "mixed pack", "FlashAttention 4", True),
    ],
}
"""Steps of each run, those of one size before the packs that are compared with them: key, step, kernel, compiled."""
SMALL_STEPS = {
    "2a": [
        ("small, stock", "stack, stock model", "–", False),
        ("small, segments", "pack", "`segments`", False),
        ("small, varlen:torch", "pack", "FlashAttention 2", False),
        ("small, stock, compiled", "stack, stock model", "–", True),
    ],
    "2b": [("small, fa4", "pack", "FlashAttention 4", False)],
    "2c": [
        ("1.3B LoRA, small, stock", "stack, stock model", "–", False),
        ("1.3B LoRA, small, fa4", "pack", "FlashAttention 4", False),
        ("1.3B LoRA, small, stock, compiled", "stack, stock model", "–", True),
        ("1.3B LoRA, small, fa4, compiled", "pack", "FlashAttention 4", True),
    ],
}


def steps(runs: dict[str, list[tuple[str, str, str, bool]]]) -> Iterator[Row]:
    for number, (run, cases) in enumerate(runs.items(), 1):
        stock = None
        for key, step, kernel, compiled in cases:
            figures = measured(f"steps_{run}")[key]
            if kernel == "–":
                stock = figures["tokens_per_s"]
            yield {
                "run": number,
                "step": step,
                "kernel": kernel,
                "compiled": "yes" if compiled else "no",
                "s": figures["s"],
                "tokens/s": round(figures["tokens_per_s"]),
                "useful TFLOP/s": round(figures["useful_tflops"]),
                "peak GiB": figures["peak_gib"],
                "of the stock step": None if kernel == "–" or stock is None else figures["tokens_per_s"] / stock,
            }


WIDE = {
    "1": [
        ("14B width, 8 layers, full, one 37,440", "one of 37,440, stock model", "–"),
        ("14B width, 8 layers, full, one 37,440, packed", "one of 37,440, packed", "`segments`"),
        ("14B width, 8 layers, full, 4 x 9,360 stacked", "four of 9,360, stock model", "–"),
        ("14B width, 8 layers, full, 4 x 9,360 packed", "four of 9,360, packed", "`segments`"),
        ("14B width, 8 layers, full, mixed packed", "six mixed, 41,168 in all, packed", "`segments`"),
    ],
    "2": [
        ("14B width, one 37,440, stock", "one of 37,440, stock model", "–"),
        ("14B width, one 37,440, fa4", "one of 37,440, packed", "FlashAttention 4"),
        ("14B width, mixed 41,168, fa4", "six mixed, 41,168 in all, packed", "FlashAttention 4"),
    ],
}


def wide_steps() -> Iterator[Row]:
    for session, cases in WIDE.items():
        stock: Row = {}
        for key, step, kernel in cases:
            figures = measured(f"width_of_14b_{session}")[key]
            if kernel == "–":
                stock = figures
            compared = kernel != "–" and figures["tokens"] == stock["tokens"]
            useful = figures.get("useful_tflops") or figures["model_tflops"]
            yield {
                "session": int(session),
                "step": step,
                "kernel": kernel,
                "s": figures["s"],
                "useful TFLOP/s": round(useful),
                "% of the peak": round(100 * useful / PEAK_TFLOPS),
                "peak GiB": figures["peak_gib"],
                "of the stock step": figures["tokens_per_s"] / stock["tokens_per_s"] if compared else None,
            }


def strategies() -> Row:
    part = measured("benchmark_1")["parts"]["strategies"]
    names = {"padding": "padded to the largest", "bucketing": "buckets", "packing": "packs (FlashAttention 2)"}
    rows = [
        {
            "batches": title,
            "steps": part[name]["steps"],
            "s": part[name]["seconds"],
            "real tokens/s": round(part[name]["real_tokens_per_s"]),
            "peak GiB": part[name]["peak_gib"],
        }
        for name, title in names.items()
    ]
    padded, buckets, packs = (row["real tokens/s"] for row in rows)
    return {
        "samples": part["samples"],
        "rows": rows,
        "buckets_of_padded": buckets / padded,
        "packs_of_padded": packs / padded,
        "packs_of_buckets": packs / buckets,
    }


PROFILES = {
    "small_stock": "10,800 tokens, stock model",
    "small_segments": "10,800 tokens, pack by `segments`",
    "small_fa4": "10,800 tokens, pack by FlashAttention 4",
    "mixed_fa4": "32,702 tokens, pack by FlashAttention 4",
}


def profiles() -> Iterator[Row]:
    for name, step in PROFILES.items():
        figures = measured(f"profile_{name}")
        full = next((row[2] / 1000 for row in figures["top_cpu"] if row[0] == "Command Buffer Full"), None)
        yield {
            "step": step,
            "kernels launched": figures["launches"],
            "s until the CPU has launched the last": figures["cpu_until_launched_s"],
            "s of the step": figures["whole_s"],
            "s that the CPU waits for a full queue": full,
        }


MEMORY = {
    "LoRA": "LoRA",
    "LoRA, 4 samples": "LoRA, four clips",
    "LoRA, int8 base": "LoRA on a base in int8",
    "LoRA, no checkpointing": "LoRA, a short clip without checkpointing",
    "full": "all weights",
    "full, bf16": "all weights, in bf16",
    "full, no checkpointing": "all weights, a short clip without checkpointing",
}


def memory() -> Row:
    cases = measured("benchmark_3")["memory"]
    rows = [
        {
            "step": title,
            "planned GiB": cases[name]["planned_gib"],
            "measured GiB": cases[name]["measured_gib"],
            "planned of measured": cases[name]["planned_of_measured"],
        }
        for name, title in MEMORY.items()
    ]
    return {"rows": rows, "least": min(row["planned of measured"] for row in rows)}


COMPILED = {
    "compiled_steps": {
        "fixed, stock": ("Wan 2.1 1.3B, LoRA", "four of 8,190, stock model"),
        "mixed, segments": ("Wan 2.1 1.3B, LoRA", "mixed pack, `segments`"),
    },
    "compiled_wide_steps": {
        "fixed, stock": ("width of 14B, all weights", "one of 37,440, stock model"),
        "mixed, segments": ("width of 14B, all weights", "six mixed, 41,168 in all, `segments`"),
        "small, stock": ("width of 14B, all weights", "three images of 3,600, stock model"),
    },
}


def compiled() -> Iterator[Row]:
    parts = measured("compiled_3")
    for part, cases in COMPILED.items():
        for name, (model, step) in cases.items():
            figures = parts[part][name]
            yield {
                "model": model,
                "step": step,
                "s": figures["s"],
                "useful TFLOP/s": round(figures["useful_tflops"]),
                "% of the peak": round(100 * figures["useful_tflops"] / PEAK_TFLOPS),
                "peak GiB": figures["peak_gib"],
                "first step, s": round(figures["first_s"]),
                "graphs": figures["graphs"],
            }


def tables() -> Row:
    """Return all tables and figures of the page."""
    run = measured("training_script_1")
    small, large = [*steps(SMALL_STEPS)], [*steps(STEPS)]
    return {
        **attention(),
        "parity": parity(),
        "steps": large,
        "small_steps": small,
        "all_weights_by_fa2_of_stock": measured("benchmark_1")["parts"]["step"]["full"][
            "packed_of_fixed_size_tokens_per_s"
        ],
        "compiled": {
            name: measured("steps_2c")[f"1.3B LoRA, {name}"]["s"]
            / measured("steps_2c")[f"1.3B LoRA, {name}, compiled"]["s"]
            for name in ("one size, stock", "mixed, fa4", "small, stock", "small, fa4")
        },
        "most_compile_s": max(
            figures["first_s"]
            for run in ("2a", "2c")
            for key, figures in measured(f"steps_{run}").items()
            if key.endswith("compiled")
        ),
        "wide_steps": [*wide_steps()],
        "strategies": strategies(),
        "profiles": [*profiles()],
        "training_script": {name: {"first": run[name]["losses"][0], "last": run[name]["losses"][-1]} for name in run},
        "tests": measured("tests_3"),
        "memory": memory(),
        "compiled_3": [*compiled()],
        "options": measured("options_3"),
        "resume": measured("benchmark_3")["resume"],
    }


if __name__ == "__main__":
    (RESULTS / "h100.json").write_text(json.dumps(tables(), indent=2, ensure_ascii=False) + "\n")
