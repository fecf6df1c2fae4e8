"""Tests that use accelerate, whose state is removed before and after each."""

from tests.training.conftest import fresh_accelerator

__all__ = ["fresh_accelerator"]
