"""Kandinsky 6: video with sound or without, as Kandinsky 5; text refined by blocks of its own, then attended to."""
