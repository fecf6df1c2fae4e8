"""Qwen-Image 2.1: text that sees only what precedes it, at noise level 0, then the tokens of an image."""
