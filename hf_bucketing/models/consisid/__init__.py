"""ConsisID: CogVideoX, shown a face."""
