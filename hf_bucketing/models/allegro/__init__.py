"""Allegro: rotary positions over frames, rows and columns, made by its pipeline."""
