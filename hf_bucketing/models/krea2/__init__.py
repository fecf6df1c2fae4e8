"""Krea 2 Raw and Turbo: images in 2×2 blocks; layers of a text encoder, fused and refined; then one sequence."""
