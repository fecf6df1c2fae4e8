"""LTX-2, 2.3 and 2.5: the video stream of an audio-video model, audio isolated; flow matching, shifted by size."""
