"""Cosmos and Anima: rotary positions in seconds, and learned positions in every block; text with zero padding."""
