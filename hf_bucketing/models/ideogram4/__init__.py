"""Ideogram 4: images whose tokens attend with their text in one sequence, at positions apart from those of text."""
