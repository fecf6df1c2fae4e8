"""Kandinsky 5: text refined by blocks of its own, then attended to; positions scaled by size; flow matching."""
