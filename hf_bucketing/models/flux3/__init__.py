"""FLUX.3: images in 2×2 blocks; blocks of image and of text alone before those of both; text at timestep 0."""
