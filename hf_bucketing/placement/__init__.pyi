from .settings import MemoryConfig as MemoryConfig
