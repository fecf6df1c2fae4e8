"""HunyuanImage 2.1."""
