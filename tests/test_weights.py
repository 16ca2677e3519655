"""Loading and saving checkpoints: logits and greedy continuations against transformers, the filling proof, errors."""

import json
import shutil
from pathlib import Path

import checkpoints
import pytest
import torch
import transformers
from checkpoints import CASES, E5, IDS, NEW_TOKENS, SIZES, case, folder, judge, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from tinymoe.llm import LLM
from tinymoe.model import decoder, weights
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.model.tensor_names import Slot, num_rows, tensor_slots, to_hf
from tinymoe.model.weights import Checkpoint, CheckpointError, load_model, save_checkpoint

MOE_CASE, DENSE_CASE = "qwen3_moe", "llama"


@torch.no_grad()
def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """[T, V] of one sequence, one shot, without a cache."""
    tokens = torch.tensor(ids)
    return model(tokens, torch.arange(len(ids)), CausalAttend(1, len(ids), model.config))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
    model, verdict = load_model(folder(name)), judge(name)
    for prompt, wanted in zip(verdict.prompts, verdict.logits):
        torch.testing.assert_close(logits(model, prompt), wanted, rtol=0, atol=1e-4)
    for prompt, continuation in zip(verdict.prompts, verdict.continuations):
        # Each token is the best after those before it: greedy decoding, all steps in one pass.
        best = logits(model, prompt + continuation)[len(prompt) - 1 : -1].topk(2)
        margin = float((best.values[:, 0] - best.values[:, 1]).min())
        assert margin > 1e-4, f"{name}: the two best tokens differ by {margin}: choose another seed"
        assert best.indices[:, 0].tolist() == continuation
        assert len(continuation) == NEW_TOKENS
    ids = list(verdict.prompts[1])
    for _ in range(NEW_TOKENS):
        ids.append(int(logits(model, ids)[-1].argmax()))
    assert ids == verdict.prompts[1] + verdict.continuations[1]


# ---- where each tensor goes


def fused(theirs: transformers.PreTrainedModel, layer: int) -> dict[str, torch.Tensor]:
    """What our fused parameters of one layer must be, put together by hand from transformers' module."""
    block = theirs.model.layers[layer]
    attention, mlp = block.self_attn, block.mlp
    out = {
        "attention.qkv.weight": torch.cat([getattr(attention, f"{x}_proj").weight for x in "qkv"]),
        "attention.out.weight": attention.o_proj.weight,
        "attn_norm.weight": block.input_layernorm.weight,
        "mlp_norm.weight": block.post_attention_layernorm.weight,
    }
    if hasattr(mlp, "experts"):
        out |= {"mlp.router.weight": mlp.gate.weight, "mlp.experts.gate_up": mlp.experts.gate_up_proj}
        out["mlp.experts.down"] = mlp.experts.down_proj
    if hasattr(getattr(mlp, "gate", None), "e_score_correction_bias"):
        out["mlp.router.selection_bias"] = mlp.gate.e_score_correction_bias
    if hasattr(mlp, "shared_experts"):
        shared = mlp.shared_experts
        out["mlp.shared.gate_up.weight"] = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["dots1-groups", "mixtral", "qwen3_moe-all-fused"])
def test_every_dtype_loads_the_numbers_that_transformers_loads(name, dtype):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=dtype)
    state = load_model(folder(name), dtype=dtype).state_dict()
    assert torch.equal(state["embed.weight"], theirs.model.embed_tokens.weight)
    assert torch.equal(state["lm_head.weight"], theirs.lm_head.weight)
    for layer in range(len(theirs.model.layers)):
        for part, wanted in fused(theirs, layer).items():
            got = state[f"layers.{layer}.{part}"]
            kept = "float32" if part.endswith("selection_bias") else dtype
            assert got.dtype == wanted.dtype == getattr(torch, kept), part
            assert torch.equal(got, wanted), part


def test_half_precision_is_as_near_to_float32_as_that_of_transformers():
    verdict = judge(DENSE_CASE)
    for dtype in ("bfloat16", "float16"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(DENSE_CASE), dtype=dtype).eval()
        ours = load_model(folder(DENSE_CASE), dtype=dtype)
        for prompt, exact in zip(verdict.prompts, verdict.logits):
            with torch.no_grad():
                their_error = (theirs(torch.tensor([prompt])).logits[0].float() - exact).abs().mean()
            got = logits(ours, prompt)
            assert got.dtype == torch.float32
            assert (got - exact).abs().mean() <= 1.5 * their_error


def test_auto_dtype_is_the_checkpoints(tmp_path):
    assert load_model(folder(DENSE_CASE)).embed.weight.dtype == torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(DENSE_CASE), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path).embed.weight.dtype == torch.bfloat16
    edit_config(tmp_path, dtype=None)  # then the tensors tell
    assert load_model(tmp_path).embed.weight.dtype == torch.bfloat16
    edit_config(tmp_path, torch_dtype="float16")  # the key of transformers 4
    assert load_model(tmp_path).embed.weight.dtype == torch.float16


def test_sharded_checkpoint_is_the_same_model(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(MOE_CASE))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    one, many = load_model(folder(MOE_CASE)).state_dict(), load_model(tmp_path).state_dict()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_every_row_of_every_parameter_has_one_tensor(name):
    with Checkpoint(folder(name)) as checkpoint:
        config, slots = checkpoint.model_config, checkpoint.slots()
        stored = sum(torch.Size(checkpoint.shape(n)).numel() for n in checkpoint.names)
    with torch.device("meta"):
        parameters = dict(Decoder(config).named_parameters())
    assert tiles(slots, parameters)
    assert stored == sum(p.numel() for p in parameters.values()) == config.num_parameters()


def tiles(slots: dict[str, Slot], parameters: dict[str, torch.Tensor]) -> bool:
    """Whether the slots lie side by side in every parameter, from its first row to its last."""
    for name, parameter in parameters.items():
        mine = sorted((s.first_row, s.num_rows, s.shape) for s in slots.values() if s.parameter == name)
        end = 0
        for first, rows, shape in mine:
            if first != end or torch.Size(shape).numel() != rows * (parameter.numel() // num_rows(parameter)):
                return False
            end = first + rows
        if end != num_rows(parameter):
            return False
    return {s.parameter for s in slots.values()} == set(parameters)


MOES = st.builds(
    MoEConfig,
    num_experts=st.integers(2, 6),
    top_k=st.integers(1, 2),
    intermediate_size=st.integers(1, 9),
    selection_bias=st.booleans(),
    shared_intermediate_size=st.integers(0, 5),
)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(MOES | st.integers(1, 9), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (3, 1)]),
    sizes=st.tuples(st.integers(2, 9), st.integers(1, 9), st.sampled_from([2, 4, 6])),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    qk_norm=st.sampled_from([None, "head", "full"]),
)
def test_slots_tile_any_model(layers, heads, sizes, flags, qk_norm):
    config = ModelConfig(
        model_type="any",
        vocab_size=sizes[0],
        hidden_size=sizes[1],
        head_dim=sizes[2],
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        layers=tuple(
            LayerConfig(moe=x) if isinstance(x, MoEConfig) else LayerConfig(intermediate_size=x)
            for x in layers
        ),
        max_position_embeddings=16,
        tie_word_embeddings=flags[0],
        qkv_bias=flags[1],
        attention_output_bias=flags[2],
        mlp_bias=flags[3],
        qk_norm=qk_norm,
    )
    with torch.device("meta"):
        assert tiles(tensor_slots(config), dict(Decoder(config).named_parameters()))


def test_proof_of_filling_catches_a_gap_and_an_overlap(monkeypatch):
    real = weights.tensor_slots

    def without_bias(config, names):
        return {n: s for n, s in real(config, names).items() if not n.endswith("1.self_attn.k_norm.weight")}

    monkeypatch.setattr(weights, "tensor_slots", without_bias)
    monkeypatch.setattr(weights, "_HARMLESS", weights.re.compile("k_norm"))
    with pytest.raises(
        CheckpointError, match=r"16 of 16 rows of parameter layers\.1\.attention\.k_norm\.weight were"
    ):
        load_model(folder("qwen3"))

    def twice(config, names):
        slots = real(config, names)
        name = "model.layers.0.self_attn.k_proj.weight"
        return {**slots, name: slots[name]._replace(first_row=1)}

    monkeypatch.setattr(weights, "tensor_slots", twice)
    with pytest.raises(
        CheckpointError, match=r"k_proj\.weight would fill rows of layers\.0\.attention\.qkv\.weight a s"
    ):
        load_model(folder("qwen3"))


def test_loading_leaves_nothing_on_meta_and_opens_no_gradient_by_itself():
    model = load_model(folder("dots1-groups"))
    assert not model.training
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        f"layers.{i}.mlp.router.selection_bias" for i in (1, 2)
    ]


# ---- tied embeddings and harmless extras


@pytest.fixture
def copy(tmp_path):
    """Copy a case to where it may be spoilt, with its tensors changed by `change`."""

    def make(name: str, change=None) -> Path:
        shutil.copytree(folder(name), tmp_path / "copy")
        if change is not None:
            tensors = load_file(tmp_path / "copy" / "model.safetensors")
            change(tensors)
            save_file(tensors, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
        return tmp_path / "copy"

    return make


def edit_config(path: Path, **options) -> None:
    """Change options of a config.json; None takes one out."""
    config = json.loads((path / "config.json").read_text())
    config = {k: v for k, v in {**config, **options}.items() if k not in options or v is not None}
    (path / "config.json").write_text(json.dumps(config))


HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def test_tied_model_may_bring_an_equal_head_or_the_head_alone(copy):
    wanted = judge("qwen3").logits[2]
    path = copy("qwen3", lambda t: t.update({HEAD: t[EMBED].clone()}))
    assert torch.allclose(logits(load_model(path), judge("qwen3").prompts[2]), wanted, rtol=0, atol=1e-4)
    shutil.rmtree(path)
    path = copy("qwen3", lambda t: t.update({HEAD: t.pop(EMBED)}))
    assert torch.allclose(logits(load_model(path), judge("qwen3").prompts[2]), wanted, rtol=0, atol=1e-4)
    assert load_model(path, dtype="float32").lm_head is None


def test_tied_model_with_another_head_is_refused(copy):
    path = copy("qwen3", lambda t: t.update({HEAD: t[EMBED] + 1e-3}))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs .* set tie_word_embeddings to false in config"
    ):
        load_model(path)
    edit_config(path, tie_word_embeddings=False)
    assert load_model(path).lm_head is not None


def test_rotary_buffers_of_old_exporters_are_passed_over(copy):
    path = copy(
        DENSE_CASE, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    )
    assert torch.equal(load_model(path).embed.weight, load_model(folder(DENSE_CASE)).embed.weight)


# ---- errors: each names the thing and says what to do


def fails(path: Path, *parts: str, **options) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_missing_extra_and_misshapen_tensors(copy):
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    path = copy(MOE_CASE, lambda t: t.pop(gone))
    fails(
        path, "1 of 74 tensors are missing", gone, "config.json and the weights must come from the same model"
    )
    shutil.rmtree(path)
    path = copy(MOE_CASE, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    fails(
        path,
        "1 tensors of",
        "have no place in a qwen3_moe model",
        "model.layers.0.self_attn.q_proj.bias",
        "Remove",
    )
    shutil.rmtree(path)
    path = copy(MOE_CASE, lambda t: t.update({gone: torch.ones(24, 47)}))
    fails(path, f"tensor {gone} has shape [24, 47], but config.json asks for [24, 48]")


def test_many_missing_tensors_are_counted_not_listed(copy):
    path = copy(MOE_CASE)
    edit_config(path, num_hidden_layers=5)
    fails(path, "tensors are missing", "and 43 more")


def test_shards(copy, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(MOE_CASE))
    path = tmp_path / "sharded"
    model.save_pretrained(path, max_shard_size="20KB")
    index = path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    shard = "model-00002-of-00005.safetensors" if len(list(path.glob("model-*"))) == 5 else sorted(
        f.name for f in path.glob("model-*.safetensors")
    )[1]  # fmt: skip
    stolen = next(name for name, file in whole["weight_map"].items() if file != shard)

    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], stolen: shard}}))
    fails(path, f"model.safetensors.index.json promises {stolen} in {shard}, which lacks them")
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], stolen: "other.safetensors"}}))
    fails(path, "shard other.safetensors is missing from", "expects 1 tensors in it", stolen, "copy the file")
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], stolen: "../copy/model.safetensors"}}))
    copy(MOE_CASE)
    fails(path, "shard ../copy/model.safetensors is missing from")
    index.write_text(json.dumps({}))
    fails(path, "has no weight_map")
    index.write_text("{")
    fails(path, "model.safetensors.index.json cannot be read as JSON")
    index.write_text(json.dumps(whole))
    load_model(path)
    (path / shard).unlink()
    fails(path, f"shard {shard} is missing from {path}", "copy the file from the source")
    shutil.copy(next(path.glob("model-00001*")), path / shard)
    index.write_text(
        json.dumps(
            {"weight_map": {k: v for k, v in whole["weight_map"].items() if v != shard} | {"x": shard}}
        )
    )
    fails(path, "is in another shard as well: remove one of the two files")
    index.unlink()
    fails(
        path,
        "has neither model.safetensors nor model.safetensors.index.json",
        "but no index to say what is in them",
    )


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file(copy, keep):
    path = copy(DENSE_CASE)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:keep])
    fails(path, "model.safetensors is truncated or not a safetensors file", "copy it from the source again")


def test_corrupt_file(copy):
    path = copy(DENSE_CASE)
    (path / "model.safetensors").write_bytes(b"PK\x03\x04" + b"\0" * 4000)
    fails(path, "model.safetensors is truncated or not a safetensors file")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_unread(copy, file):
    path = copy(DENSE_CASE)
    (path / "model.safetensors").rename(path / file)
    fails(path, f"has only pickle weights ({file})", "unpickling can run code", "save_pretrained(new_folder)")


def test_folder_without_weights(copy):
    path = copy(DENSE_CASE)
    (path / "model.safetensors").unlink()
    fails(path, "has neither model.safetensors nor model.safetensors.index.json: add one")


def test_not_a_folder_and_no_config(tmp_path):
    fails(tmp_path / "nothing", "nothing is not a folder: give a local folder in Hugging Face format")
    fails(tmp_path, f"{tmp_path} has no config.json")
    (tmp_path / "config.json").write_text("[1]")
    fails(tmp_path, "config.json must hold a JSON object, got list")
    (tmp_path / "config.json").write_text('{"model_type":')
    fails(tmp_path, "config.json cannot be read as JSON")


def test_config_errors_name_the_file_and_keep_their_cause(copy):
    path = copy(DENSE_CASE)
    edit_config(path, model_type="gpt2")
    fails(path, f"{path / 'config.json'}: model_type 'gpt2' is not known; known: dots1, llama, mistral")
    edit_config(path, model_type="llama", quantization_config={"quant_method": "fp8"})
    fails(path, "config.json: quantised checkpoint not supported (quantization_config, method 'fp8')")


def test_quantised_tensors_without_a_quantisation_config(copy):
    name = "model.layers.0.self_attn.q_proj.weight"
    path = copy(DENSE_CASE, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    fails(path, f"tensor {name} is stored as F8_E4M3: quantised checkpoint not supported")
    shutil.rmtree(path)
    path = copy(DENSE_CASE, lambda t: t.update({name: t[name].to(torch.int8)}))
    fails(path, f"tensor {name} is stored as I8: quantised checkpoint not supported")


def test_dtype_errors(copy):
    fails(
        folder(DENSE_CASE),
        "dtype must be 'auto', 'float32' or 'bfloat16' or 'float16', got 'int8'",
        dtype="int8",
    )
    path = copy(DENSE_CASE)
    edit_config(path, dtype="float64")
    fails(path, "the checkpoint's dtype 'float64' is not supported: choose dtype='float32' or")
    load_model(path, dtype="float32")


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_weights_that_the_machine_cannot_hold_are_refused_before_they_are_made(monkeypatch, load_format):
    path = folder(DENSE_CASE)
    count = load_model(path, "float32").config.num_parameters()
    monkeypatch.setattr(decoder, "memory_bytes", lambda device: 4 * count - 1)
    monkeypatch.setattr(torch, "empty", None)  # nothing may be allocated
    message = rf"the weights do not fit: {count} parameters x 4 bytes \(torch.float32\) = 0\.0 GiB, and cpu has 0\.0 GiB: take"
    with pytest.raises(ConfigError, match=message):
        load_model(path, "float32", load_format=load_format)


@pytest.mark.parametrize("room", [0, None])
def test_weights_that_just_fit_are_loaded(monkeypatch, room):
    config = load_model(folder(DENSE_CASE), "float32").config
    room = room if room is None else 2 * config.num_parameters()
    monkeypatch.setattr(decoder, "memory_bytes", lambda device: room)
    assert load_model(folder(DENSE_CASE), "bfloat16").norm.weight.dtype == torch.bfloat16


def test_a_model_that_no_machine_holds_is_refused(copy):
    path = copy(DENSE_CASE)
    edit_config(path, vocab_size=10**18)
    with pytest.raises(ConfigError, match=r"the weights do not fit: .* and cpu has"):
        load_model(path, "float32", load_format="dummy")


def test_auto_widens_on_a_cpu_only_what_is_known(copy):
    path = copy(DENSE_CASE)
    edit_config(path, dtype="bfloat16")
    assert load_model(path, widen=True).norm.weight.dtype == torch.float32
    assert load_model(path).norm.weight.dtype == torch.bfloat16
    assert load_model(path, "float16", widen=True).norm.weight.dtype == torch.float16
    edit_config(path, dtype="float7")
    fails(path, "the checkpoint's dtype 'float7' is not supported: choose dtype='float32' or", widen=True)
    with pytest.raises(CheckpointError, match="dtype 'float7' is not supported"):
        LLM(path, device="cpu", skip_tokenizer_init=True)


def test_files_are_closed_when_a_later_one_cannot_be_opened(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(MOE_CASE))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("model-*.safetensors"))[-1].write_bytes(b"")
    fails(tmp_path, "is truncated or not a safetensors file")


# ---- saving


def sliding(window: int | None, **options) -> ModelConfig:
    return random_model("qwen3", LayerConfig(intermediate_size=20, sliding_window=window), LayerConfig(intermediate_size=20), **options)  # fmt: skip


def random_model(model_type: str, *layers: LayerConfig, **options) -> ModelConfig:
    base = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
    }
    base |= {"max_position_embeddings": 64, "qk_norm": "head"}
    return ModelConfig(model_type=model_type, layers=layers, **{**base, **options})


EXPERTS = LayerConfig(moe=MoEConfig(num_experts=5, top_k=2, intermediate_size=12))
WRITTEN = {
    "qwen3": sliding(None, tie_word_embeddings=True),
    "qwen3-window-bias": sliding(4, qkv_bias=True, attention_output_bias=True),
    "qwen3-yarn": sliding(
        None, rope=RopeConfig(theta=500.0, kind="yarn", factor=2.0, original_max_position_embeddings=16)
    ),
    "qwen3_moe": random_model("qwen3_moe", EXPERTS, LayerConfig(intermediate_size=20), EXPERTS),
    "qwen3_moe-tied": random_model("qwen3_moe", EXPERTS, EXPERTS, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_transformers_loads_what_we_save_and_computes_the_same(name, tmp_path):
    model = Decoder(WRITTEN[name]).eval()
    checkpoints.randomise(model, seed=3)
    save_checkpoint(tmp_path / "new" / "folder", model, extra={"bos_token_id": 5, "eos_token_id": [6, 7]})
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "folder", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert theirs.dtype == torch.float32
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (5, [6, 7])
    for prompt in checkpoints.prompts(97):
        with torch.no_grad():
            wanted = theirs.eval()(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits(model, prompt), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_moe-sparse-window", "qwen3-rope-yarn-betas"])
def test_load_and_save_returns_the_tensors_of_the_source(name, tmp_path):
    save_checkpoint(tmp_path, load_model(folder(name)))
    source, saved = (load_file(path / "model.safetensors") for path in (folder(name), tmp_path))
    assert source.keys() == saved.keys()
    assert all(torch.equal(source[n], saved[n]) for n in source)
    assert load_model(tmp_path).config == load_model(folder(name)).config


def test_saving_in_bfloat16(tmp_path):
    model = load_model(folder(MOE_CASE))
    save_checkpoint(tmp_path, model, dtype="bfloat16")
    source, saved = (load_file(path / "model.safetensors") for path in (folder(MOE_CASE), tmp_path))
    assert all(torch.equal(source[n].bfloat16(), saved[n]) for n in source)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path).embed.weight.dtype == torch.bfloat16
    assert model.embed.weight.dtype == torch.float32


def test_saving_a_family_without_a_writer_is_refused_before_a_file_exists(tmp_path):
    with pytest.raises(ConfigError, match="only qwen3 and qwen3_moe models can be saved, got 'llama'"):
        save_checkpoint(tmp_path / "new", load_model(folder(DENSE_CASE)))
    assert not (tmp_path / "new").exists()


def test_to_hf_gives_views(tmp_path):
    model = load_model(folder(MOE_CASE))
    for name, tensor in to_hf(model.config, model.state_dict()).items():
        assert tensor.untyped_storage().data_ptr() in {
            p.untyped_storage().data_ptr() for p in model.parameters()
        }, name


def test_a_checkpoint_of_the_test_is_really_random(tmp_path):
    """Norms and biases left at ones and zeros would hide mistakes."""
    path = write(case("qwen3_moe", **E5, attention_bias=True), tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert all(len(t.unique()) > 3 for t in tensors.values())
    assert len(tensors) > 60
    assert IDS["eos_token_id"] is None
    assert SIZES["vocab_size"] == tensors[HEAD].shape[0]
