"""Motif-Video."""
