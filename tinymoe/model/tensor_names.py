"""Which rows of which parameter each tensor of a Hugging Face checkpoint is: one table, read both ways.

The decoder's parameters are fused (q, k and v in one matrix, gate and up in one, all experts of a layer in one), a
checkpoint's are not. Every parameter is seen as rows: [R, C] and [R] have R, the experts' [E, R, C] have E * R.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from tinymoe.core.model_config import ModelConfig, MoEConfig


class Slot(NamedTuple):
    """A checkpoint tensor of `shape` fills rows first_row .. first_row + num_rows of the decoder's `parameter`."""

    parameter: str
    first_row: int
    num_rows: int
    shape: tuple[int, ...]

    def view(self, parameter: Tensor) -> Tensor:
        """The slot's part of its parameter, in the checkpoint tensor's shape; a view, so it can be written to."""
        if parameter.dim() < 3:
            return parameter[self.first_row : self.first_row + self.num_rows]
        # However its experts lie in memory: all of them, or rows of one.
        expert, row = divmod(self.first_row, parameter.shape[1])
        if len(self.shape) == 3:
            return parameter[expert : expert + self.shape[0]]
        return parameter[expert, row : row + self.num_rows]


def num_rows(parameter: Tensor) -> int:
    """E * R of [E, R, C]; R of [R, C] and [R]."""
    return parameter.shape[0] * parameter.shape[1] if parameter.dim() == 3 else parameter.shape[0]


def _stack(parameter: str, *parts: tuple[str, int], columns: int | None = None) -> Iterator[tuple[str, Slot]]:
    """Parts (checkpoint name, rows) that lie in `parameter` one below the other."""
    row = 0
    for name, rows in parts:
        yield name, Slot(parameter, row, rows, (rows,) if columns is None else (rows, columns))
        row += rows


def _mlp(ours: str, theirs: str, D: int, F: int, bias: bool = False) -> Iterator[tuple[str, Slot]]:
    gate, up, down = (f"{theirs}.{name}_proj" for name in ("gate", "up", "down"))
    yield from _stack(f"{ours}.gate_up.weight", (f"{gate}.weight", F), (f"{up}.weight", F), columns=D)
    yield from _stack(f"{ours}.down.weight", (f"{down}.weight", D), columns=F)
    if bias:
        yield from _stack(f"{ours}.gate_up.bias", (f"{gate}.bias", F), (f"{up}.bias", F))
        yield from _stack(f"{ours}.down.bias", (f"{down}.bias", D))


def _moe(
    ours: str, theirs: str, D: int, moe: MoEConfig, old_mixtral: bool, names: Collection[str]
) -> Iterator[tuple[str, Slot]]:
    E, F, S = moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size
    # transformers 5 calls Mixtral's block "mlp" too when it saves its own fused form.
    block = f"{theirs}.block_sparse_moe" if old_mixtral else f"{theirs}.mlp"
    gate, up, down = ("w1", "w3", "w2") if old_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield f"{block}.gate.weight", Slot(f"{ours}.router.weight", 0, E, (E, D))
    if moe.selection_bias:
        yield f"{block}.gate.e_score_correction_bias", Slot(f"{ours}.router.selection_bias", 0, E, (E,))
    if f"{block}.experts.gate_up_proj" in names:
        yield f"{block}.experts.gate_up_proj", Slot(f"{ours}.experts.gate_up", 0, E * 2 * F, (E, 2 * F, D))
        yield f"{block}.experts.down_proj", Slot(f"{ours}.experts.down", 0, E * D, (E, D, F))
    else:
        both = [(f"{block}.experts.{e}.{name}.weight", F) for e in range(E) for name in (gate, up)]
        yield from _stack(f"{ours}.experts.gate_up", *both, columns=D)
        yield from _stack(
            f"{ours}.experts.down", *((f"{block}.experts.{e}.{down}.weight", D) for e in range(E)), columns=F
        )
    if S:
        shared = "shared_expert" if moe.shared_gate else "shared_experts"
        yield from _mlp(f"{ours}.shared", f"{block}.{shared}", D, S)
    if moe.shared_gate:
        yield f"{block}.shared_expert_gate.weight", Slot(f"{ours}.shared_gate.weight", 0, 1, (1, D))


def _layer(config: ModelConfig, index: int, names: Collection[str]) -> Iterator[tuple[str, Slot]]:
    D, N, G, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    yield f"{theirs}.input_layernorm.weight", Slot(f"{ours}.attn_norm.weight", 0, D, (D,))
    yield f"{theirs}.post_attention_layernorm.weight", Slot(f"{ours}.mlp_norm.weight", 0, D, (D,))
    heads = (("q", N * H), ("k", G * H), ("v", G * H))
    attention, rows = f"{theirs}.self_attn", f"{ours}.attention"
    yield from _stack(
        f"{rows}.qkv.weight", *((f"{attention}.{x}_proj.weight", n) for x, n in heads), columns=D
    )
    yield from _stack(f"{rows}.out.weight", (f"{attention}.o_proj.weight", D), columns=N * H)
    if config.qkv_bias:
        yield from _stack(f"{rows}.qkv.bias", *((f"{attention}.{x}_proj.bias", n) for x, n in heads))
    if config.attention_output_bias:
        yield from _stack(f"{rows}.out.bias", (f"{attention}.o_proj.bias", D))
    if config.qk_norm is not None:
        for x, n in (("q", N), ("k", G)):
            width = H if config.qk_norm == "head" else n * H
            yield f"{attention}.{x}_norm.weight", Slot(f"{rows}.{x}_norm.weight", 0, width, (width,))
    layer = config.layers[index]
    if layer.moe is None:
        yield from _mlp(f"{ours}.mlp", f"{theirs}.mlp", D, layer.intermediate_size, config.mlp_bias)
    else:
        old_mixtral = config.model_type == "mixtral" and f"{theirs}.mlp.gate.weight" not in names
        yield from _moe(f"{ours}.mlp", theirs, D, layer.moe, old_mixtral, names)


def tensor_slots(config: ModelConfig, names: Collection[str] = ()) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this model must hold, and where it goes.

    names: the tensors that are there. They decide between the two forms of a MoE layer: one tensor per expert and
    matrix (what is published, and what transformers saves), or transformers 5's own `experts.gate_up_proj`
    [E, 2F, D] and `experts.down_proj` [E, D, F].
    """
    V, D = config.vocab_size, config.hidden_size
    slots = {
        "model.embed_tokens.weight": Slot("embed.weight", 0, V, (V, D)),
        "model.norm.weight": Slot("norm.weight", 0, D, (D,)),
    }
    if not config.tie_word_embeddings:
        slots["lm_head.weight"] = Slot("lm_head.weight", 0, V, (V, D))
    for index in range(config.num_hidden_layers):
        slots.update(_layer(config, index, names))
    return slots


def to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder's state_dict under the checkpoint's names (one tensor per expert and matrix): views, no copies."""
    return {name: slot.view(state[slot.parameter]) for name, slot in tensor_slots(config).items()}
