from .settings import AdapterConfig as AdapterConfig
