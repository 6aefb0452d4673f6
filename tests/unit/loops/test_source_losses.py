import pytest
import torch

from tests.support.tokenizers import byte_tokenizer
from trainer.clock import Clock, HostCopy
from trainer.data.packing import Document, Pack, Sample, micro_batches
from trainer.data.text.encode import TextEncoder
from trainer.loops.record import source_losses
from trainer.step import StepRecord, StepTotals


def document(text: str, source: int) -> Document:
    ids = TextEncoder(byte_tokenizer()).encode(text).astype("int64")
    return Document.from_sample(Sample(ids, (ids >= 0).astype("float32")), source)


def test_a_sources_weight_is_that_of_its_documents():
    packs = [Pack((document("abc", 0), document("de", 2))), Pack((document("f", 2),))]
    assert StepTotals.of(packs).source_weights == {0: 3.0, 2: 3.0}
    assert StepTotals.of(packs).weight == 6.0


def test_each_position_of_a_batch_names_its_source():
    packs = [Pack((document("abc", 1), document("de", 2)))]
    (batch,) = micro_batches(packs, rank=0, world_size=1, micro_batch_size=1, seq_len=9, pad_id=0)
    assert batch.sources_PS.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0]]
    assert batch.weights_PS[0, -2:].tolist() == [0, 0]


def test_sources_without_tokens_in_a_step_are_left_out():
    totals = StepTotals(6.0, 8, 6, 0, {0: 2.0, 2: 4.0})
    values = HostCopy(torch.tensor([1.0, 0.0, 2.0, 0.0, 5.0, 0.0, 2.0], dtype=torch.float64))
    record = StepRecord(1, 0.1, totals, 8, 6, values, dict, Clock(torch.device("cpu")))
    assert source_losses(record, ("a", "b", "c")) == {
        "loss/a": pytest.approx(2.5),
        "loss/c": pytest.approx(0.5),
    }
