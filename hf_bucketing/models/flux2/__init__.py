"""FLUX.2 dev and klein: images in 2×2 blocks, four axes of positions, also of text; one modulation for all blocks."""
