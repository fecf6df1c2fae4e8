"""Runs by their logs: what a run wrote, whether it is whole, how the loss fell, and a page of it."""
