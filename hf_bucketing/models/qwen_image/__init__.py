"""Qwen-Image and Edit, 2509 and 2511."""
