"""The rates that are measured next to a benchmark's steps are those of its model's sizes."""

from helpers.drill_modules import import_drill_module

from barnraise.planning import cost_model
from barnraise.spec import ModelSpec
from barnraise.swap import hardware_probe

model_probe = import_drill_module("model_probe")


def test_probe_of_one_model_measures_only_its_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(model_probe, "MODEL_RATES_SECONDS", 0.1)
    monkeypatch.setattr(hardware_probe, "RAM_ELEMENTS", 1 << 18)
    monkeypatch.setattr(hardware_probe, "DISK_BYTES", 16 << 20)
    model = ModelSpec(layers=2, width=64, heads=4, context=96, vocabulary=300)
    measure = model_probe.create_model_probe(tmp_path, model)
    for _ in range(2):
        hardware = measure()
        assert hardware.sustained_disk_write == hardware.disk_write
        assert [size for size, _ in hardware.matmul] == [64]
        assert [vocabulary for vocabulary, _ in hardware.logits] == [300]
        assert hardware.attention_contexts == ((96, hardware.attention),)
        assert not hardware.attention_heads
        parts = (
            cost_model.block_forward_seconds,
            cost_model.block_backward_seconds,
            cost_model.head_seconds,
        )
        assert all(0 < part(hardware, model, 2) < 60 for part in parts)
    assert not list(tmp_path.iterdir())
