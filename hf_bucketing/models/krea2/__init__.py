"""Krea 2: images in 2×2 blocks; a text is a stack of layers of its encoder, fused and refined; then one sequence."""
