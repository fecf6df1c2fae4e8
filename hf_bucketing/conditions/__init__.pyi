from .appended import AppendedFrames as AppendedFrames
from .audio import AudioRule as AudioRule, RowAudio as RowAudio
from .condition import Condition as Condition
from .references import ReferenceRule as ReferenceRule, RowReferences as RowReferences
from .rows import ConditionRules as ConditionRules, RowConditions as RowConditions
from .sizes import SizeRule as SizeRule
