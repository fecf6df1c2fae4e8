"""Flux: images in 2×2 blocks, rotary positions over rows and columns; text in joint attention."""
