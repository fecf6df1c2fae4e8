"""GLM-Image."""
