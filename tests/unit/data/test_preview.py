from tests.support.rows import chat_row
from tests.support.tokenizers import byte_tokenizer
from trainer.config.data import DataConfig, FilesSource
from trainer.data.encode import SampleEncoder
from trainer.data.preview import mark_trained
from trainer.data.rows import parse_row


def test_trained_text_stands_in_brackets() -> None:
    tokenizer = byte_tokenizer()
    config = DataConfig(source=FilesSource(path="unused"))
    (sample,) = SampleEncoder(tokenizer, config).encode(parse_row(chat_row("q", "é")))
    assert mark_trained(sample, tokenizer) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦é<|im_end|>⟧\n"
    )
