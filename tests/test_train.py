"""The trainer: optimizer against independent judges, learning, resuming bit for bit, export as transformers reads it."""

import argparse
import json
import lzma
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
import transformers
from functorch.compile import default_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig
from tinymoe.experts.balance import MODES, BalanceConfig, max_violation
from tinymoe.model.attention import CausalAttend
from tinymoe.model.weights import load_model
from tinymoe.train import cli, evaluate
from tinymoe.train.corpus import Corpus, Sampler
from tinymoe.train.loop import TrainConfig, Trainer, trained_model
from tinymoe.train.objective import Objective, acceptance, distillation
from tinymoe.train.optimizer import Optimizer, OptimizerConfig, matrices_of, orthogonalize

CPU = torch.device("cpu")
MOE = MoEConfig(num_experts=8, top_k=2, intermediate_size=16)
SHAPE = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    layers=(LayerConfig(moe=MOE),) * 2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    qk_norm="head",
)
DENSE = replace(SHAPE, model_type="qwen3", layers=(LayerConfig(intermediate_size=32),) * 2)


def corpus():
    """Two learnable languages: counting up by 1 in the lower half of the vocabulary, by 3 in the upper."""
    n = np.arange(4000)
    return Corpus.build(
        {"english": (n % 32).astype(np.uint16), "german": (32 + 3 * n % 31).astype(np.uint16)}
    )


def trainer(steps=20, config=SHAPE, teacher=None, mode="aux", lr=1e-2, name="muon", **more):
    train = TrainConfig(
        steps=steps,
        batch=4,
        length=16,
        seed=3,
        warmup=2,
        dtype="float32",
        log_steps=5,
        optimizer=OptimizerConfig(name=name, lr=lr),
        balance=BalanceConfig(mode=mode, aux_weight=more.pop("aux_weight", 0.01)),
        **more,
    )
    sampler = Sampler(corpus(), {"english": 0.5, "german": 0.5}, 4, 16, 3)
    return Trainer(config, train, sampler, CPU, teacher)


def nothing(_):
    pass


@pytest.mark.parametrize("mode", MODES)
def test_loss_falls(mode):
    run = trainer(steps=25, mode=mode, lr=3e-2)
    run.run(nothing)
    losses = [entry["loss"] for entry in run.history]
    assert losses[0] > 2.0
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(("name", "config"), [("adamw", SHAPE), ("muon", DENSE)])
def test_loss_falls_for_adamw_and_dense(name, config):
    run = trainer(steps=25, name=name, config=config, lr=3e-2)
    run.run(nothing)
    assert run.history[-1]["loss"] < 0.3 * run.history[0]["loss"]


def test_balance_loss_lowers_max_violation():
    def violation(mode):
        run = trainer(steps=30, mode=mode, aux_weight=0.1)
        totals = [run.train_step()[3] for _ in range(30)]
        return max_violation(torch.stack(totals[-10:]).sum(0)).mean().item()

    assert violation("none") > 1.5 * violation("aux")


@pytest.mark.parametrize("mode", ["aux-z", "bias"])
def test_resumed_run_equals_uninterrupted(tmp_path, mode):
    whole = trainer(steps=16, mode=mode)
    whole.run(nothing)
    first = trainer(steps=16, mode=mode)

    while first.step < 9:
        first.train_step()
        first.progress = first.step / 16
    first.save_state(tmp_path)
    second = trainer(steps=16, mode=mode)
    second.load_state(tmp_path)
    assert second.step == 9
    second.run(lambda run: run.save_state(tmp_path))
    for (name, a), (_, b) in zip(whole.model.named_parameters(), second.model.named_parameters()):
        assert torch.equal(a, b), name
    assert len(list(tmp_path.glob("state-*.safetensors"))) == 1
    other = trainer(steps=16, mode=mode)
    other.config = replace(other.config, seed=4)
    with pytest.raises(ConfigError, match="was trained with seed 3, not 4"):
        other.load_state(tmp_path)


class Bigram(torch.nn.Module):
    """The least that an objective can train: the next token depends on this one alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 64)

    def forward(self, ids, positions, attend, sink=None):
        if sink is not None:
            sink.route(0, self.table(ids), ids[:, None], ids[:, None])
        return self.table(ids)


# torch's own: loading its compiler uses what it deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("mode", ["none", "aux-z"])
@pytest.mark.parametrize("distil", [False, True])
def test_compiled_losses_keep_their_gradient(distil, mode):
    """Whatever the compiler simplifies (a sum with zero, for one), the loss can be differentiated and is the same.

    Inductor's own decompositions and graph passes, without its code generation: no C++ compiler needed.
    """

    def partition(joint, inputs, **more):
        joint_graph_passes(joint)
        return default_partition(joint, inputs, **more)

    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=partition, decompositions=select_decomp_table
    )
    torch.manual_seed(0)
    model, teacher = Bigram(), Bigram() if distil else None
    objective = Objective(model, 2, 8, BalanceConfig(mode=mode), teacher, CPU)
    tokens, share = torch.randint(0, 64, (2, 9)), torch.tensor(0.25)
    grads, totals = [], []
    for forward in (objective, torch.compile(objective, backend=backend, dynamic=False)):
        losses = forward(tokens, share)
        losses.total.backward()
        totals.append(losses.total.item())
        grads.append(model.table.weight.grad)
        model.table.weight.grad = None
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
    torch.testing.assert_close(grads[0], grads[1])


def test_minutes_end_the_run_with_the_rate_at_zero():
    run = trainer(steps=None, minutes=0.02)
    saves = []
    run.run(lambda t: saves.append(t.step))
    assert run.progress == 1.0
    assert run.step > 1
    assert saves[-1] == run.step
    assert run.config.lr_scale(run.step, run.progress) == 0.0


def test_stop_saves():
    run = trainer(steps=1000)
    run.forward = lambda *a: setattr(run, "stop", run.step >= 3) or run.objective(*a)
    saves = []
    run.run(lambda t: saves.append(t.step))
    assert saves == [4]


def test_nan_loss_stops_with_a_reason():
    run = trainer(steps=10)
    run.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="loss is nan at step 5; the last save is intact"):
        run.run(nothing)


def test_schedule():
    config = TrainConfig(steps=100, warmup=9, decay=0.5)
    assert config.lr_scale(0, 0.0) == pytest.approx(0.1)
    assert config.lr_scale(50, 0.5) == 1.0
    assert config.lr_scale(75, 0.75) == pytest.approx(0.5)
    assert config.lr_scale(99, 1.0) == 0.0
    with pytest.raises(ConfigError, match="give steps, minutes, or both"):
        TrainConfig()


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 8, 5), (2, 5, 8)])
def test_orthogonalize_against_svd(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    ours = orthogonalize(x).double()
    values = torch.linalg.svdvals(ours)
    assert ((values > 0.6) & (values < 1.3)).all()
    # Same singular vectors: projected on them it is diagonal.
    core = u.transpose(1, 2) @ ours @ v.transpose(1, 2)
    off = core - torch.diag_embed(torch.diagonal(core, dim1=1, dim2=2))
    assert off.abs().max() < 1e-3


def test_fused_parameters_are_taken_apart():
    model = trained_model(SHAPE, TrainConfig(steps=1, dtype="float32"), CPU)
    shapes = {}
    for name, parameter in model.named_parameters():
        if name.startswith("layers.0") and parameter.dim() > 1 and "router" not in name:
            parts = matrices_of(name, parameter.detach(), (2, 1, 16))
            shapes[name] = [tuple(p.shape) for p in parts]
            assert sum(p.numel() for p in parts) == parameter.numel()
            parts[-1].zero_()  # a view: writing to it reaches the parameter
            assert (parameter == 0).sum() == parts[-1].numel()
    assert shapes["layers.0.attention.qkv.weight"] == [(1, 32, 32), (1, 16, 32), (1, 16, 32)]
    assert shapes["layers.0.mlp.experts.gate_up"] == [(16, 16, 32)]
    assert shapes["layers.0.mlp.experts.down"] == [(8, 32, 16)]


def test_adamw_is_torchs():
    ours, theirs = (torch.nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(name="adamw", lr=1e-2, clip=1e9, eps=1e-8)
    mine = Optimizer(ours.named_parameters(), (1, 1, 1), config)
    groups = [
        {"params": [theirs.weight], "weight_decay": 0.1},
        {"params": [theirs.bias], "weight_decay": 0.0},
    ]
    judge = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=1e-8)
    for step in range(5):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for layer in (ours, theirs):
            layer.zero_grad()
            layer(x).square().sum().backward()
        mine.step(1.0)
        judge.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.bias, theirs.bias, atol=1e-6, rtol=1e-5)


def test_clipping_and_missing_gradients():
    layer = torch.nn.Linear(5, 3)
    optimizer = Optimizer(layer.named_parameters(), (1, 1, 1), OptimizerConfig(name="adamw", clip=0.5))
    with pytest.raises(RuntimeError, match=r"no gradient for \['weight', 'bias'\]"):
        optimizer.step(1.0)
    layer(torch.ones(1, 5)).sum().mul(100).backward()
    want = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]).norm().item()
    assert optimizer.step(0.0).item() == pytest.approx(want, rel=1e-5)
    first = torch.cat([optimizer.momentum[n].flatten() for n in ("weight", "bias")]).norm().item()
    assert first == pytest.approx(0.1 * 0.5, rel=1e-4)


def test_bfloat16_parameters_have_a_float32_master():
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = Optimizer(
        layer.named_parameters(), (1, 1, 1), OptimizerConfig(name="adamw", lr=1e-6, weight_decay=0)
    )
    before = layer.weight.detach().clone()
    for _ in range(3):
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1.0)
    moved = (optimizer.master["weight"] - before.float()).abs()
    assert moved.median().item() == pytest.approx(3e-6, rel=0.1)  # far below a bfloat16 step of these weights
    assert torch.equal(layer.weight, optimizer.master["weight"].bfloat16())


def test_acceptance_and_distillation_against_loops():
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(6, 9, generator=generator) * 2 for _ in range(2))
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    kept = [sum(min(a, b) for a, b in zip(x, y)) for x, y in zip(p.tolist(), q.tolist())]
    assert acceptance(target, draft).tolist() == pytest.approx(kept, rel=1e-5)
    kl = (p * (p / q).log()).sum(-1).mean().item()
    loss, accepted = distillation(target, draft, torch.tensor(0.25))
    assert accepted.item() == pytest.approx(np.mean(kept), rel=1e-5)
    assert loss.item() == pytest.approx(0.75 * kl + 0.25 * (1 - np.mean(kept)), rel=1e-4)
    assert distillation(target, target, torch.tensor(0.5))[0].item() == pytest.approx(0.0, abs=1e-6)
    cool = distillation(target, draft, torch.tensor(0.25), temperature=0.5)
    assert cool[1].item() == pytest.approx(acceptance(2 * target, 2 * draft).mean().item(), rel=1e-5)
    assert cool[0].item() == pytest.approx(
        distillation(2 * target, 2 * draft, torch.tensor(0.25))[0].item(), rel=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_distillation_raises_acceptance(temperature):
    target = trainer(steps=25, lr=3e-2)
    target.run(nothing)
    teacher = target.model.requires_grad_(False)
    run = trainer(steps=30, config=DENSE, lr=3e-2, teacher=teacher, temperature=temperature)
    assert run.objective.temperature == temperature
    run.run(nothing)
    assert run.history[-1]["acceptance"] > run.history[0]["acceptance"] + 0.5


def test_bits_per_byte_of_a_uniform_model_and_cover():
    stream = np.arange(1, 75).astype(np.uint16) % 64
    lengths = [1] * 64
    uniform = lambda ids: torch.zeros(*ids.shape, 64)  # noqa: E731
    assert evaluate.bits_per_byte(uniform, stream, lengths, window=16, batch=3) == pytest.approx(6.0)
    seen = np.concatenate([w[:, 1:].reshape(-1).numpy() for w in evaluate.windows(stream, 16, 3)])
    assert seen.tolist() == stream[1:].tolist()


def test_agreement_is_counted_on_what_the_target_writes():
    """The target counts up; the draft says the same but for multiples of 4. Judged by hand: 3 of 4 tokens."""

    def says(wrong):
        def logits(ids):
            best = (ids + 1) % 64
            return torch.nn.functional.one_hot(torch.where(best % 4 == 0, best + wrong, best), 64).float()

        return logits

    stream = np.random.default_rng(0).integers(0, 60, 300).astype(np.uint16)
    rate = evaluate.agreement_rate(says(0), says(1), stream, texts=5, given=8, tokens=40)
    assert rate == 0.75
    assert evaluate.agreement_rate(says(0), says(0), stream[:6], texts=2, tokens=4) == 1.0
    starts = [0, 73, 146, 219, 292]  # the last token of each beginning decides what is counted
    first = np.mean([(int(stream[s + 7]) + 1) % 4 != 0 for s in starts])
    assert evaluate.agreement_rate(says(0), says(1), stream, texts=5, given=8, tokens=1) == first


def test_load_report():
    counts = {"english": torch.tensor([[6, 2, 0, 0]]), "german": torch.tensor([[0, 0, 4, 0]])}
    report = evaluate.load_report(counts, {"english": 3.0, "german": 1.0})
    # shares .75 .25 0 0 and 0 0 1 0, mixed 3 : 1 -> .5625 .1875 .25 0
    assert report["max_violation"] == [pytest.approx(0.5625 * 4 - 1)]
    assert report["per_domain"] == {"english": [2.0], "german": [3.0]}
    assert report["dead"] == [[0, 3]]
    assert report["signature_correlation"]["english"]["german"] < 0


@pytest.fixture(scope="module")
def trained_folders(tmp_path_factory):
    """A tiny target and its draft, trained by the command line on text made here."""
    root = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    words = ["the", "old", "house", "by", "sea", "was", "never", "quite", "empty", "again"]
    for split in ("train", "valid"):
        text = ". ".join(" ".join(rng.choice(words, 8)) for _ in range(600))
        with lzma.open(root / f"english.{split}.txt.xz", "wt", encoding="utf-8") as file:
            file.write(text)
    shape = json.loads((cli.ZOO / "quintet-moe" / "config.json").read_text())
    shape |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4}
    draft = json.loads((cli.ZOO / "quintet-draft" / "config.json").read_text())
    draft |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    draft |= {"head_dim": 16, "intermediate_size": 32}
    del draft["layer_types"]  # one name a layer, and there are fewer layers here
    for name, config in (("shape", shape), ("draft-shape", draft)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))

    def command(*more):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        fixed = [
            "--corpus",
            str(root),
            "--weights",
            "english=.8,sums=.2",
            "--problems",
            "2000",
            "--batch",
            "2",
        ]
        fixed += [
            "--length",
            "32",
            "--warmup",
            "2",
            "--workers",
            "1",
            "--device",
            "cpu",
            "--dtype",
            "bfloat16",
        ]
        cli.run(parser.parse_args([*fixed, *more]))

    moe, small = str(root / "moe"), str(root / "draft")
    command("--model", "moe", "--config", str(root / "shape"), "--out", moe, "--steps", "8", "--no-eval")
    command(
        "--model",
        "draft",
        "--config",
        str(root / "draft-shape"),
        "--target",
        moe,
        "--out",
        small,
        "--steps",
        "4",
        "--no-eval",
        "--written",
        ".5",
        "--sequences",
        "3",
        "--temperature",
        "0.7",
    )
    command(
        "--model",
        "moe",
        "--config",
        str(root / "shape"),
        "--out",
        moe,
        "--steps",
        "10",
        "--resume",
        "--no-eval",
    )
    return root


@pytest.mark.parametrize("name", ["moe", "draft"])
def test_saved_folder_is_what_transformers_loads(trained_folders, name):
    folder = trained_folders / name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, "float32")
    ids = torch.randint(0, 4096, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(ids).logits
        got = ours(ids.reshape(-1), torch.arange(20).repeat(2), CausalAttend(2, 20)).view_as(want)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert "selection_bias" not in " ".join(theirs.state_dict())
    assert theirs.generation_config.eos_token_id == [0, 2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Sum: 12+30=42\n")) == "Sum: 12+30=42\n"
    assert tokenizer.eos_token_id == 0
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def test_report_records_the_run(trained_folders):
    report = json.loads((trained_folders / "moe" / "train.json").read_text())
    assert report["steps"] == 10
    assert report["tokens_seen"] == 10 * 2 * 32
    assert report["seed"] == 0
    assert set(report["epochs"]) == {"english", "sums"}
    assert report["config"]["balance"]["mode"] == "bias"
    assert report["compiled"] is False
    assert datetime.fromisoformat(report["date"]) <= datetime.now(UTC)


def test_report_tells_what_the_target_wrote(trained_folders):
    draft, moe = (
        json.loads((trained_folders / name / "train.json").read_text()) for name in ("draft", "moe")
    )
    assert draft["written"] == {"share": 0.5, "sequences": 3}
    assert set(draft["epochs"]) == {"english", "sums", "written"}
    assert draft["epochs"]["written"] == pytest.approx(4 * 32 / (3 * 33), abs=1e-3)  # one of two, four times
    assert draft["weights"] == {"english": 0.8, "sums": 0.2}
    assert draft["config"]["temperature"] == 0.7
    assert moe["written"] is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--model", "moe", "--written", ".5"], "it belongs to --model draft"),
        (["--model", "draft", "--target", "x", "--written", "1"], "--written is a share, 0 or more and less"),
        (["--model", "draft", "--target", "x", "--sequences", "0"], "--sequences must be at least 1, got 0"),
    ],
)
def test_options_of_written_text_are_checked(tmp_path, more, why):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(["--corpus", str(tmp_path), "--out", str(tmp_path), "--steps", "1", *more])
    with pytest.raises(ConfigError, match=why):
        cli.run(args)


def test_draft_needs_a_target(tmp_path):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(
        ["--model", "draft", "--corpus", str(tmp_path), "--out", str(tmp_path), "--steps", "1"]
    )
    with pytest.raises(ConfigError, match="--model draft needs --target"):
        cli.run(args)


def test_weights_are_parsed():
    assert cli.parse_weights("english=.4,sums=.2") == {"english": 0.4, "sums": 0.2}
    for wrong in ("english", "french=.2", "english=0"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.parse_weights(wrong)
