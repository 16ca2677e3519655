"""From sequences to what the caller sees: texts, logprobs with decoded tokens, RequestOutput, the engine's totals."""

from dataclasses import fields
from typing import Any

from torch import Tensor

from tinymoe.cache.pool import BlockPool
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.outputs import CompletionOutput, RequestOutput
from tinymoe.core.sequence import Chunk, Request, Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.intake import Text
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.sampling import prompt_logprobs


class Reporter:
    """Builds outputs; `text` decodes tokens, or is None for an engine that only knows ids."""

    def __init__(self, text: Text | None):
        self.text = text
        self.ready: dict[int, RequestOutput] = {}  # request number -> output that no step() has returned yet

    def named(self, entry: dict) -> dict:
        """Fill in decoded_token of {token id: Logprob}."""
        if self.text is not None:
            for token, logprob in entry.items():
                logprob.decoded_token = self.text.decoded_token(token)
        return entry

    def keep_prompt_logprobs(self, batch: Batch, logits_RV: Tensor) -> None:
        """Those that this step brings, for the requests that want them."""
        for chunk, first, end in zip(batch.chunks, batch.first_row, batch.first_row[1:]):
            if chunk.seq.request.params.prompt_logprobs is not None:
                self._keep(chunk, logits_RV[first:end])

    def _keep(self, chunk: Chunk, logits_TV: Tensor) -> None:
        """Rows start..stop-1 of the prompt predict tokens start+1..stop; the first token has no prediction."""
        request = chunk.seq.request
        ids, have = request.prompt_token_ids, request.prompt_logprobs or [None]
        start = len(have) - 1  # a prompt that is recomputed repeats rows that are already here
        stop = min(chunk.stop, len(ids) - 1)
        if stop > start >= chunk.start:
            rows_TV = logits_TV[start - chunk.start : stop - chunk.start]
            count = request.params.prompt_logprobs or 0
            have += [
                self.named(entry) for entry in prompt_logprobs(rows_TV, ids[start + 1 : stop + 1], count)
            ]
        request.prompt_logprobs = have

    def completion(self, seq: Sequence) -> CompletionOutput:
        wants = seq.request.params.logprobs is not None
        return CompletionOutput(
            index=seq.index,
            text=seq.text.text if seq.text is not None else "",
            token_ids=seq.output_token_ids,
            cumulative_logprob=seq.cumulative_logprob if wants else None,
            logprobs=list(seq.logprobs) if wants else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            routed_experts=seq.routed_experts,
        )

    def output(self, request: Request) -> RequestOutput:
        """The request as it stands."""
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self.completion(seq) for seq in request.sequences],
            finished=request.finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
            prompt_logprobs=request.prompt_logprobs,
            error=request.error,
        )

    def deliver(self, request: Request) -> None:
        """The request as it stands, into its outbox or to the next step() that collects; there the newest is enough."""
        if request.final_only and not request.finished:
            return
        if request.outbox is not None:
            request.outbox.append(self.output(request))
        else:
            self.ready[request.number] = self.output(request)

    def last(self, request: Request) -> RequestOutput:
        """The last output of a request whose caller takes it here; whoever reads its outbox sees the end there."""
        self.ready.pop(request.number, None)
        output = self.output(request)
        if request.outbox is not None:
            request.outbox.append(output)
        return output

    def collect(self) -> list[RequestOutput]:
        """What no step() has returned yet, each request once."""
        outputs = [*self.ready.values()]
        self.ready = {}  # nothing is called between here and the caller: a Ctrl-C there would lose the outputs
        return outputs


def totals(metrics: EngineMetrics, pool: BlockPool, routes: RouteRecorder) -> dict[str, Any]:
    """Everything the engine counts, as plain numbers and lists.

    The fields of EngineMetrics, and: acceptance_rate (accepted per drafted token), acceptance_at (the same for each place
    of a draft), tokens_per_verify, verify_experts (distinct ones, summed over verify steps and layers), experts_per_verify
    (the same for one such step); tokens_per_s (generated, over the time spent in steps), blocks_used, blocks_cached,
    blocks_total; expert_load [L][E] tokens per expert (empty rows in dense layers), expert_max_over_mean per MoE layer,
    distinct_experts_per_step [L].
    """
    counts = {f.name: getattr(metrics, f.name) for f in fields(metrics) if not f.name.startswith("_")}
    counts["drafts_at"], counts["accepted_at"] = list(metrics.drafts_at), list(metrics.accepted_at)
    seconds = sum(counts[f"{lap}_seconds"] for lap in ("schedule", "draft", "forward", "sample", "commit"))
    steps, verify_experts = max(1, routes.routed_steps), routes.visited(verifying=True)
    return {
        **counts,
        "acceptance_rate": metrics.accepted_tokens / max(1, metrics.draft_tokens),
        "acceptance_at": [a / max(1, n) for a, n in zip(metrics.accepted_at, metrics.drafts_at)],
        "tokens_per_verify": metrics.verified_tokens / max(1, metrics.verifications),
        "verify_experts": verify_experts,
        "experts_per_verify": verify_experts / max(1, metrics.verify_steps),
        "tokens_per_s": metrics.generation_tokens / seconds if seconds else 0.0,
        "blocks_used": pool.num_blocks - pool.num_free,
        "blocks_cached": pool.num_cached,
        "blocks_total": pool.num_blocks,
        "expert_load": [row.tolist() if row.any() else [] for row in routes.load],
        "expert_max_over_mean": routes.max_over_mean().tolist(),
        "distinct_experts_per_step": (routes.distinct / steps).tolist(),
    }
