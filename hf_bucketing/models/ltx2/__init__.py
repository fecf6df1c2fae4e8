"""LTX-2: the video stream of an audio-video model, with its audio isolated; flow matching, shifted by size."""
