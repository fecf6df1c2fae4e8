"""AuraFlow."""
