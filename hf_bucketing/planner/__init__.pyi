from .memory import MemoryParts as MemoryParts, MemoryPlan as MemoryPlan, plan_memory as plan_memory
from .settings import PlanConfig as PlanConfig
