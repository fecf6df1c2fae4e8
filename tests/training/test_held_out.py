"""tmp"""
from __future__ import annotations
import json
from pathlib import Path
import pytest
from accelerate.state import AcceleratorState
from tests.training.training_cases import in_process, run

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 4}

@pytest.mark.parametrize("s", [{}, PACK])
def test_it(s, pipeline_dir, prepared_dir, tmp_path):
    out = tmp_path/"o"
    c = in_process(pipeline_dir, prepared_dir, out, validation_split=0.2, validation_loss_steps=2, **s)
    run(c)
    print((out/"logs"/"validation.jsonl").read_text())
    from hf_bucketing.training.loop import Trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    t = Trainer(c)
    print("\n".join(t.describe()), t.transformer.training)
    t.release()
