"""ChronoEdit: Wan's image-to-video transformer, for which a clip of two latent frames is an image and its edit."""
