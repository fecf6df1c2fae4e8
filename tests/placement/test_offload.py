"""Weights and activations that wait on the CPU: the same losses and gradients, and what is where at which time."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_bucketing import BucketingError
from hf_bucketing.models import enable_packing
from hf_bucketing.packing import packed_forward
from hf_bucketing.placement.blocks import blocks_of
from hf_bucketing.placement.offload import activations_on_cpu, offload_blocks, offload_idle, offloaded_blocks
from tests.devices import CUDA
from tests.models.cases import FamilyCase, Samples, each_family
from tests.models.families import CASES
from tests.training.training_cases import STABLE, in_process, run

CPU = torch.device("cpu")
LORA = {"lora_rank": 4, "gradient_checkpointing": True}


def make_transformer(folder: Path) -> WanTransformer3DModel:
    """A transformer of four blocks with adapters and gradient checkpointing."""
    model = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").requires_grad_(False)
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    model.enable_gradient_checkpointing()
    return model.train()


def run_once(model: WanTransformer3DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, model.config.in_channels, 3, 4, 6, generator=generator)
    text = torch.randn(2, 8, model.config.text_dim, generator=generator)
    return model(latents, torch.tensor([500.0, 200.0]), text, return_dict=False)[0].square().mean()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_equal_bit_by_bit_with_weights_on_the_cpu(pipeline_dir: Path) -> None:
    plain, offloaded = make_transformer(pipeline_dir), make_transformer(pipeline_dir)
    offload_blocks(offloaded, 3, device=CPU)
    for model in (plain, offloaded):
        run_once(model).backward()
    assert len(gradients(plain)) == 4 * 2 * 2 * 2  # blocks, attentions, targets, matrices
    for gradient, offloaded_gradient in zip(gradients(plain), gradients(offloaded), strict=True):
        assert torch.equal(gradient, offloaded_gradient)
    with torch.no_grad():
        assert torch.equal(run_once(plain), run_once(offloaded))


@pytest.mark.slow
@each_family
def test_packed_models_of_all_families_compute_with_what_waits(case: FamilyCase) -> None:
    found = []
    for count in (0, 2):
        model = case.model(torch.float64).requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("to_q.weight"))
        model.enable_gradient_checkpointing()
        offload_blocks(model.train(), count, device=CPU)
        assert len(waiting(model)) == count
        batch = Samples(torch.float64, case=case).pack(enable_packing(model, strip_length=4))
        with activations_on_cpu() if count else nullcontext():
            loss = packed_forward(model, batch).square().mean()
        loss.backward()
        found.append(gradients(model))
    assert len(found[0]) > 1
    for gradient, same_gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, same_gradient, rtol=1e-6, atol=1e-9 * float(gradient.abs().max()))


def waiting(model: torch.nn.Module) -> list[int]:
    """Return which blocks have weights that wait."""
    blocks = enumerate(blocks_of(model))
    found = {
        index: [value for module in block.modules() for value in vars(module).values()] for index, block in blocks
    }
    return [index for index, values in found.items() if any(isinstance(value, torch.Tensor) for value in values)]


def resident(model: torch.nn.Module) -> set[int]:
    """Return which blocks have their weights."""
    return {index for index, block in enumerate(blocks_of(model)) if block.ffn.net[2].weight.device == CPU}


def test_a_block_has_its_weights_only_while_it_is_computed(pipeline_dir: Path) -> None:
    model = make_transformer(pipeline_dir)
    offload_blocks(model, 2, device=CPU)
    assert resident(model) == {1, 3}, "the first and the third wait, others do not"
    seen = []
    for index, block in enumerate(blocks_of(model)):
        block.ffn.register_forward_pre_hook(lambda *_, index=index: seen.append((index, resident(model))))
    loss = run_once(model)
    assert seen == [(0, {0, 1, 3}), (1, {1, 3}), (2, {1, 2, 3}), (3, {1, 3})]
    seen.clear()
    loss.backward()
    assert seen == [(3, {1, 3}), (2, {1, 2, 3}), (1, {1, 3}), (0, {0, 1, 3})], "again, for the backward pass"
    assert resident(model) == {1, 3}


def test_weights_of_a_waiting_block_are_freed_after_its_backward_pass(pipeline_dir: Path) -> None:
    model = make_transformer(pipeline_dir)
    offload_blocks(model, 4, device=CPU)
    copies: list[weakref.ref] = []
    for block in blocks_of(model):
        block.ffn.register_forward_pre_hook(lambda ffn, _: copies.append(weakref.ref(ffn.net[2].weight)))
    loss = run_once(model)
    assert len(copies) == 4
    assert [copy() for copy in copies] == [None] * 4, "the forward pass keeps none"
    alive = []
    for block in blocks_of(model):  # inputs of a later block get their gradient when its backward pass is over
        block.register_forward_pre_hook(lambda *_: alive.append(sum(copy() is not None for copy in copies)))
    loss.backward()
    assert len(copies) == 8
    assert alive == [0] * 4, "when a block is computed again, those behind it have given theirs back"


def test_waiting_weights_are_not_moved_counted_or_saved_with_the_model(pipeline_dir: Path) -> None:
    model = make_transformer(pipeline_dir)
    whole = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    frozen = [sum(p.numel() for p in block.parameters() if not p.requires_grad) for block in blocks_of(model)]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    offload_blocks(model, 2, device=CPU)
    left = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert left == whole - frozen[0] - frozen[2]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    model.double()
    assert blocks_of(model)[0].ffn.net[2].weight.dtype == torch.float32


def test_weights_are_on_the_gpu_where_they_are_computed_with(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # tensors without values have none
    gpu, places = torch.device("cuda", 0), []
    with FakeTensorMode():  # a weight that is elsewhere is an error
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)).requires_grad_(False)
        offload_blocks(model, 3, device=gpu)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, _: places.append(block.weight.device))
        states = torch.empty(2, 4, device=gpu)
        with torch.no_grad():
            for block in model.blocks:
                states = block(states)
    assert places == [gpu] * 3
    assert {block.weight.device.type for block in model.blocks} == {"meta"}


def test_weights_of_an_expert_are_on_the_gpu_while_it_runs(monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    gpu = torch.device("cuda", 0)
    with FakeTensorMode(), torch.no_grad():
        models = [torch.nn.Linear(4, 4).requires_grad_(False) for _ in range(2)]
        offload_idle(models, device=gpu)
        assert [model.weight.device.type for model in models] == ["meta", "meta"]
        states = torch.empty(2, 4, device=gpu)
        for turn in (0, 1, 1, 0):
            states = models[turn](states)
            assert models[turn].weight.device == gpu
            assert models[1 - turn].weight.is_meta


def allocated_by_others() -> int:
    """Return the bytes that are allocated before a test, those that products in both passes take among them."""
    torch.nn.Linear(64, 64, device="cuda")(torch.ones(64, 64, device="cuda")).sum().backward()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
def test_an_idle_transformer_takes_no_memory_of_the_gpu() -> None:
    others = allocated_by_others()
    models = [torch.nn.Linear(4096, 4096).requires_grad_(False) for _ in range(2)]
    offload_idle(models, device=torch.device("cuda"))
    inputs = torch.randn(8, 4096).cuda()
    for turn in (0, 1, 0):
        assert models[turn](inputs).isfinite().all()
        assert torch.cuda.memory_allocated() - others < 1.5 * 4 * 4096 * 4096


@pytest.mark.gpu
def test_offload_takes_less_memory_of_the_gpu_with_equal_gradients_and_waits_for_no_copy() -> None:
    others, peaks, found = allocated_by_others(), [], []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(8)).requires_grad_(False)
        if offloaded:
            offload_blocks(model, 8, device=torch.device("cuda"))
        model.cuda()
        inputs = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        states = inputs
        with CUDA.recording() as waits:
            with activations_on_cpu() if offloaded else nullcontext():
                for block in model.blocks:
                    states = checkpoint(block, states, use_reentrant=False)
            states.square().mean().backward()
        waits.check(())
        peaks.append(torch.cuda.max_memory_allocated() - others)
        found.append(inputs.grad.cpu())
        del model, inputs, states
    assert peaks[1] < 0.6 * peaks[0]
    assert torch.equal(*found)


@pytest.mark.parametrize(("name", "blocks"), [
    ("wan-animate", {"WanTransformerBlock": 4}),  # and two face blocks, which checkpointing does not compute again
    ("wan-vace", {"WanTransformerBlock": 3, "WanVACETransformerBlock": 2}),
    ("z-image", {"ZImageTransformerBlock": 6}),
    ("prx", {"PRXBlock": 2}),  # whose model names none
])  # fmt: skip
def test_the_blocks_are_those_that_gradient_checkpointing_computes_again(name: str, blocks: dict[str, int]) -> None:
    model = CASES[name].model()
    assert Counter(type(block).__name__ for block in blocks_of(model)) == blocks
    assert len(offloaded_blocks(model, sum(blocks.values()))) == sum(blocks.values())


def test_offloaded_blocks_are_spread_evenly() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(8))
    for count, expected in [(1, [0]), (3, [0, 2, 5]), (4, [0, 2, 4, 6]), (8, list(range(8)))]:
        assert offloaded_blocks(model, count) == [model.blocks[index] for index in expected]


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_leave_the_device_and_gradients_stay_equal(checkpointing: bool, pipeline_dir: Path) -> None:
    plain, offloaded = make_transformer(pipeline_dir), make_transformer(pipeline_dir)
    inputs: dict[torch.nn.Module, list[weakref.ref]] = {plain: [], offloaded: []}
    for model in inputs:
        if not checkpointing:
            model.disable_gradient_checkpointing()
        for block in blocks_of(model)[1:]:  # the input of the first does not depend on trained weights
            block.register_forward_pre_hook(lambda _, args, model=model: inputs[model].append(weakref.ref(args[0])))
    losses = [run_once(plain)]
    with activations_on_cpu():
        losses.append(run_once(offloaded))
    if checkpointing:  # the graph keeps the inputs of blocks themselves, but not here
        assert [sum(ref() is not None for ref in inputs[model]) for model in inputs] == [3, 0]
    for loss in losses:
        loss.backward()
    for gradient, offloaded_gradient in zip(gradients(plain), gradients(offloaded), strict=True):
        torch.testing.assert_close(gradient, offloaded_gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("shape", ["dense", "transposed", "expanded"])
def test_what_waits_comes_back_in_the_layout_in_which_it_was_saved(shape: str) -> None:
    """Kernels sum in the order of the memory, so that another layout would round differently."""
    inputs = torch.randn(3, 4, requires_grad=True)
    made = {
        "dense": lambda: inputs * 2,
        "transposed": lambda: (inputs * 2).T,
        "expanded": lambda: inputs.expand(2, 3, 4),
    }
    saved = made[shape]()
    with activations_on_cpu():
        back = (saved * saved).grad_fn._saved_self
    assert back is not saved
    assert torch.equal(back, saved)
    if shape != "expanded":  # memory that overlaps itself is copied whole
        assert back.stride() == saved.stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches",
    [
        pytest.param({}, id="bucket"),
        pytest.param({"batching": "pack", "max_tokens": 640, "strip_length": 16}, id="pack", marks=pytest.mark.slow),
    ],
)
def test_runs_with_offload_learn_the_same_adapters(
    batches: dict, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, caplog
) -> None:
    losses, adapters = [], []
    for name, memory in {"plain": {}, "offload": {"offload_blocks": 4, "offload_activations": True}}.items():
        config = in_process(
            pipeline_dir, prepared_dir, tmp_path / name, **LORA, **batches, **memory, **STABLE, max_train_steps=2
        )
        losses.append(run(config))
        adapters.append(load_file(tmp_path / name / "pytorch_lora_weights.safetensors"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, rtol=1e-4, atol=1e-6)
    assert "Offload saves nothing on a CPU run" in caplog.text


def test_only_the_transformer_that_was_called_last_has_its_frozen_weights(pipeline_dir: Path) -> None:
    plain, models = make_transformer(pipeline_dir), [make_transformer(pipeline_dir) for _ in range(2)]
    run_once(plain).backward()
    offload_idle(models, device=CPU)
    names = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    copies: list[weakref.ref] = []
    for turn in (0, 0, 1, 0):
        run_once(models[turn]).backward()
        idle = models[1 - turn]
        assert {name for name, _ in idle.named_parameters()} == names, "its adapters stay"
        assert idle.scale_shift_table.is_meta
        assert models[turn].state_dict().keys() == plain.state_dict().keys()
        copies.append(weakref.ref(models[turn].scale_shift_table))
    assert copies[0]() is None, "weights that were brought are freed"
    assert copies[-1]() is not None
    models[0].zero_grad()
    run_once(models[0]).backward()
    for gradient, expected in zip(gradients(models[0]), gradients(plain), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_blocks": 2, "gradient_checkpointing": True}, r"offload_blocks=2.*lora_rank=16"),
        ({"offload_blocks": 2, "lora_rank": 4}, r"offload_blocks=2.*gradient_checkpointing=True"),
        ({**LORA, "offload_blocks": 5}, r"offload_blocks=5.*the 4 blocks.*lower it to 4"),
        ({**LORA, "offload_blocks": 1, "trained_component": "transformer_2"}, r"no transformer_2 to train"),
    ],
)
def test_offload_that_cannot_work_is_refused_before_weights_load(
    settings: dict, message: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", lambda *_, **__: pytest.fail("weights loaded"))
    with pytest.raises(BucketingError, match=message):
        run(in_process(pipeline_dir, prepared_dir, tmp_path, **settings))
