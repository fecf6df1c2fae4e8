"""HunyuanVideo: rotary positions over frames, rows and columns; text refined by itself, then in joint attention."""
