"""What a person runs: a module for each command of `hf_bucketing`, with `make_parser` and `main`."""

__all__ = []
