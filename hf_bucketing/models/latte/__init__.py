"""Latte: blocks that attend inside frames and over frames in turn; denoising with a learned variance."""
