"""Settings that exclude each other: each rule has a run that breaks it, and the help of flags names them."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hf_bucketing.commands.table import COMMANDS
from hf_bucketing.placement.conflicts import (
    CONFLICTS,
    READ_FULL_WEIGHTS,
    Combination,
    conflicting_settings,
    conflicts,
)
from hf_bucketing.placement.settings import MemoryConfig

SOUND = Combination(
    memory=MemoryConfig(gradient_checkpointing=True), adapters=True, mixed_precision="bf16", num_processes=2
)

BROKEN = [
    ({}, {"planned": True, "sharding": "fsdp2", "num_processes": 1}),
    ({"quantize_base": "int8"}, {"sharding": "fsdp2"}),
    ({"offload_blocks": 1}, {"sharding": "deepspeed"}),
    ({"trained_dtype": "bf16"}, {"sharding": "fsdp2"}),
    ({}, {"sharding": "fsdp2", "optimizer": "prodigyopt:Prodigy"}),
    ({}, {"sharding": "fsdp", "joined": READ_FULL_WEIGHTS}),
    ({}, {"sharding": "deepspeed stage 3", "joined": ("ema_decay",)}),
    ({}, {"sharding": "fsdp2", "searches": True, "loads_once": True}),
    ({}, {"sharding": "deepspeed", "weighs_late": True}),
    ({"trained_dtype": "bf16"}, {"mixed_precision": "no"}),
    ({"offload_blocks": 1}, {"adapters": False}),
    ({"quantize_base": "nf4"}, {"on_cpu": True}),
    ({"quantize_base": "nf4", "offload_blocks": 1}, {}),
    ({"quantize_base": "int8", "gradient_checkpointing": False}, {}),
    ({"offload_blocks": 1, "gradient_checkpointing": 3}, {}),
    ({"gradient_checkpointing": "auto"}, {"searches": True}),
    ({"gradient_checkpointing": "auto"}, {"sharding": "deepspeed"}),
    ({"gradient_checkpointing": 3}, {"sharding": "fsdp2", "wraps_blocks": True}),
    ({"gradient_checkpointing": "auto"}, {"planned": True}),
    ({}, {"lora_plus": True, "adapters": False}),
    ({}, {"lora_plus": True, "kind": "lokr"}),
    ({}, {"lora_format": "comfyui", "kind": "dora"}),
    ({"quantize_base": "nf4"}, {"kind": "loha"}),
    ({"context_parallel_degree": 2}, {"num_processes": 3}),
    ({"context_parallel_degree": 2}, {"sharding": "fsdp"}),
    ({"context_parallel_degree": 2}, {"grouped": True}),
    ({"context_parallel_degree": 2}, {"searches": True}),
    ({"context_parallel_degree": 2}, {"replaces": True}),
    ({"context_parallel_degree": 2}, {"strip_length": 15}),
    ({"offload_idle_expert": True}, {}),
    ({"offload_idle_expert": True}, {"adapters": False, "experts": True}),
    ({"offload_idle_expert": True, "quantize_base": "nf4"}, {"experts": True}),
    ({}, {"sharding": "fsdp2", "experts": True}),
    ({"context_parallel_degree": 2}, {"experts": True}),
    ({"compile": True}, {"dynamo": True}),
    ({"compile": True}, {"sharding": "deepspeed"}),
    ({"compile": True, "context_parallel_degree": 2}, {}),
    ({"compile": True, "quantize_base": "nf4"}, {}),
    ({}, {"file": "model.safetensors", "experts": True}),
    ({}, {"file": "model.gguf", "adapters": False}),
    ({"quantize_base": "int8"}, {"file": "model.gguf"}),
    ({}, {"file": "model.gguf", "kind": "dora"}),
    ({"offload_blocks": 1}, {"file": "model.gguf"}),
    ({}, {"file": "model.gguf", "sharding": "fsdp2"}),
    ({"compile": True}, {"file": "model.gguf"}),
]


def test_sound_settings_break_no_rule() -> None:
    assert list(conflicts(SOUND)) == []
    assert len(BROKEN) == len(CONFLICTS)


@pytest.mark.parametrize("rule", range(len(CONFLICTS)))
def test_each_rule_alone_refuses_the_run_that_breaks_it(rule: int) -> None:
    memory, settings = BROKEN[rule]
    broken = dataclasses.replace(SOUND, memory=dataclasses.replace(SOUND.memory, **memory), **settings)
    assert [conflict.occurs(broken) for conflict in CONFLICTS] == [other == rule for other in range(len(CONFLICTS))]
    (reason,) = conflicts(broken)
    assert not re.search(r"[{}]", reason)
    assert any(name in reason for name in CONFLICTS[rule].settings)


def test_the_next_strip_length_that_divides_is_named() -> None:
    memory = MemoryConfig(context_parallel_degree=4)
    (reason,) = conflicts(dataclasses.replace(SOUND, memory=memory, num_processes=4, strip_length=30))
    assert reason.endswith("use `strip_length=32`.")


def test_settings_that_may_conflict_name_each_other() -> None:
    names = ["lora_rank", "quantize_base", "offload_blocks"]
    assert conflicting_settings(names) == {
        "lora_rank": ["quantize_base", "offload_blocks"],
        "quantize_base": ["lora_rank", "offload_blocks"],
        "offload_blocks": ["lora_rank", "quantize_base"],
    }


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "train",
            "It may conflict with fsdp_version, zero_stage, --quantize_base, --offload_blocks, --lora_plus_ratio, "
            "--offload_idle_expert, --transformer_file.",
        ),
        ("plan", "It may conflict with --quantize_base, --offload_blocks, --sharding."),
    ],
)
def test_the_help_of_a_flag_names_those_it_may_conflict_with(command: str, said: str) -> None:
    text = " ".join(COMMANDS[command].load().make_parser().format_help().split())
    assert said in text
