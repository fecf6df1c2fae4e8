"""MiniMax-H3: one sequence of text and video per forward, which is the pack; without its sound; flow matching."""
