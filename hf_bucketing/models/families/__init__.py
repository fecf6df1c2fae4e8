"""Model families, one module for those that are kin: how they are packed, and how their pipelines are trained."""
