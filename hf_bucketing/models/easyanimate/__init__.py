"""EasyAnimate 5.1."""
