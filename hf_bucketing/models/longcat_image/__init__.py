"""LongCat-Image: Flux without pooled text and guidance; an image stands behind a text of 512 tokens."""
