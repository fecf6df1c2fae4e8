"""What keeps some transformers from being packed, measured on small ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

animate_2 = pytest.importorskip("diffusers.models.transformers.transformer_wan_animate_2")
helios = pytest.importorskip("diffusers.models.transformers.transformer_helios")


@pytest.fixture
def animate(monkeypatch: pytest.MonkeyPatch) -> Any:
    make = animate_2.create_block_mask

    def uncompiled(*args: Any, **options: Any) -> Any:
        return make(*args, **{**options, "_compile": False})

    monkeypatch.setattr(animate_2, "create_block_mask", uncompiled)
    torch.manual_seed(0)
    sizes = {"text_len": 8, "in_dim": 12, "dim": 64, "ffn_dim": 48, "freq_dim": 32, "text_dim": 16, "out_dim": 4}
    return animate_2.WanAnimate2Transformer3DModel(**sizes, num_heads=2, num_layers=2, use_img_emb=False)


@torch.no_grad()
def denoised(model: Any, latents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the pass over references, each the last two frames of its latent, and the one that reads their keys."""
    cache, count, tokens = (
        animate_2.WanAnimate2KVCache(2),
        len(latents),
        [latent[0].numel() // 4 for latent in latents],
    )
    shown = [latent[:, -2:] for latent in latents]
    grids = torch.tensor([[2, latent.shape[2] // 2, latent.shape[3] // 2] for latent in latents])

    def run(mode: str, grid: list[torch.Tensor], length: int, **options: object) -> list[torch.Tensor]:
        known, text = [torch.zeros(8, *latent.shape[1:]) for latent in grid], [torch.ones(5, 16)] * count
        levels = torch.full((count,), 500.0)
        return model(grid, levels, text, known, cache, mode, length, **options).sample

    run("extract", shown, tokens[0] * 2 // 3, offset_grid_sizes=grids)
    return run("cached", latents, tokens[0], reference_grid_sizes=grids, origin_len=5, origin_area=[64, 96])


def test_wan_animate_2_reads_the_grid_of_the_first_row_for_all_rows(animate: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(4, 3, *sides, generator=generator) for sides in ((4, 6), (6, 4), (4, 4))]
    both = denoised(animate, latents[:2])
    differences = [float((both[row] - denoised(animate, [latents[row]])[0]).abs().max()) for row in (0, 1)]
    assert differences[0] < 1e-5
    assert differences[1] > 1e-3
    with pytest.raises(ValueError, match="Each sample must hold exactly `seq_len`"):
        denoised(animate, latents[::2])


@torch.no_grad()
def test_helios_takes_the_earlier_frames_of_all_rows_in_one_length() -> None:
    shape = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48}
    model = helios.HeliosTransformer3DModel(
        **shape, in_channels=4, out_channels=4, num_layers=2, rope_dim=(4, 4, 4), is_amplify_history=True
    )
    earlier = {"latents_history_short": torch.randn(1, 4, 2, 8, 12)}
    earlier |= {"indices_latents_history_short": torch.arange(2)[None]}
    latents, text = torch.randn(2, 4, 3, 8, 12), torch.randn(2, 5, 16)

    def run(rows: int, **history: torch.Tensor) -> torch.Tensor:
        times = torch.arange(2, 5)[None].expand(rows, -1)
        return model(latents[:rows], torch.full((rows,), 500.0), text[:rows], times, **history).sample

    assert float((run(1, **earlier) - run(1)).abs().max()) > 1e-2, "the model attends to them"
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        run(2, **earlier)
