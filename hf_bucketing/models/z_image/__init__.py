"""Z-Image and Z-Image-Turbo: lists of images and captions, filled up with learned tokens; flow matching."""
