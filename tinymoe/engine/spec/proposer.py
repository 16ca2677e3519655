"""Who proposes, under which options: an n-gram lookup, a draft model, or the model itself with fewer experts."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import brief, require
from tinymoe.core.sequence import Sequence
from tinymoe.core.trace import Trace
from tinymoe.engine.forward.passes import Pending
from tinymoe.engine.forward.runner import can_capture, decode_buckets
from tinymoe.engine.sampling import Row, Sampler
from tinymoe.engine.sampling.draws import Draw
from tinymoe.engine.sampling.logits import apply_edits
from tinymoe.engine.spec.drafter import ModelDrafter, with_fewer_experts
from tinymoe.engine.spec.ngram import NgramDrafter
from tinymoe.engine.spec.verify import distribution
from tinymoe.model.decoder import Decoder
from tinymoe.ops.noise import DRAFT, TARGET


class Proposer:
    """Fills in draft_token_ids. q: the distributions [V] that the drafts of a sequence were drawn from in this step, where
    rejection sampling will want them; chances: how likely each draft was, if somebody listens.

    coupled: the model chooses its token with the noise of plain decoding, and a draft is kept if it is that token.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        draft: Decoder | None,
        storage: KVStorage,
        blocks: BlockManager,
        trace: Trace,
        eos_token_ids: Seq[int],
    ):
        options = config.speculation
        assert options is not None
        self.blocks, self.trace = blocks, trace
        self.eos_token_ids = tuple(eos_token_ids)
        self.sampler = Sampler()
        # Of a certain draft (n-gram) both rules keep a token with chance p(x), and redraw alike: take the repeatable one.
        self.coupled = options.acceptance == "coupled" or options.method == "ngram"
        self.lookup = NgramDrafter(options.prompt_lookup_min or 1, options.prompt_lookup_max or 1)
        self.drafter: ModelDrafter | None = None
        flies = can_capture(model, config)
        self.most_tokens = decode_buckets(config)[-1] if flies else 1 << 30  # of a step that verifies drafts
        if options.method != "ngram":
            own = draft is not None
            drafting = draft if own else with_fewer_experts(model, options.num_experts_per_tok or 1)
            if own:
                weight = drafting.norm.weight
                shape = (blocks.pool.num_blocks, blocks.block_size, weight.dtype, weight.device)
                storage = KVStorage(drafting.config, *shape)
            budget = config.max_num_batched_tokens
            self.drafter = ModelDrafter(drafting, storage, blocks, own=own, max_tokens=budget)
            self.drafter.capture(config, options.num_speculative_tokens)
        self.q: dict[Sequence, list[Tensor]] = {}
        self.chances: dict[Sequence, list[float]] = {}
        self._found: dict[Sequence, list[int]] = {}

    def look_up(self, running: Seq[Sequence]) -> None:
        """A step comes, of these sequences."""
        self.q, self.chances, self._found = {}, {}, {}
        self.lookup.keep({seq.seq_id for seq in running})

    def most(self, seq: Sequence, limit: int) -> int:
        """How many tokens, at most `limit`, could be proposed for `seq`."""
        if self.drafter is not None or not limit:
            return limit
        found = self._found[seq] = self.lookup.propose(seq, limit)
        return len(found)

    def propose(self, counts: dict[Sequence, int]) -> Pending | None:
        """counts[seq] tokens for each of these sequences, whose blocks are reserved; what comes back is still to land."""
        pending = None
        if self.drafter is None:
            for seq, count in counts.items():
                seq.draft_token_ids = self._found[seq][:count]
        else:
            pending = self.drafter.draft(counts, self._choose, drawn=self._drawn(counts))
        if self.trace.on:
            src = f"{__name__}:Proposer.propose#what-the-draft-would-say"
            for seq in counts:
                chances = self.chances.get(seq, [1.0] * len(seq.draft_token_ids))
                for i, (token, q) in enumerate(zip(seq.draft_token_ids, chances)):
                    position = seq.num_tokens + i
                    self.trace.emit(
                        "draft", src, seq=seq.seq_id, position=position, token=token, q=millionths(q)
                    )
        return pending

    def tell(self, seq: Sequence, accepted: int, draws: list[Draw], logits_RV: Tensor) -> None:
        """Events for whoever listens: what the model thought of each draft that was examined."""
        src = f"{__name__}:Proposer.tell#kept-if-the-model-agrees"
        behind = {draw.ahead: draw for draw in draws if draw.seq is seq}
        for i, token in enumerate(seq.draft_token_ids[: accepted + 1]):
            p = self.chance(logits_RV[behind[i].logits_row][None], [self._row(seq, i)], [token])[0]
            q = self.chances[seq][i] if seq in self.chances else 1.0
            self.trace.emit(
                "verify",
                src,
                seq=seq.seq_id,
                position=behind[i].position,
                token=token,
                p=millionths(p),
                q=millionths(q),
                accepted=int(i < accepted),
            )

    @property
    def caught_up(self) -> int:
        """Tokens that the last proposal had to compute before it began."""
        return 0 if self.drafter is None else self.drafter.caught_up

    def keep(self, accepted: dict[Sequence, int]) -> None:
        """So many drafts of these sequences stay; the last one proposed has not been run by the draft."""
        if self.drafter is not None:
            counts = [s.num_tokens + min(kept, len(s.draft_token_ids) - 1) for s, kept in accepted.items()]
            self.drafter.mark(list(accepted), counts)

    def _drawn(self, seqs: Iterable[Sequence]) -> bool:
        """Whether drafts are what a captured graph draws: without edits, and with the noise of plain decoding."""
        params = [seq.request.params for seq in seqs]
        return not self.trace.on and all(p.plain and (p.greedy or self.coupled) for p in params)

    @torch.inference_mode()
    def _choose(self, seqs: list[Sequence], logits_SV: Tensor) -> list[int]:
        """The draft's token for each sequence, under the options of its request; earlier drafts count as history."""
        if not self.trace.on and all(s.request.params.greedy and s.request.params.plain for s in seqs):
            return logits_SV.argmax(-1).tolist()
        rows = [self._row(seq, len(seq.draft_token_ids)) for seq in seqs]
        # In coupled mode both choose with the same noise, and agree more often for it (Daliri et al., arXiv 2408.07978).
        chosen = self.sampler.sample(logits_SV, rows, stream=TARGET if self.coupled else DRAFT)
        tokens = [
            max(0, one.token) for one in chosen
        ]  # a broken draft proposes something, and is certain of it
        drawn = [i for i, row in enumerate(rows) if not (row.params.greedy or self.coupled)]
        if drawn:
            q_RV = distribution(logits_SV[drawn], [rows[i] for i in drawn])
            for i, q_V in zip(drawn, q_RV):
                if chosen[i].error is not None:
                    q_V.zero_()[tokens[i]] = 1
                self.q.setdefault(seqs[i], []).append(q_V)
        if self.trace.on:
            for seq, q in zip(seqs, self.chance(logits_SV, rows, tokens)):
                self.chances.setdefault(seq, []).append(q)
        return tokens

    def _row(self, seq: Sequence, ahead: int) -> Row:
        return Draw(seq, seq.index, -1, ahead).row(self.eos_token_ids)

    def chance(self, logits_RV: Tensor, rows: Seq[Row], tokens: list[int]) -> list[float]:
        """How likely each token was; a greedy row counts as if its temperature were 1."""
        chances = apply_edits(logits_RV, rows).softmax(-1, dtype=torch.float64)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            chances[drawn] = distribution(logits_RV[drawn], [rows[i] for i in drawn])
        return chances.gather(1, torch.tensor(tokens, device=chances.device)[:, None])[:, 0].tolist()


def check_speculation(
    config: EngineConfig, model: Decoder, draft: Decoder | None, max_model_len: int
) -> None:
    """Raise ConfigError unless the draft is there if it is needed, and can stand beside the model."""
    wanted = config.speculation is not None and config.speculation.method == "draft_model"
    require(
        wanted == (draft is not None),
        "speculative_config's method 'draft_model' needs the draft's Decoder, and nothing else does: Engine(..., draft=...), "
        "which LLM loads by itself",
    )
    mine, options = model.config, config.speculation
    if options is not None and options.method == "self":
        require(
            mine.is_moe,
            "speculative_config's method 'self' drafts with fewer experts, and this model has none",
        )
        fewer, own = options.num_experts_per_tok or 1, mine.max_top_k
        require(
            fewer <= own,
            f"speculative_config: num_experts_per_tok must be at most the model's own {own}, got {brief(fewer)}",
        )
    if draft is None:
        return
    its = draft.config
    require(
        its.vocab_size == mine.vocab_size,
        f"the draft model has {its.vocab_size} token ids, the model has {mine.vocab_size}: a draft must have the model's "
        "own vocabulary",
    )
    require(
        its.max_position_embeddings >= max_model_len,
        f"the draft model was built for {its.max_position_embeddings} tokens, and max_model_len is {max_model_len}: lower "
        "max_model_len, or take another draft",
    )
    places = draft.norm.weight.device, model.norm.weight.device
    require(
        places[0] == places[1],
        f"the draft model is on {places[0]}, the model on {places[1]}: load both on one device",
    )


def millionths(chance: float) -> int:
    """A chance as traces write it; 0 for NaN."""
    return round(chance * 1e6) if chance == chance else 0
