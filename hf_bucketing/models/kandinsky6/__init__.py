"""Kandinsky 6: video without sound, as Kandinsky 5; text refined by blocks of its own, then attended to."""
