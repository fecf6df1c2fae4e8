"""Attention processors that run a pack, one per way of attending, named as diffusers names its own."""
