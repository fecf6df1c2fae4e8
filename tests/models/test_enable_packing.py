"""Switching packing on and off, and what it says to wrong inputs."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable, enable_packing
from hf_bucketing.models.families.wan import WanFamily
from hf_bucketing.models.registry import OTHER_KINDS, UNPACKABLE, families, family_of
from hf_bucketing.packing import packed_forward
from tests.models.cases import TIMESTEPS, Samples, largest_difference, make_model
from tests.models.families import CASES


def test_disabling_puts_the_model_back_bit_for_bit() -> None:
    model, samples = make_model(), Samples()
    processors, before = model.attn_processors, samples.alone(model)
    enable_packing(model, strip_length=4)
    assert not any(processor in processors.values() for processor in model.attn_processors.values())
    disable_packing(model)
    assert model.attn_processors == processors
    assert all(torch.equal(output, other) for output, other in zip(before, samples.alone(model), strict=True))
    enable_packing(model, strip_length=8)


def test_a_wrapped_model_runs_packs() -> None:
    class Wrapper(torch.nn.parallel.DataParallel):
        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    model, samples = make_model(), Samples()
    wrapper = Wrapper(model)
    batch = samples.pack(enable_packing(wrapper, strip_length=4))
    assert torch.equal(packed_forward(wrapper, batch), packed_forward(model, batch))
    disable_packing(wrapper)


def test_wrong_inputs_are_errors_that_name_the_sample() -> None:
    model, samples = make_model(), Samples()
    packing = enable_packing(model, strip_length=4)

    def pack(**changes):
        inputs = {"latents": samples.latents, "timesteps": samples.timesteps, "text": samples.text, **changes}
        return packing.pack(inputs.pop("latents"), **inputs)

    def latents_but(sample: int, *shape: int) -> list[torch.Tensor]:
        return [*samples.latents[:sample], torch.zeros(shape), *samples.latents[sample + 1 :]]

    cases = {
        "6 latents, 5 texts": {"text": samples.text[:5]},
        r"and 2 timesteps": {"timesteps": TIMESTEPS[:2]},
        "0 latents": {"latents": [], "text": [], "timesteps": TIMESTEPS[:0]},
        r"Latent 2 of .* \(5, 7, 6\) does not divide": {"latents": latents_but(2, 4, 5, 7, 6)},
        "Latent 1 has shape": {"latents": latents_but(1, 1, 4, 1, 8, 4)},
        "Latent 3 has 8 channels; the model takes 4": {"latents": latents_but(3, 8, 1, 2, 2)},
        "Text 0 has shape": {"text": [torch.zeros(7, 15), *samples.text[1:]]},
        "Sample 0 has a token grid of .*64 positions": {"latents": latents_but(0, 4, 1, 2, 200)},
        "text_mask": {"text_mask": torch.ones(6, 7)},
        r"Latent 2 is torch\.bfloat16 on cpu, and latent 0 is torch\.float32": {
            "latents": [*samples.latents[:2], samples.latents[2].bfloat16(), *samples.latents[3:]]
        },
        r"Text 5 is torch\.float64 on cpu, and text 0 is torch\.float32": {
            "text": [*samples.text[:5], samples.text[5].double()]
        },
    }  # fmt: skip
    for message, changes in cases.items():
        with pytest.raises(PackingError, match=message):
            pack(**changes)
    batch = pack()
    with pytest.raises(PackingError, match="token grids"):
        batch.pack_like(samples.targets[::-1])
    with pytest.raises(PackingError, match="Expected strips"):
        batch.unpack(torch.zeros(3, 4, 1, 2, 8))


def test_a_pack_of_another_patch_is_refused_with_both_patches() -> None:
    batch = Samples().pack(enable_packing(make_model(), strip_length=4))
    other = make_model(patch_size=(1, 1, 1))
    enable_packing(other, strip_length=4)
    with pytest.raises(PackingError, match=r"\(1, 2, 2\).*\(1, 1, 1\)"):
        packed_forward(other, batch)


SCALED = ("wan", "ltx", "hunyuan", "hunyuan-1.5", "cogvideox", "mochi", "sd3", "flux")


@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_the_scale_of_lora_layers_is_passed_as_to_the_stock_forward(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    model.add_adapter(LoraConfig(target_modules=["to_q", "to_k"], init_lora_weights=False))
    kwargs = {"joint_attention_kwargs" if name in ("sd3", "flux") else "attention_kwargs": {"scale": 0.5}}
    scaled_model = partial(model, **kwargs)
    scaled_model.config = model.config
    expected, batch = samples.alone(scaled_model), samples.pack(enable_packing(model, strip_length=4))
    scaled, plain = (packed_forward(model, batch, attention_kwargs=scale) for scale in ({"scale": 0.5}, None))
    assert largest_difference(expected, batch.unpack(scaled)) <= 1e-5
    assert largest_difference(expected, batch.unpack(plain)) > 1e-5
    with pytest.raises(PackingError, match=r"nothing but 'scale' in attention_kwargs.*\['ip_adapter_masks'\]"):
        packed_forward(model, batch, attention_kwargs={"ip_adapter_masks": 1})


def test_attention_kwargs_are_refused_where_the_stock_forward_takes_none() -> None:
    for family in families().values():
        taken = inspect.signature(getattr(diffusers, family.transformer_class).forward).parameters
        names = [name for name in ("attention_kwargs", "joint_attention_kwargs") if name in taken]
        assert [family.attention_kwargs] == (names or [None]), family.transformer_class
    model, samples = CASES["pixart"].model(), Samples(case=CASES["pixart"])
    batch = samples.pack(enable_packing(model, strip_length=4))
    with pytest.raises(PackingError, match=r"PixArtTransformer2DModel takes no attention_kwargs.*set_adapters"):
        packed_forward(model, batch, attention_kwargs={"scale": 0.5})


def test_packing_is_enabled_once_on_known_models_and_needed_for_packs() -> None:
    model = make_model()
    batch = Samples().pack(enable_packing(model, strip_length=4))
    with pytest.raises(PackingError, match="already enabled"):
        enable_packing(model)
    with pytest.raises(PackingError, match="no pack is being computed"):
        Samples().alone(model)
    disable_packing(model)
    for call in (lambda: packed_forward(model, batch), lambda: disable_packing(model)):
        with pytest.raises(PackingError, match="not enabled"):
            call()
    cases = {
        "unknown attention backend 'fast'": lambda: enable_packing(model, backend="fast"),
        "strip_length must be at least 1": lambda: enable_packing(model, strip_length=0),
        "exceeds the 64 positions": lambda: enable_packing(model, strip_length=65),
        r"SanaTransformer2DModel cannot be packed: its attention is linear.* bucketed": lambda: enable_packing(
            diffusers.SanaTransformer2DModel(num_layers=1, num_attention_heads=1, num_cross_attention_heads=1,
                                             attention_head_dim=4, cross_attention_head_dim=4, cross_attention_dim=4,
                                             caption_channels=4, sample_size=4)),
        r"does not know torch\.nn.*Linear; it knows .*WanTransf.*, or write a family": lambda: enable_packing(
            torch.nn.Linear(1, 1)),
        r"expected a transformer, got SimpleNamespace; of a pipeline, pass pipeline\.transformer": lambda: (
            enable_packing(SimpleNamespace(transformer=model))),
    }  # fmt: skip
    for message, call in cases.items():
        with pytest.raises(PackingError, match=f"(?i){message}"):
            call()


def test_models_that_strips_cannot_carry_are_refused_with_the_reason() -> None:
    cannot = dict.fromkeys(UNPACKABLE, "cannot be packed: .*Train this model with bucketed batches")
    others = dict.fromkeys(OTHER_KINDS, "does not make images or videos from text, .*: it (makes|is a block)")
    for name, message in {**cannot, **others}.items():
        if hasattr(diffusers, name):  # older versions lack some
            model = torch.nn.Module()
            model.__class__ = type(f"My{name}", (getattr(diffusers, name),), {})
            with pytest.raises(PackingError, match=f"My{name} {message}"):
                family_of(model)


def test_a_subclass_that_keeps_the_stock_forward_is_packed_as_its_base() -> None:
    class MyWan(WanTransformer3DModel):
        def describe(self) -> str:
            return "mine"

    model, samples = CASES["wan"].model(), Samples()
    model.__class__ = MyWan
    assert isinstance(family_of(model), WanFamily)
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert largest_difference(CASES["wan"].expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Shifting(WanTransformer3DModel):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states.roll(1, 0), *args, **kwargs)

    model = CASES["wan"].model()
    model.__class__ = Shifting
    with pytest.raises(PackingError, match=r"Shifting overrides the forward of diffusers' WanTransformer3DModel"):
        enable_packing(model)


def test_a_foreign_class_of_the_same_name_is_refused() -> None:
    foreign = type("WanTransformer3DModel", (torch.nn.Linear,), {"__module__": "somebody.else"})
    with pytest.raises(PackingError, match=r"know somebody\.else\.WanTransformer3DModel .* this is another class"):
        enable_packing(foreign(1, 1))


@pytest.mark.parametrize("family", families().values(), ids=list(families()))
def test_the_installed_diffusers_runs_each_model_as_packing_was_tested_with(family) -> None:
    assert enable.stock_digest(family) in family.tested_forwards


def test_a_changed_forward_is_said_when_packing_is_enabled(monkeypatch, caplog) -> None:
    enable_packing(make_model(), strip_length=4)
    assert not [record for record in caplog.records if record.name == enable.__name__]
    module = sys.modules[WanTransformer3DModel.__module__]
    changed = inspect.getsource(module).replace("+ temb.float()", "+ 2 * temb.float()")
    monkeypatch.setattr(enable.inspect, "getsource", lambda module: changed)
    enable.stock_digest.cache_clear()
    enable_packing(make_model(), strip_length=4)
    enable.stock_digest.cache_clear()
    (record,) = [record for record in caplog.records if record.name == enable.__name__]
    assert "runs WanTransformer3DModel in another way" in record.getMessage()
