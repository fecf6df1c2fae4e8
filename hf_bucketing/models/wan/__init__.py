"""Wan 2.1 and 2.2: rotary positions over frames, rows and columns; flow matching with a fixed shift."""
