from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeForCausalLM

from tests.support.meshes import one_rank_mesh
from tests.support.networks import dense_architecture, moe_architecture, packed_batch, random_model
from trainer.config.model import ModelConfig
from trainer.errors import UserError
from trainer.model import TokenOutputs, setup_model
from trainer.model.causal_lm import moe_blocks
from trainer.model.inference import inference
from trainer.model.setup import check_ep


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with one_rank_mesh() as mesh:
        yield mesh


def gradients(model: nn.Module) -> dict[str, Tensor]:
    input_ids, position_ids, target_ids = packed_batch([[5, 11], [16]])
    outputs: TokenOutputs = model(
        input_ids, position_ids=position_ids, target_ids=target_ids, with_entropy=True
    )
    (outputs.load_balancing_P.sum() - outputs.log_probs_PS.sum()).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_outputs_are_log_probs_entropies_and_routing(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(moe_architecture(), logits_chunk_tokens=5), mesh)
    input_ids, position_ids, target_ids = packed_batch([[5, 11], [16]])
    call = {"position_ids": position_ids, "target_ids": target_ids, "temperature": 0.7}
    outputs = model(input_ids, **call, with_entropy=True)
    logits = model(input_ids, position_ids=position_ids, logits=True) / 0.7
    log_probs = logits.log_softmax(-1)
    is_target = target_ids != -100
    chosen = log_probs.gather(2, target_ids.clamp_min(0).unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(outputs.log_probs_PS, chosen * is_target)
    entropy = -(log_probs.exp() * log_probs).sum(-1) * is_target
    torch.testing.assert_close(outputs.entropy_PS, entropy)
    assert outputs.load_balancing_P.shape == (2,)
    assert outputs.expert_counts_LE.sum(1).tolist() == [2 * 32, 2 * 32]
    assert model(input_ids, **call).entropy_PS is None


@pytest.mark.parametrize("asked", [{"logits": True}, {"target_ids": torch.zeros(1, 3).long()}])
def test_targets_and_logits_need_positions(mesh: DeviceMesh, asked: dict[str, object]) -> None:
    model = setup_model(random_model(dense_architecture()), mesh)
    with pytest.raises(TypeError, match="needs input_ids and position_ids: documents of a pack"):
        model(torch.zeros(1, 3).long(), **asked)


def test_a_dense_network_has_no_routing(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(dense_architecture()), mesh)
    input_ids, position_ids, target_ids = packed_batch([[16]])
    outputs = model(input_ids, position_ids=position_ids, target_ids=target_ids)
    assert outputs.load_balancing_P.tolist() == [0.0]
    assert outputs.expert_counts_LE.shape == (0, 0)


def test_layers_without_experts_stay_dense(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(moe_architecture(mlp_only_layers=(0,))), mesh)
    assert len(moe_blocks(model)) == 1
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_names_and_shapes_are_those_of_transformers(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(moe_architecture()), mesh)
    with torch.device("meta"):
        reference = Qwen3MoeForCausalLM(model.config)
    ours = {name: p.shape for name, p in model.named_parameters()}
    assert ours == {name: p.shape for name, p in reference.named_parameters()}


def test_weights_stay_fp32_and_compute_is_bf16(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(moe_architecture(), compute_dtype="bfloat16"), mesh)
    input_ids, position_ids, target_ids = packed_batch([[16]])
    seen: set[torch.dtype] = set()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    outputs = model(input_ids, position_ids=position_ids, target_ids=target_ids)
    outputs.log_probs_PS.sum().backward()
    assert seen == {torch.bfloat16}
    assert outputs.log_probs_PS.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name


def test_recomputation_changes_memory_and_no_gradient(mesh: DeviceMesh) -> None:
    saved_bytes, results = [], []
    for recompute in (False, True):
        config = random_model(moe_architecture(), activation_checkpointing=recompute)
        model = setup_model(config, mesh)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results.append(gradients(model))
        saved_bytes.append(sum(sizes))
    assert saved_bytes[1] < 0.5 * saved_bytes[0]
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


def test_recomputation_replays_tied_routing(mesh: DeviceMesh) -> None:
    model = setup_model(random_model(moe_architecture(), activation_checkpointing=True), mesh)
    with torch.no_grad():
        for block in moe_blocks(model):
            block.gate.weight.to_local().fill_(0.5)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_compiles_and_keeps_the_numbers(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, backend: str, recompute: bool
) -> None:
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_module(self, backend=backend))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    small = moe_architecture(num_hidden_layers=1)
    plain = gradients(setup_model(random_model(small), mesh))
    graphs_before = counters["unique_graphs"]
    switches = {"compile": True, "activation_checkpointing": recompute}
    compiled = gradients(setup_model(random_model(small, **switches), mesh))
    assert counters["unique_graphs"] > graphs_before
    for name, gradient in plain.items():
        # Fused kernels round differently in fp32.
        assert (compiled[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_generation_with_a_cache_follows_the_logits(mesh: DeviceMesh, attention: str) -> None:
    model = setup_model(random_model(moe_architecture()), mesh).eval()
    model.config._attn_implementation = attention
    ids = torch.tensor([[1, 2, 3]])
    generated = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert model.config._attn_implementation == attention
    model.config._attn_implementation = model.computation.attention
    with torch.no_grad():
        for _ in range(6):
            positions = torch.arange(ids.shape[1]).unsqueeze(0)
            logits = model(ids, position_ids=positions, logits=True)
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids)


@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_parameters_are_shards_again_after_inference(
    mesh: DeviceMesh, reshard_after_forward: bool
) -> None:
    config = random_model(moe_architecture())
    model = setup_model(config, mesh, reshard_after_forward=reshard_after_forward)
    with inference(model):
        model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]), logits=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    gradients(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_layers_keep_whole_weights_for_the_backward_only_if_asked(
    mesh: DeviceMesh, reshard_after_forward: bool
) -> None:
    config = random_model(moe_architecture())
    model = setup_model(config, mesh, reshard_after_forward=reshard_after_forward)
    model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]), logits=True)
    for layer in model.model.layers:
        is_sharded = isinstance(layer.self_attn.q_proj.weight, DTensor)
        assert is_sharded == reshard_after_forward


@pytest.mark.parametrize(("num_experts", "ep"), [(6, 4), (4, 8)], ids=["uneven", "more-ranks"])
def test_ep_must_divide_the_experts(num_experts: int, ep: int) -> None:
    with pytest.raises(
        UserError, match=rf"parallel.ep={ep} does not divide num_experts={num_experts}"
    ):
        check_ep(num_experts, ep)


def test_a_dense_network_has_no_ep() -> None:
    check_ep(0, 1)
    with pytest.raises(UserError, match=r"parallel.ep=2 does not divide num_experts=0"):
        check_ep(0, 2)


def test_a_folder_that_is_not_there_is_named(mesh: DeviceMesh, tmp_path: Path) -> None:
    name = str(tmp_path / "none")
    with pytest.raises(UserError, match=rf"model.name='{name}': there is no such folder"):
        setup_model(ModelConfig(name=name), mesh)


def test_a_hub_name_without_network_is_named(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"model.name='nobody/no-such-model' is neither a local"):
        setup_model(ModelConfig(name="nobody/no-such-model"), mesh)


def test_another_kind_of_model_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError, match=r"is a 'gpt2' model: only 'qwen3' and 'qwen3_moe'"):
        setup_model(ModelConfig(name=str(tmp_path)), mesh)
