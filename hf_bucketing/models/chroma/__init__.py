"""Chroma: Flux without pooled text and guidance; text in joint attention, masked but for one token of its padding."""
