"""Flux.2: images in 2×2 blocks, four axes of positions, text among them; modulation shared by all blocks."""
