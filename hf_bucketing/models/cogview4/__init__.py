"""CogView4."""
