"""AnyFlow: Wan, distilled to steps between any two noise levels."""
