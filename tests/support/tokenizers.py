"""Small tokenizers and chat templates with the traits that masks must survive."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.data import build_byte_tokenizer

PLAIN_CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

DROPS_EARLIER_REASONING = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' and loop.last %}\
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}\
{{- m.content + '<|im_end|>\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

PROMPTS_FOR_REASONING_IT_DROPS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""

MARKS_ALL_BUT_THE_END = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\
{%- else %}{{ m.content }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

REFUSES_SYSTEM_TURNS = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{%- endif %}\
{{- 'x' }}"""


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the built-in tokenizer, with another chat template if one is given."""
    tokenizer = build_byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(
    merges: list[tuple[str, str]], trim_offsets: bool, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with the given merges (spaces spelled as a G with a dot).

    With `bos`, the tokenizer itself puts that token before every text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *(first + second for first, second in merges)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = PLAIN_CHATML
    return tokenizer
