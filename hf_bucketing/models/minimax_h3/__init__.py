"""MiniMax-H3: one sequence of text, sound and video per forward, which is the pack; flow matching."""
