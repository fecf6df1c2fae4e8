"""Settings of training as frozen dataclasses. They import no torch, so that flags are checked at once."""
