"""HunyuanVideo 1.5: two texts and image tokens in joint attention; a first frame as channels of the latent."""
