"""The `local` engine: the live, sharded model generates; no weights are copied.

Owns prefill of shared prompts, batching and keeping ranks in step. Decoding is transformers'
`generate`, the choice of tokens `choice.py`'s.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from trainer.rl.choice import TokenChoice, draw_noise
from trainer.rl.engine import Completion, Request, Sampling, go_on

# transformers 5.24 renamed `past_key_values` and warns of the old name (older ones know no other):
# delete when 5.24 is the oldest supported.
_CACHE = (
    "cache"
    if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters
    else "past_key_values"
)


class LocalEngine:
    """Generates with the model that is being trained.

    Each prompt is encoded once, however many completions it gets: its key-value cache and its
    last logits are repeated for the completions.

    Args:
        model: From `setup_model`.
        inference: The context in which the model runs without gradients, and after which its
            parameters are shards again (`trainer.model.inference`).
        device: Of this rank.
        pad_id: Fills prompts on the left; masked.
        batch_size: Completions decoded at once (at least those of one prompt).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inference: Callable[[PreTrainedModel], AbstractContextManager[None]],
        device: torch.device,
        *,
        pad_id: int,
        batch_size: int,
    ) -> None:
        self._model = model
        self._inference = inference
        self._device = device
        self._pad_id = pad_id
        self._batch_size = batch_size
        self._version = 0

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        before_batch: Callable[[], None] = go_on,
        is_given_up: Callable[[], bool] = bool,
    ) -> list[tuple[Completion, ...]]:
        """Return the completions of each request, in order.

        Args:
            requests: With equally many seeds each; not empty, as many on every rank.
            sampling: The same on every rank.
            before_batch: Called before each batch that is decoded at once; may raise.
            is_given_up: Asked before each token; once true, this rank's completions end there.

        Collective: forward passes as FSDP and expert dispatch do, equally many on every rank
            however soon its own completions end (`synced_gpus`: transformers does not see that a
            model is sharded by `fully_shard`).
        """
        num_samples = len(requests[0].seeds)
        per_batch = max(1, self._batch_size // num_samples)
        results: list[tuple[Completion, ...]] = []
        with self._inference(self._model):
            for start in range(0, len(requests), per_batch):
                before_batch()
                batch = requests[start : start + per_batch]
                completions = self._decode(batch, num_samples, sampling, is_given_up)
                results += [
                    tuple(completions[i : i + num_samples])
                    for i in range(0, len(completions), num_samples)
                ]
        return results

    def push_weights(self, version: int) -> None:
        """Name the version of the live weights, which need no pushing."""
        self._version = version

    def weights_version(self) -> int:
        """Return the version that was pushed last."""
        return self._version

    def _decode(
        self,
        requests: Sequence[Request],
        num_samples: int,
        sampling: Sampling,
        is_given_up: Callable[[], bool],
    ) -> list[Completion]:
        """Return `num_samples` completions of each request, one after another."""
        seeds = [seed for request in requests for seed in request.seeds]
        # One column more than tokens: on a GPU `generate` may run a step past the end and undo it.
        noise = draw_noise(seeds, sampling.max_new_tokens + 1).to(self._device)
        choice = TokenChoice(sampling, noise, is_given_up)
        prompt_ids, mask = self._pad_left([request.prompt_ids for request in requests])
        cache, logits = self._prefill(prompt_ids, mask)
        cache.batch_repeat_interleave(num_samples)
        input_ids = prompt_ids.repeat_interleave(num_samples, 0)
        first = choice.first(input_ids, logits.repeat_interleave(num_samples, 0))
        input_ids = torch.cat([input_ids, first.unsqueeze(1)], 1)
        if sampling.max_new_tokens > 1:
            mask = mask.repeat_interleave(num_samples, 0)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            input_ids = self._continue(input_ids, mask, cache, choice, sampling)
        generated = input_ids[:, prompt_ids.shape[1] :].tolist()
        log_probs = torch.stack(choice.log_probs, 1).tolist()
        return [
            _completion(ids, row, sampling, self._version)
            for ids, row in zip(generated, log_probs, strict=True)
        ]

    def _prefill(self, prompt_ids: Tensor, mask: Tensor) -> tuple[DynamicCache, Tensor]:
        """Encode each prompt once; return its cache and the logits after its last token."""
        cache = DynamicCache(config=self._model.config)
        outputs = self._model(
            input_ids=prompt_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=True,
            logits_to_keep=1,
            **{_CACHE: cache},
        )
        return cache, outputs.logits[:, -1]

    def _continue(
        self,
        input_ids: Tensor,
        mask: Tensor,
        cache: DynamicCache,
        choice: TokenChoice,
        sampling: Sampling,
    ) -> Tensor:
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens - 1,
            do_sample=False,
            eos_token_id=list(sampling.stop_ids),
            pad_token_id=self._pad_id,
        )
        generated = self._model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=input_ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([choice]),
            synced_gpus=True,
            **{_CACHE: cache},
        )
        assert isinstance(generated, Tensor), "only ids are asked for"
        return generated

    def _pad_left(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64, one row a prompt, prompts flush right."""
        longest = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)


def _completion(
    ids: list[int], log_probs: list[float], sampling: Sampling, version: int
) -> Completion:
    """Cut what was generated after the first stop token."""
    stops = [position for position, token in enumerate(ids) if token in sampling.stop_ids]
    length = stops[0] + 1 if stops else len(ids)
    return Completion(tuple(ids[:length]), tuple(log_probs[:length]), not stops, version)
