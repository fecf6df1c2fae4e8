"""ERNIE-Image: images in 2×2 blocks, at positions after their text, in one sequence with it."""
