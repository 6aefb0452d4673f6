from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.texts import pretrain_data
from tests.support.tokenizers import byte_tokenizer
from trainer.data.packing import Document, Pack, Sample
from trainer.data.text.encode import TextEncoder
from trainer.data.text.token_bytes import token_bytes, trained_bytes

TEXT = "Hello wörld, 日本語 and 🦊: def f(x):\n\treturn x\n" * 3


def trained_tokenizer(pre_tokenizer, decoder) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(byte_fallback=True))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_bytes_of_tokens_add_up_to_those_of_the_text():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for tokenizer in (byte_tokenizer(), trained_tokenizer(byte_level, decoders.ByteLevel())):
        sizes = token_bytes(tokenizer)
        assert sizes[TextEncoder(tokenizer).encode(TEXT)].sum() == len(TEXT.encode())


def test_a_mark_of_a_words_start_counts_as_its_space():
    tokenizer = trained_tokenizer(pre_tokenizers.Metaspace(), decoders.Metaspace())
    sizes = token_bytes(tokenizer)
    # The pre-tokenizer puts one space before the text.
    assert sizes[TextEncoder(tokenizer).encode(TEXT)].sum() == len(TEXT.encode()) + 1


def test_only_targets_count():
    sizes = token_bytes(byte_tokenizer())
    ids = TextEncoder(byte_tokenizer()).encode("abc").astype("int64")
    document = Document.from_sample(Sample(ids, (ids > 0).astype("float32")))
    # "a" is the first token, which nothing predicts; the end token stands for no text.
    assert trained_bytes([Pack((document,))], sizes) == 2


def test_validation_bytes_are_those_of_the_text_less_each_first_byte(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("wörld!")
    source = {"type": "files", "path": str(tmp_path)}
    data = pretrain_data(source, val={"source": source})
    assert data.validation_bytes == 4 + 6
    assert sum(pack.num_trained for pack in data.validation_packs) == 4 + 6 + 2
