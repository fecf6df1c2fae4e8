"""Stable Diffusion 3 and 3.5: images, with positions cropped from the middle of one table; text in joint attention."""
