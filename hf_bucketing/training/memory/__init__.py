"""Memory of a run: precision, quantisation, offload, sharding, and the plan of what they need."""
