"""Lumina 2: rotary positions of the text and, after it, of the image; refiners of both; flow matching."""
