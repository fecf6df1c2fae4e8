"""LTX-2: an audio-video model, of which video is trained with its audio or alone; flow matching, shifted by size."""
