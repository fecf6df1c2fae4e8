"""CogVideoX 2B, 5B and 1.5: sincos, rotary or learned positions; text before the video in one attention sequence."""
