"""SkyReels-V2: Wan's transformer with diffusion forcing, a timestep per latent frame."""
