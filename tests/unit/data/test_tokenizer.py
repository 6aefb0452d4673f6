from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trainer.config.data import DataConfig, FilesSource
from trainer.data.tokenizer import build_byte_tokenizer, choose_tokenizer, setup_tokenizer
from trainer.errors import UserError

CONFIG = DataConfig(source=FilesSource(path="unused"))


def with_settings(**settings: object) -> DataConfig:
    return CONFIG.model_copy(update=settings)


@pytest.mark.parametrize("text", ["", " a  b\n\n", "é漢🙂", "\x00\x7f", "a<|im_end|>"])
def test_the_built_in_tokenizer_gives_one_id_a_byte(text: str) -> None:
    tokenizer = build_byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    plain = text.removesuffix("<|im_end|>")
    assert ids[: len(plain.encode())] == list(plain.encode())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 258, 256)


def test_the_built_in_tokenizer_reloads_from_its_folder(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|im_start|>user\n  é<|im_end|>\n"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_a_named_tokenizer_wins_over_the_models_own(tmp_path: Path) -> None:
    for name in ("named", "model"):
        tokenizer = build_byte_tokenizer()
        tokenizer.chat_template = name
        tokenizer.save_pretrained(tmp_path / name)
    model = str(tmp_path / "model")
    named = with_settings(tokenizer=str(tmp_path / "named"))
    assert setup_tokenizer(named, model).chat_template == "named"
    assert setup_tokenizer(CONFIG, model).chat_template == "model"


def test_a_model_folder_without_tokenizer_files_gets_the_built_in_one(tmp_path: Path) -> None:
    assert len(setup_tokenizer(CONFIG, str(tmp_path))) == 259
    assert len(setup_tokenizer(CONFIG, None)) == 259


def test_a_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own")
    config = with_settings(chat_template=str(tmp_path / "own.jinja"))
    assert setup_tokenizer(config, None).chat_template == "own"


def test_a_missing_template_file_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.chat_template='/nowhere\.jinja' cannot be read"):
        setup_tokenizer(with_settings(chat_template="/nowhere.jinja"), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x\n{% for m in messages %}", r"own\.jinja' is no valid Jinja \(line 2: .*endfor"),
        (b"{{ messages | nothing }}", "is no valid Jinja .*nothing"),
        (b"\xe9", "own.jinja' cannot be read .*utf-8"),
    ],
    ids=["open block", "unknown filter", "no UTF-8"],
)
def test_a_template_that_is_no_jinja_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(UserError, match=message):
        setup_tokenizer(with_settings(chat_template=str(tmp_path / "own.jinja")), None)


def test_a_template_may_refuse_other_conversations_than_the_rows(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ 1 // 0 }}")
    setup_tokenizer(with_settings(chat_template=str(tmp_path / "own.jinja")), None)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": "{}"},
        {"tokenizer_config.json": "[]"},
        {"tokenizer.json": "null", "tokenizer_config.json": "{}"},
        {"tokenizer.json": "[]", "tokenizer_config.json": "{}"},
        {"tokenizer.json": '{"added_tokens": [], "model": {}}', "tokenizer_config.json": "{}"},
    ],
    ids=["no tokenizer", "a list", "null", "list", "no model"],
)
def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"data\.tokenizer='.*': no tokenizer could be loaded"):
        setup_tokenizer(with_settings(tokenizer=str(tmp_path)), None)


def test_a_tokenizer_without_padding_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert setup_tokenizer(with_settings(tokenizer=str(tmp_path)), None).pad_token_id == 258


def test_a_name_that_is_nothing_is_not_blamed_on_its_tokenizer(tmp_path) -> None:
    name = str(tmp_path / "no-such")
    message = rf"model\.name='{name}' is neither a local folder nor a hub name .* give an existing"
    with pytest.raises(UserError, match=message):
        choose_tokenizer(None, name)
