"""LTX-Video: latents as sequences of tokens, positions in seconds and pixels; flow matching, shifted by size."""
