"""Generated media, pipelines of small random weights and published configurations, for the demo and for tests."""
