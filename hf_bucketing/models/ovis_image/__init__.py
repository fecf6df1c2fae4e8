"""Ovis-Image: Flux without pooled text and guidance; text at positions of its own, attended to with its padding."""
