"""Optimizers by name: their groups, their settings, and what they hold."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.optimizers.optimizer import (
    apply_settings,
    check_optimizer,
    make_optimizer,
    make_schedule,
    optimizer_class,
    set_training,
    state_bytes,
)
from hf_bucketing.optimizers.settings import OptimizerConfig

ADAMW = OptimizerConfig(learning_rate=1e-3, adam_beta2=0.99, adam_weight_decay=0.1)
EIGHT_BIT = dataclasses.replace(ADAMW, optimizer="adamw_8bit")


def test_the_optimizer_takes_what_is_trained_and_says_what_is_missing(monkeypatch) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, ADAMW)
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(model.weight)]
    assert optimizer.defaults["weight_decay"] == 0.1
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BucketingError, match="nothing would be trained"):
        make_optimizer(frozen, ADAMW)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(BucketingError, match=r"pip install .hf_bucketing\[8bit\]"):
        make_optimizer(model, EIGHT_BIT)


def test_the_optimizer_and_its_schedule_have_the_given_settings() -> None:
    settings = OptimizerConfig(learning_rate=0.5, adam_beta1=0.5, adam_beta2=0.75, adam_weight_decay=2.0,
                               adam_epsilon=0.1)  # fmt: skip
    model = torch.nn.Linear(1, 1)
    defaults = make_optimizer(model, settings).defaults
    assert {name: defaults[name] for name in ("lr", "betas", "weight_decay", "eps")} == {
        "lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 2.0, "eps": 0.1,
    }  # fmt: skip

    def rates(kind: str, **more: int) -> list[float]:
        config = dataclasses.replace(settings, lr_scheduler=kind, **more)
        schedule = make_schedule(make_optimizer(model, config), config, num_training_steps=4)
        return [0.5 * schedule.lr_lambdas[0](step) for step in range(5)]

    assert rates("constant") == [0.5] * 5
    assert rates("linear") == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert rates("constant_with_warmup", lr_warmup_steps=2) == [0.0, 0.25, 0.5, 0.5, 0.5]
    assert rates("cosine")[::2] == pytest.approx([0.5, 0.25, 0.0])


@pytest.mark.usefixtures("bitsandbytes")
def test_the_8_bit_optimizer_holds_bytes_and_takes_nearly_the_same_steps() -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50", reason="older ones take no steps on a CPU")
    inputs, weights = torch.randn(32, 64), []
    for config in (ADAMW, EIGHT_BIT):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 128, bias=False)
        first = model.weight.detach().clone()
        optimizer = make_optimizer(model, config)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        weights.append(model.weight.detach() - first)
    state = optimizer.state[model.weight]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    difference = float((weights[1] - weights[0]).norm() / weights[0].norm())
    assert 0 < difference < 0.05, difference


class Model(torch.nn.Module):
    """A model with a block, an embedding and a norm, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks[0](self.embed(inputs)))


def named_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]


def test_only_weights_of_two_dimensions_decay_also_after_resuming() -> None:
    model = Model()
    optimizer = make_optimizer(model, ADAMW)
    assert named_groups(model, optimizer) == [
        {"embed.weight", "blocks.0.weight"},
        {"embed.bias", "blocks.0.bias", "norm.weight", "norm.bias"},
    ]
    schedule = make_schedule(optimizer, ADAMW, num_training_steps=4)
    apply_settings(dataclasses.replace(ADAMW, adam_weight_decay=0.3, learning_rate=0.5), schedule)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_the_upper_matrices_of_lora_have_their_own_rate_also_after_resuming() -> None:
    model = torch.nn.ModuleDict(
        {"lora_A": torch.nn.Linear(2, 1, bias=False), "lora_B": torch.nn.Linear(1, 2, bias=False)}
    )
    layer = torch.nn.ModuleDict({"to_q": model})
    config = OptimizerConfig(learning_rate=0.1, lora_plus_ratio=16.0)
    optimizer = make_optimizer(layer, config)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 1.6])
    assert named_groups(layer, optimizer)[1] == {"to_q.lora_B.weight"}
    schedule = make_schedule(optimizer, config, num_training_steps=4)
    apply_settings(dataclasses.replace(config, learning_rate=0.01), schedule)
    assert schedule.get_last_lr() == pytest.approx([0.01, 0.16])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon_takes_matrices_of_blocks_and_adamw_the_others_and_their_state_is_one() -> None:
    config = OptimizerConfig(optimizer="torch.optim:Muon", learning_rate=0.01, adam_beta2=0.9)
    inputs, models = torch.randn(5, 3), [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make_optimizer(model, config) for model in models]
    assert named_groups(models[0], optimizers[0]) == [
        {"blocks.0.weight"},
        {"embed.weight"},
        {"embed.bias", "blocks.0.bias", "norm.weight", "norm.bias"},
    ]
    assert [group.get("betas") for group in optimizers[0].param_groups] == [None, (0.9, 0.9), (0.9, 0.9)]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(models[0], optimizers[0])
    for _ in range(2):
        step(models[1], optimizers[1])
    resumed = make_optimizer(models[1], config)
    resumed.load_state_dict(optimizers[1].state_dict())
    step(models[1], resumed)
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(
    "config",
    [
        ADAMW,
        EIGHT_BIT,
        OptimizerConfig(optimizer="torch.optim:Muon", learning_rate=0.01),
        OptimizerConfig(optimizer="prodigyopt:Prodigy", learning_rate=1.0),
        OptimizerConfig(optimizer="schedulefree:AdamWScheduleFree", learning_rate=0.1),
        OptimizerConfig(optimizer="pytorch_optimizer:CAME", learning_rate=0.01),
    ],
    ids=lambda config: config.optimizer,
)
def test_models_that_take_turns_learn_as_each_does_alone_also_after_resuming(config: OptimizerConfig) -> None:
    package = {"adamw": "torch", "adamw_8bit": "bitsandbytes"}.get(
        config.optimizer, config.optimizer.partition(":")[0]
    )
    pytest.importorskip(package)
    alone = [torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(64, 128)])}) for _ in range(2)]
    together = copy.deepcopy(alone)
    inputs = torch.randn(8, 64)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
        for _ in range(steps):
            model["blocks"][0](inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for model, steps in zip(alone, (5, 2), strict=True):
        optimizer = make_optimizer(model, config)
        set_training(optimizer)
        train(model, optimizer, steps=steps)
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    optimizer = make_optimizer(together[0], config, others=together[1:])
    optimizer.train()
    for turn in (0, 0, 1):
        train(together[turn], optimizer, steps=1)
    resumed = make_optimizer(together[0], config, others=together[1:])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for turn in (0, 1, 0, 0):
        train(together[turn], resumed, steps=1)
    resumed.eval()
    for model, other in zip(alone, together, strict=True):
        for expected, found in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(
    ("optimizer", "args", "held"),
    [
        ("torch.optim:AdamW", None, 8),
        ("torch.optim:SGD", None, 0),
        ("torch.optim:SGD", ["momentum=0.9"], 4),
        ("torch.optim:Adagrad", None, 4),
        ("torch.optim:Adafactor", None, 0),
        ("bitsandbytes.optim:AdamW8bit", None, 2),
        ("bitsandbytes.optim:Lion8bit", None, 1),
        ("prodigyopt:Prodigy", None, 16),
        ("schedulefree:AdamWScheduleFree", None, 8),
        ("pytorch_optimizer:CAME", None, 4),
    ],
)
def test_the_bytes_of_an_optimizer_are_measured(optimizer: str, args: list[str] | None, held: int) -> None:
    pytest.importorskip(optimizer.partition(":")[0])
    before = torch.random.get_rng_state()
    config = OptimizerConfig(optimizer=optimizer, optimizer_args=args)
    assert state_bytes(config, dtype=torch.float32) == pytest.approx(held, abs=0.05)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_arguments_reach_the_optimizer_as_python_values() -> None:
    config = OptimizerConfig(
        optimizer="torch.optim:AdamW",
        optimizer_args=["betas=0.8,0.95", "weight_decay=0", "amsgrad=true", "foreach=None"],
    )
    check_optimizer(config)
    assert config.arguments() == {"betas": (0.8, 0.95), "weight_decay": 0, "amsgrad": True, "foreach": None}
    assert make_optimizer(Model(), config).defaults["betas"] == (0.8, 0.95)
    assert OptimizerConfig(optimizer="a:B", optimizer_args=["adjust_lr_fn=original"]).arguments() == {
        "adjust_lr_fn": "original"
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adam"}, 'must be adamw or adamw_8bit, or a class as "module:Class"'),
        ({"optimizer": "adamw", "optimizer_args": ["betas=0,0"]}, "adamw takes `adam_beta1`"),
        ({"optimizer": "torch.optim:SGD", "adam_beta1": 0.5}, "`adam_beta1` is AdamW's; give torch.optim:SGD its own"),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": ["momentum"]}, "form key=value, got 'momentum'"),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": ["momentun=1"]}, "no argument momentun.*momentum"),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": ["lr=1"]}, "no argument lr.*give `learning_rate`"),
        ({"optimizer": "torch.optim:AdamX"}, "has no optimizer AdamX"),
        ({"optimizer": "no_such_package.optim:Lion"}, "pip install no-such-package"),
        ({"optimizer": "torch.optim:LBFGS"}, "several times per step"),
        ({"lora_plus_ratio": 0.0}, "`lora_plus_ratio` must be greater than 0"),
    ],
)
def test_optimizers_that_cannot_be_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        check_optimizer(OptimizerConfig(**settings))


def test_rates_and_schedules_are_those_that_an_optimizer_expects() -> None:
    pytest.importorskip("prodigyopt")
    pytest.importorskip("schedulefree")
    prodigy = OptimizerConfig(optimizer="prodigyopt:Prodigy", learning_rate=1.0)
    check_optimizer(prodigy)
    with pytest.raises(BucketingError, match=r"`learning_rate=0\.0001`; give `learning_rate=1`"):
        check_optimizer(dataclasses.replace(prodigy, learning_rate=1e-4))
    with pytest.raises(BucketingError, match="Omit `lora_plus_ratio`"):
        check_optimizer(dataclasses.replace(prodigy, lora_plus_ratio=2.0))
    free = OptimizerConfig(optimizer="schedulefree:AdamWScheduleFree", optimizer_args=["warmup_steps=10"])
    check_optimizer(free)
    assert optimizer_class(free).__name__ == "AdamWScheduleFree"
    with pytest.raises(BucketingError, match='use `lr_scheduler="constant"`'):
        check_optimizer(dataclasses.replace(free, lr_scheduler="cosine"))
