"""Wan VACE: Wan with a branch of blocks that reads a control video."""
