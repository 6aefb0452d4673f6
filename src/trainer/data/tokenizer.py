"""Which tokenizer a run uses, and the built-in byte-level one.

Owns the choice (named, the model's, built-in) and what every tokenizer must have. How text becomes
masked tokens is in `encode.py`.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.config.data import DataConfig
from trainer.data.chat import check_template
from trainer.errors import UserError
from trainer.origin import companions

_CHATML = Path(__file__).with_name("chatml.jinja")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes (id = byte) and three ChatML tokens (ids 256 to 258).

    Every text has exactly one encoding, one id a byte, so nothing is learnt and nothing downloaded.
    `<|im_end|>` ends turns and texts; `<|endoftext|>` pads.
    """
    backend = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHATML.read_text(encoding="utf-8")
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Map each character that stands for a byte in byte-level BPE to that byte.

    Printable bytes stand for themselves; the characters above 255 stand, in order, for the others.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(c) for c in characters if ord(c) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(characters, printable + others, strict=True))


def setup_tokenizer(config: DataConfig, model_name: str | None) -> PreTrainedTokenizerFast:
    """Return the run's tokenizer with `data.chat_template` in place of its own template.

    Args:
        config: the `data` section.
        model_name: `model.name`.

    Raises:
        UserError: as `choose_tokenizer`, or the template cannot be read or is no Jinja.
    """
    tokenizer = choose_tokenizer(config.tokenizer, model_name)
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    return tokenizer


def choose_tokenizer(
    name: str | None, model_name: str | None, *, field: str = "data.tokenizer"
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that is named, else the model's, else the built-in one.

    A padding token is added where there is none (the end-of-text token: padding is never trained).

    Args:
        name: a folder (in Hugging Face layout, or a checkpoint of a run) or hub name.
        model_name: `model.name`, likewise. A folder without tokenizer files counts as having none.
        field: what `name` is called where the user gives it.

    Raises:
        UserError: the tokenizer cannot be loaded, or is not a fast one.
    """
    if name is not None:
        tokenizer = _load(name, field)
    elif model_name is not None and not _is_folder_without_tokenizer(companions(model_name)):
        tokenizer = _load(model_name, "model.name")
    else:
        tokenizer = build_byte_tokenizer()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _is_folder_without_tokenizer(name: str) -> bool:
    folder = Path(name)
    return folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES)


def _load(name: str, field: str) -> PreTrainedTokenizerFast:
    folder = companions(name, field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        # The tokenizers library raises a plain Exception; the others are what damaged files cause.
        causes = (OSError, ValueError, KeyError, TypeError, AttributeError)
        if type(error) is not Exception and not isinstance(error, causes):
            raise
        if not Path(folder).is_dir():
            raise UserError(
                f"{field}={name!r} is neither a local folder nor a hub name whose tokenizer can be "
                f"fetched now ({_first_line(error)}): give an existing folder, or check name and "
                "network"
            ) from error
        raise UserError(
            f"{field}={name!r}: no tokenizer could be loaded ({_first_line(error)}): give a folder "
            "or hub name that has one, or set data.tokenizer"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{field}={name!r}: {type(tokenizer).__name__} has no fast backend, which exact masks "
            "need: convert it to a tokenizer.json"
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _read_template(path: str) -> str:
    try:
        template = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"data.chat_template={path!r} cannot be read ({reason}): give the path of a Jinja file"
        ) from error
    check_template(template, f"data.chat_template={path!r}")
    return template
