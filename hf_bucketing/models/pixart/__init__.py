"""PixArt-α and PixArt-Σ: images; sine-cosine positions; resolution and aspect ratio where trained with them."""
