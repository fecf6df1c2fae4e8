from .settings import OptimizerConfig as OptimizerConfig
