"""The decoder: embeddings, layers (each dense or Mixture-of-Experts, as the config says), norm, output head."""

import torch
from torch import Tensor, nn

from tinymoe import ops
from tinymoe.cache.devices import free_bytes, memory_bytes
from tinymoe.core.model_config import ConfigError, ModelConfig
from tinymoe.model.attention import Attend, Attention
from tinymoe.model.layers import MLP, RMSNorm, Rotary, activation
from tinymoe.model.moe import MoE, RouteSink


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the last sum is left to the next norm, which does both at once."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        layer = config.layers[index]
        act = activation(config.hidden_act)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, index)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer.moe is not None:
            self.mlp = MoE(layer.moe, config.hidden_size, index, act)
        else:
            self.mlp = MLP(config.hidden_size, layer.intermediate_size, act, config.mlp_bias)

    def forward(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        sink: RouteSink | None,
        num_valid: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x and what is still to be added to it -> the same after this layer."""
        x_TD, h_TD = self.attn_norm.add(x_TD, delta_TD)
        x_TD, h_TD = self.mlp_norm.add(x_TD, self.attention(h_TD, cos, sin, attend))
        return x_TD, self.mlp(h_TD, sink, num_valid) if isinstance(self.mlp, MoE) else self.mlp(h_TD)


class Decoder(nn.Module):
    """A decoder-only transformer over flat tokens: no batch axis, sequences are told apart by `attend`.

    invariant: on a GPU, the same bits for a token whoever shares its batch (set by `make_invariant`).
    """

    invariant = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        sink: RouteSink | None = None,
        rows: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        """token ids [T] int64, positions [T] int64 -> logits [T, V] float32, or only those of `rows` [R] int64.

        num_valid: int32 [1] on the device; tokens from there on are padding, which visits no expert.
        """
        delta_TD = None
        x_TD = self.embed(token_ids_T)
        cos, sin = self.rotary(positions_T)
        for layer in self.layers:
            x_TD, delta_TD = layer(x_TD, delta_TD, cos, sin, attend, sink, num_valid)
        if rows is not None:
            x_TD = x_TD.index_select(0, rows)
            delta_TD = None if delta_TD is None else delta_TD.index_select(0, rows)
        _, h_TD = self.norm.add(x_TD, delta_TD)
        head = self.embed if self.lm_head is None else self.lm_head
        return ops.linear(h_TD, head.weight, None, self.invariant).float()

    @classmethod
    def empty(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> "Decoder":
        """A decoder whose parameters have memory of their own, uninitialised.

        The selection bias stays float32 (as in transformers): it is compared with scores in float32, and moves by steps
        too small for 16 bits. Raises ConfigError with the arithmetic, before anything is made, if the memory that a GPU has
        free, or all that the machine has, is too little.
        """
        count = config.num_parameters()
        wanted, room, free = count * dtype.itemsize, free_bytes(device), " free"
        if room is None:
            room, free = memory_bytes(device), ""
        if room is not None and wanted > room:
            raise ConfigError(
                f"the weights do not fit: {count} parameters x {dtype.itemsize} bytes ({dtype}) = {wanted / 2**30:.1f} GiB, "
                f"and {device} has {room / 2**30:.1f} GiB{free}: take a narrower dtype, a smaller model, or a device with "
                "more memory"
            )
        with torch.device("meta"):
            model = cls(config)
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            kept = torch.float32 if leaf == "selection_bias" else dtype
            memory = torch.empty(parameter.shape, dtype=kept, device=device)
            filled = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), leaf, filled)
        return model

    def make_invariant(self) -> "Decoder":
        """One order of summation for every number of tokens, in all products of the model. Returns self."""
        for module in self.modules():
            if hasattr(module, "invariant"):
                setattr(module, "invariant", True)  # noqa: B010
        return self

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, seed: int = 0) -> "Decoder":
        """Fill every matrix with N(0, std²) noise of this seed; norms with 1, biases with 0. Returns self.

        The noise is made where the weights are: the same on every CPU, another on a GPU.
        """
        generator = torch.Generator(self.embed.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif parameter.is_cuda:
                parameter.normal_(0, std, generator=generator)
            else:
                noise = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(noise)
        return self
