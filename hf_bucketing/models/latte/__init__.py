"""latte."""
