import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import SFTConfig, dump_config
from trainer.config.data import DataConfig, FilesSource, MixSource, ReasoningGymSource, ValConfig
from trainer.config.model import DenseArchitecture, ModelConfig
from trainer.config.optim import AdamWConfig, DionConfig, MuonConfig, SGDConfig
from trainer.config.run import CheckpointConfig, WandbConfig
from trainer.config.scheduler import ConstantConfig, CosineConfig, WSDConfig

ARCHITECTURE = DenseArchitecture(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
)

# "None" is how the library writes None; a text field cannot hold that word, nor NUL.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(characters, min_size=1).filter(lambda t: t != "None")
positive = st.floats(min_value=1e-300, max_value=1e300)
scalars = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
params = st.dictionaries(
    texts,
    st.recursive(
        st.one_of(scalars, texts),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
sources = st.one_of(
    st.builds(FilesSource, path=texts, weight=positive),
    st.builds(ReasoningGymSource, task=texts, size=st.integers(1, 9), params=params),
)
optims = st.one_of(
    st.builds(MuonConfig, lr=positive, max_norm=st.none() | positive),
    st.builds(MuonConfig, ns_coefficients=st.just(((1.0, -2.0, 3.0), (0.5, 0.0, -0.0)))),
    st.builds(AdamWConfig, epsilon=positive),
    st.builds(SGDConfig, momentum=st.floats(0, 0.99)),
    st.builds(DionConfig, adjust_lr=st.sampled_from(["rms_norm", None])),
)
configs = st.builds(
    SFTConfig,
    output_dir=texts,
    max_steps=st.integers(7, 2**62),
    deterministic=st.none() | st.booleans(),
    model=st.just(ModelConfig(architecture=ARCHITECTURE, weights="random")),
    optim=optims,
    scheduler=st.sampled_from([ConstantConfig(), CosineConfig(), WSDConfig(decay_steps=3)]),
    ckpt=st.builds(CheckpointConfig, resume=st.sampled_from([None, "latest", 0, 7])),
    wandb=st.builds(WandbConfig, name=st.none() | texts, tags=st.tuples(texts, texts)),
    data=st.builds(
        DataConfig,
        source=sources | st.builds(MixSource, sources=st.tuples(sources, sources)),
    ),
    val=st.builds(ValConfig, source=st.none() | sources),
)


@settings(max_examples=150, deadline=None)
@given(configs)
def test_written_config_reads_back_equal(config):
    assert SFTConfig.model_validate(tomllib.loads(dump_config(config))) == config
