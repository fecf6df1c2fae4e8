"""Wan-Animate: Wan with poses added to its tokens, and blocks that attend to a face frame by frame."""
