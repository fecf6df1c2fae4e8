"""Attention processors that are not those of the model family, before packing is enabled and after."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from hf_bucketing import PackingError
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.packing import packed_forward
from tests.models.cases import CASES, FamilyCase, Samples, each_family, largest_difference

CHANGES = {
    "cogvideox, fused": ("cogvideox", lambda model: model.fuse_qkv_projections()),
    "sd3, fused": ("sd3", lambda model: model.fuse_qkv_projections()),
    "sd3, fused and unfused": (
        "sd3",
        lambda model: (model.fuse_qkv_projections(), model.unfuse_qkv_projections()),
    ),
    "pixart, default": ("pixart", lambda model: model.set_default_attn_processor()),
    "pixart, fused": ("pixart", lambda model: model.fuse_qkv_projections()),
    "wan, set": ("wan", lambda model: model.set_attn_processor(WanAttnProcessor())),
    "wan, set on one module": ("wan", lambda model: model.blocks[1].attn2.set_processor(WanAttnProcessor())),
    "wan, fused": ("wan", lambda model: model.fuse_qkv_projections()),
    "flux, fused": ("flux", lambda model: model.fuse_qkv_projections()),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_attention_that_is_changed_after_packing_is_enabled_is_refused_by_name(name: str, change) -> None:
    case = CASES[name]
    model, samples = case.model(), Samples(case=case)
    batch = samples.pack(enable_packing(model, strip_length=4))
    change(model)
    message = r"attn\w*\b.* changed after enable_packing.*disable_packing\(transformer\), .*then enable_packing"
    with pytest.raises(PackingError, match=message):
        packed_forward(model, batch)
    disable_packing(model)
    assert largest_difference(case.expected.outputs, samples.alone(model)) <= 1e-5


@each_family
def test_an_attention_backend_of_diffusers_is_refused_while_packed(case: FamilyCase) -> None:
    model = case.model()
    enable_packing(model, strip_length=4)
    with pytest.raises(PackingError, match=r"(?s)'native'.*enable_packing\(transformer, backend="):
        model.set_attention_backend("native")
    model.reset_attention_backend()
    disable_packing(model)
    model.set_attention_backend("native")


class Doubling(WanAttnProcessor):
    """A user's own processor."""

    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class Weighted(torch.nn.Module):
    """A user's own processor with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inner = torch.nn.Parameter(torch.ones(())), WanAttnProcessor()

    def forward(self, *args, **kwargs):
        return self.gate * self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    "processor", [Doubling(), Weighted(), AttnProcessor2_0()], ids=lambda processor: type(processor).__name__
)
def test_a_processor_that_the_family_was_not_written_for_is_refused_by_name(processor) -> None:
    model = CASES["wan"].model()
    model.blocks[1].attn1.set_processor(processor)
    keys = model.state_dict().keys()
    message = rf"blocks\.1\.attn1 .*{type(processor).__name__}.* WanAttnProcessor.*set_processor.*bucketed batches"
    with pytest.raises(PackingError, match=message):
        enable_packing(model, strip_length=4)
    assert model.state_dict().keys() == keys
    assert model.blocks[1].attn1.processor is processor


def test_a_forward_that_was_replaced_on_the_model_is_refused() -> None:
    model = CASES["wan"].model()
    model.forward = lambda hidden_states, *args, **kwargs: type(model).forward(model, hidden_states, *args, **kwargs)
    with pytest.raises(PackingError, match=r"forward of this .*WanTransformer3DModel was replaced"):
        enable_packing(model)
    del model.forward
    for wrap in (torch.autocast("cpu", torch.bfloat16), convert_outputs_to_fp32):  # as accelerate's mixed precision
        model.forward = MethodType(wrap(model.forward.__func__), model)
    enable_packing(model)


@torch.no_grad()
def test_fused_projections_that_no_processor_reads_are_refused_in_every_family() -> None:
    for name in ("pixart", "ltx"):
        model = CASES[name].model()
        for module in model.modules():
            if hasattr(module, "fuse_projections"):
                module.fused_projections = True
        with pytest.raises(PackingError, match="holds fused projections that its processor does not use"):
            enable_packing(model)
