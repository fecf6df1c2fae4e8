"""Z-Image: lists of images and of captions, filled up with learned tokens to multiples of 32; flow matching."""
