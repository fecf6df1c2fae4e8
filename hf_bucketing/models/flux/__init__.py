"""FLUX.1, Kontext and controls: images in 2×2 blocks, rotary positions over rows and columns; joint attention."""
