"""LTX-2, 2.3 and 2.5: audio-video models, of which video is trained with its audio or alone; shifted by size."""
