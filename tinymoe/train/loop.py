"""The training loop: schedule, steps, resumable state, export."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

# The fused list operations have no public name yet, though torch.optim is built on them.
# pyright: reportPrivateImportUsage=false
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from tinymoe.core.model_config import ModelConfig, require
from tinymoe.experts.balance import BalanceConfig, max_violation, update_selection_bias
from tinymoe.model.decoder import Decoder
from tinymoe.model.moe import MoE
from tinymoe.model.weights import save_checkpoint
from tinymoe.train.corpus import Sampler
from tinymoe.train.objective import Objective
from tinymoe.train.optimizer import Optimizer, OptimizerConfig

STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """steps, minutes: length of the run; with both, whichever ends first. minutes count from `Trainer.run`.

    batch x length tokens a step. warmup: steps of rising learning rate; then constant, then linear to zero over the
    last `decay` of the run (1.0: falling all along). save_minutes: time between saves. compile: torch.compile.
    temperature: at which a target and its student are compared.
    """

    steps: int | None = None
    minutes: float | None = None
    batch: int = 128
    length: int = 512
    seed: int = 0
    warmup: int = 100
    decay: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    compile: bool = False
    save_minutes: float = 1.5
    log_steps: int = 25
    temperature: float = 1.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self):
        require(
            self.steps is not None or self.minutes is not None,
            "give steps, minutes, or both: the run must end",
        )
        require(
            self.dtype in ("float32", "bfloat16"),
            f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}",
        )
        require(0 < self.decay <= 1, f"decay must be in (0, 1], got {self.decay}")
        require(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")

    def lr_scale(self, step: int, progress: float) -> float:
        """Factor on the learning rate at `step`, when `progress` (0 to 1) of the run is over."""
        rising = min(1.0, (step + 1) / (self.warmup + 1))
        return rising * min(1.0, max(0.0, 1.0 - progress) / self.decay)


def trained_model(config: ModelConfig, train: TrainConfig, device: torch.device) -> Decoder:
    """A fresh decoder. Matrices that write to the residual stream start smaller, by 1/sqrt(2 L) (GPT-2)."""
    if train.balance.mode == "bias":
        moes = [
            None if layer.moe is None else replace(layer.moe, selection_bias=True) for layer in config.layers
        ]
        config = replace(config, layers=tuple(replace(y, moe=m) for y, m in zip(config.layers, moes)))
    model = Decoder(config).init_weights(seed=train.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.out.weight", "down.weight", "experts.down")):
                parameter.mul_((2 * config.num_hidden_layers) ** -0.5)
            if not name.endswith("selection_bias"):  # moves by steps too small for 16 bits
                parameter.data = parameter.data.to(getattr(torch, train.dtype))
    return use_grouped(model.to(device))


def use_grouped(model: Decoder) -> Decoder:
    """Run experts by the grouped path: differentiable and free of waits for the device."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.path = "grouped"
    return model


class Trainer:
    """Trains one decoder. `stop = True` (from a signal handler) ends the run at the next step, with a save."""

    def __init__(
        self,
        config: ModelConfig,
        train: TrainConfig,
        sampler: Sampler,
        device: torch.device,
        teacher: Decoder | None = None,
    ):
        self.plain_config, self.config, self.sampler, self.device = config, train, sampler, device
        self.model = trained_model(config, train, device)
        self.objective = Objective(
            self.model, train.batch, train.length, train.balance, teacher, device, train.temperature
        )
        self.forward: Callable[..., Any] = self.objective
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.optimizer = Optimizer(self.model.named_parameters(), heads, train.optimizer)
        biases = [m.router.selection_bias for m in self.model.modules() if isinstance(m, MoE)]
        self.biases = [b for b in biases if b is not None]
        # What the rule has accumulated; the parameters hold it times BalanceConfig.bias_scale.
        self.bias_LE = torch.zeros(len(self.biases), config.max_experts, device=device)
        self.stream = torch.from_numpy(sampler.corpus.tokens.astype(np.int32)).to(device)
        self.offsets = torch.arange(train.length + 1, device=device)
        self.step, self.progress, self.stop = 0, 0.0, False
        self.history: list[dict[str, float]] = []

    def batch(self) -> Tensor:
        starts, _ = self.sampler.next()
        return self.stream[torch.from_numpy(starts).to(self.device)[:, None] + self.offsets].long()

    def train_step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step. Returns main loss, acceptance, gradient norm and loads, all still on the device."""
        balance, scale = self.config.balance, self.config.lr_scale(self.step, self.progress)
        if self.biases:
            self._place_bias()
        losses = self.forward(self.batch(), torch.tensor(self.progress, device=self.device))
        losses.total.backward()
        norm = self.optimizer.step(scale)
        for parameter in self.optimizer.parameters:
            parameter.grad = None
        if self.biases and self.progress < balance.bias_fade[0]:
            update_selection_bias(self.bias_LE, losses.counts, balance.bias_rate)
        self.step += 1
        return losses.main, losses.acceptance, norm, losses.counts

    @torch.no_grad()
    def _place_bias(self) -> None:
        """Give the routers what the rule has accumulated, faded as far as the run has come."""
        scale = self.config.balance.bias_scale(self.progress)
        torch._foreach_copy_([b.detach() for b in self.biases], list((self.bias_LE * scale).unbind()))

    def warm_up(self) -> None:
        """Compile. On failure train without, and say so."""
        if not self.config.compile:
            return
        tokens = (
            self.stream[: self.config.batch * (self.config.length + 1)].long().view(self.config.batch, -1)
        )
        share = torch.tensor(0.0, device=self.device)
        self.objective(tokens[:, :], share)  # fills the rotary cache, which must not change inside the graph
        compiled = torch.compile(self.objective, dynamic=False)
        start = time.monotonic()
        try:
            compiled(tokens, share).total.backward()
        except Exception as error:  # torch.compile raises anything
            tqdm.write(
                f"torch.compile failed, training without it: {type(error).__name__}: {str(error)[:2000]}"
            )
        else:
            self.forward = compiled
            tqdm.write(f"compiled in {time.monotonic() - start:.0f} s")
        for parameter in self.optimizer.parameters:
            parameter.grad = None

    def run(self, save: Callable[["Trainer"], None], spent: float = 0.0) -> None:
        """Train to the end. `save` is called now and then and at the end; `spent` seconds of the budget are gone."""
        began = time.monotonic() - spent
        self.warm_up()
        clock = saved = logged = time.monotonic()
        budget = math.inf if self.config.minutes is None else 60 * self.config.minutes - (clock - began)
        require(budget > 0, f"minutes ({self.config.minutes}) were over before the first step; give more")
        at_start, steps = self.progress, self.config.steps
        window: list[tuple[Tensor, ...]] = []
        with tqdm(total=steps, initial=self.step, unit="step", mininterval=5, smoothing=0.05) as bar:
            while self.progress < 1.0 and not self.stop:
                window.append(self.train_step())
                now = time.monotonic()
                timed = at_start + (1 - at_start) * (now - clock) / budget
                self.progress = min(1.0, max(timed, self.step / steps if steps else 0.0))
                bar.update()
                if self.step % self.config.log_steps == 0 or self.progress >= 1.0:
                    self._log(window, bar, time.monotonic() - logged)
                    window, logged = [], time.monotonic()
                if now - saved > 60 * self.config.save_minutes:
                    save(self)
                    saved = time.monotonic()
        save(self)

    def _log(self, window: list[tuple[Tensor, ...]], bar: tqdm, seconds: float) -> None:
        """Reads the device: the only wait in the loop."""
        main, accepted, norm = (torch.stack(column).mean().item() for column in list(zip(*window))[:3])
        counts_LE = torch.stack([row[3] for row in window]).sum(0)
        entry = {
            "step": self.step,
            "progress": round(self.progress, 5),
            "loss": round(main, 5),
            "grad_norm": round(norm, 4),
            "tokens_per_s": round(len(window) * self.config.batch * self.config.length / max(seconds, 1e-9)),
        }
        if counts_LE.numel():
            entry["max_violation"] = round(max_violation(counts_LE).max().item(), 4)
        if not math.isnan(accepted):
            entry["acceptance"] = round(accepted, 4)
        self.history.append(entry)
        bar.set_postfix({k: v for k, v in entry.items() if k != "step"}, refresh=False)
        if not math.isfinite(main):
            raise FloatingPointError(
                f"loss is {main} at step {self.step}; the last save is intact: lower the learning rate"
            )

    def tokens_seen(self) -> int:
        return self.step * self.config.batch * self.config.length

    def save_state(self, folder: Path) -> None:
        """Everything needed to go on, as safetensors and JSON. The JSON is replaced last, so a crash leaves a pair."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {**self.optimizer.state(), "bias": self.bias_LE}
        name = f"state-{self.step}.safetensors"
        save_file(
            {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}, folder / name
        )
        about = {
            "file": name,
            "step": self.step,
            "progress": self.progress,
            "optimizer_steps": self.optimizer.steps,
            "sampler": self.sampler.state(),
            "history": self.history,
            "config": asdict(self.config),
        }
        write_json(folder / STATE, about)
        for old in folder.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    def load_state(self, folder: Path) -> None:
        """Go on from `save_state`. Raises ConfigError if the run it comes from was another one."""
        about = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name in ("batch", "length", "seed", "dtype"):
            theirs, ours = about["config"][name], getattr(self.config, name)
            require(
                theirs == ours,
                f"{folder} was trained with {name} {theirs!r}, not {ours!r}; use the same to resume",
            )
        tensors = load_file(folder / about["file"])
        self.bias_LE.copy_(tensors.pop("bias"))
        self.optimizer.restore(tensors, about["optimizer_steps"])
        self.step, self.progress, self.history = about["step"], about["progress"], about["history"]
        if self.config.minutes is None and self.config.steps:  # may be more steps than the first run wanted
            self.progress = min(1.0, self.step / self.config.steps)
        self.sampler.restore(about["sampler"])

    def export(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Write the model as transformers loads it. A selection bias is left out: the saved configuration has none."""
        plain = Decoder(self.plain_config)
        state = {
            k: v.detach().cpu()
            for k, v in self.model.state_dict().items()
            if not k.endswith("selection_bias")
        }
        plain.to(getattr(torch, self.config.dtype)).load_state_dict(state)
        save_checkpoint(folder, plain, "auto", extra)


def write_json(path: Path, value: Any) -> None:
    """Replace the file in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
