"""Mochi: learned rotary frequencies; text pooled by attention, and in joint attention in a width of its own."""
