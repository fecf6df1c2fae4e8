"""CogView3-Plus."""
