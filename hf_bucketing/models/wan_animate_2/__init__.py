"""Wan-Animate 2: Wan whose frames also attend to those of a driving video, which runs beside them."""
