"""Flags of scripts, and how a script runs and ends."""

__all__ = []
