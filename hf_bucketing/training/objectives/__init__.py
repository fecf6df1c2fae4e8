"""What a model is trained to predict, and how its predictions are scored."""

from .base import Noised, Objective, sample_generator
from .denoising import Denoising
from .flow import FlowMatching

__all__ = ["Denoising", "FlowMatching", "Noised", "Objective", "sample_generator"]
