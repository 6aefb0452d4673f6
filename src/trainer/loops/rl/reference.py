"""The model that a run starts from, frozen: what `loss.kl_coef` keeps the policy near.

Owns whether there is one, and its log-probabilities. How far the policy has moved from them is
`trainer.losses.rl`'s.
"""

from torch import Tensor

from trainer.checkpoint import start_model
from trainer.config import RLConfig
from trainer.loops.rl.batches import PolicyBatch
from trainer.model.causal_lm import CausalLM
from trainer.model.inference import inference
from trainer.parallel import build_mesh
from trainer.parallel.world import World


class Reference:
    """The reference model, or none where the loss asks for none.

    Args:
        config: Of the run.
        world: Of this process.
    """

    def __init__(self, config: RLConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._model: CausalLM | None = None

    def build(self) -> None:
        """Build the model, if `loss.kl_coef` is above 0.

        Apart from the constructor, so that it comes after the refusals of a run and before its
        record opens: a second model may not fit.

        Collective: as building the run's own model; all ranks.
        """
        if not self._config.loss.kl_coef:
            return
        mesh = build_mesh(self._config.parallel, self._world.device.type)
        model = start_model(self._config.model, mesh, seed=self._config.seed)
        model.requires_grad_(False)
        self._model = model.eval()

    def log_probs(self, batch: PolicyBatch) -> Tensor | None:
        """Return fp32 `[P, S]` log-probabilities at the sampling temperature, None without a model.

        Collective: a forward pass as in training.
        """
        if self._model is None:
            return None
        with inference(self._model):
            return token_log_probs(self._model, batch, self._config.rollout.temperature)


def token_log_probs(model: CausalLM, batch: PolicyBatch, temperature: float) -> Tensor:
    """Return a model's log-probabilities of a micro-batch's targets, fp32 `[P, S]`."""
    outputs = model(
        batch.packed.input_ids_PS,
        position_ids=batch.packed.position_ids_PS,
        target_ids=batch.packed.target_ids_PS,
        target_rows=batch.packed.target_rows_N,
        temperature=temperature,
    )
    return outputs.log_probs_PS
