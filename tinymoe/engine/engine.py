"""The engine: requests in, one step at a time, outputs out."""

import time
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch

from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.planner import plan_cache
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Request, Sequence, Status
from tinymoe.core.trace import FINISH_REASONS, Trace
from tinymoe.engine.batch import Batch
from tinymoe.engine.intake import Intake, RequestError, Text
from tinymoe.engine.report import Reporter, totals
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.runner import Runner
from tinymoe.engine.sampling import Row, Sampled, Sampler
from tinymoe.engine.scheduler import Scheduler
from tinymoe.model.decoder import Decoder


class Draw(NamedTuple):
    """One token to be sampled: for which sequence (index: which of the request's n), from which row of the logits."""

    seq: Sequence
    index: int
    logits_row: int


class Engine:
    """Serves many requests over one model. Not thread-safe: call it from one thread, or under a lock.

    model: a Decoder on its device. text: a tokenizer (tinymoe.text.Tokenizer) for text prompts, stop strings and texts.
    eos_token_ids: ids that end a sequence.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        text: Text | None = None,
        eos_token_ids: Seq[int] = (),
    ):
        self.config = config = config or EngineConfig()
        self.text = text
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = config.model_len(model.config)
        self.trace = Trace()
        self.metrics = EngineMetrics()
        weight = model.norm.weight
        plan = plan_cache(model.config, config, weight.element_size())
        self.blocks = BlockManager(
            plan.num_blocks,
            config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            trace=self.trace,
        )
        storage = KVStorage(
            model.config,
            plan.num_blocks,
            config.block_size,
            weight.dtype,
            weight.device,
            keep_experts=config.return_routed_experts,
        )
        self.routes = RouteRecorder(model.config, storage, self.trace)
        self.runner = Runner(model, storage, self.routes)
        self.scheduler = Scheduler(config, self.blocks, self.metrics, self.trace)
        self.sampler = Sampler()
        self.reporter = Reporter(text)
        self.intake = Intake(config, model.config.vocab_size, self.max_model_len, plan.num_blocks, text)
        self._requests: dict[str, Request] = {}
        self._next_seq_id = 0

    def add_request(
        self,
        request_id: str,
        prompt: str | dict | Seq[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue one request. prompt: text, token ids, or {"prompt_token_ids": [...]}.

        priority: lower runs earlier under policy "priority". cache_salt: prefix pages are shared only between equal salts.
        Raises RequestError if it is malformed, can never fit, or its id is in use; nothing else is disturbed.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self._requests:
            raise RequestError(
                f"request id {request_id!r} is in use: wait until it has finished, or abort it"
            )
        params = sampling_params if sampling_params is not None else SamplingParams()
        request = self.intake.accept(request_id, prompt, params, priority, cache_salt)
        self._requests[request_id] = request
        self.metrics.requests += 1
        self.metrics.prompt_tokens += len(request.prompt_token_ids)
        self.scheduler.add(self._new_sequence(request, 0))

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now, whatever it is doing, and return what it has so far; None if the id is unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for seq in request.sequences:
            self._finish(seq, "abort", f"{__name__}:Engine.abort_request#asked-for")
        return self.reporter.output(request)

    def get_metrics(self) -> dict[str, Any]:
        """Totals since the start (engine.report.totals says which); times of one request are in its output's metrics."""
        return totals(self.metrics, self.blocks.pool, self.routes)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Does nothing and returns False while requests run."""
        if self.scheduler.running:
            return False
        self.blocks.pool.forget_prefixes()
        return True

    def step(self) -> list[RequestOutput]:
        """One step: choose tokens, run them all in one forward pass, sample, commit.

        Returns the requests that got a token or ended. If the forward pass fails, the step is undone and can be retried.
        """
        self.trace.step = self.metrics.steps
        self.metrics.start()
        try:
            chunks = self.scheduler.schedule()
            self.metrics.lap("schedule")
            if not chunks:
                return []
            batch = Batch.build(chunks, self.blocks, self.runner.device)
            logits = self.runner.run(batch, self.blocks.copies)
            self.metrics.lap("forward")
            draws = self._draws(batch)
            sampled = self._sample(logits, draws)
            self.metrics.lap("sample")
        except BaseException:
            self.blocks.undo()
            raise
        self.blocks.settle()
        self.routes.settle()
        self.metrics.computed_tokens += batch.token_ids.shape[0]
        outputs = self._commit(batch, logits, draws, sampled)
        self.metrics.lap("commit")
        return outputs

    # After the forward pass

    def _draws(self, batch: Batch) -> list[Draw]:
        """One draw per sequence that has caught up; n of them where a prompt ends and its answers begin."""
        draws = []
        for i, chunk in enumerate(batch.chunks):
            if chunk.samples:
                seq, last = chunk.seq, batch.first_row[i + 1] - 1
                unforked = seq.index == 0 and len(seq.request.sequences) < seq.request.params.n
                indices = range(seq.request.params.n) if unforked else (seq.index,)
                draws += [Draw(seq, index, last) for index in indices]
        return draws

    def _sample(self, logits: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
        if not draws:
            return []
        rows = [
            Row(
                params=seq.request.params,
                seed=(seq.request.seed + index) % 2**63,
                position=seq.num_tokens,
                prompt_token_ids=seq.request.prompt_token_ids,
                output_token_ids=seq.output_token_ids,
                stop_ids=(*self.eos_token_ids, *seq.request.params.stop_token_ids),
                bad_word_ids=seq.request.bad_word_ids,
            )
            for seq, index, _ in draws
        ]
        picked = [draw.logits_row for draw in draws]
        if picked != list(range(logits.shape[0])):
            logits = logits[torch.tensor(picked, device=logits.device)]
        return self.sampler.sample(logits, rows)

    def _commit(
        self, batch: Batch, logits: torch.Tensor, draws: list[Draw], sampled: list[Sampled]
    ) -> list[RequestOutput]:
        """Append the tokens, fork, finish; one output per request that changed."""
        for i, chunk in enumerate(batch.chunks):
            if chunk.seq.request.params.prompt_logprobs is not None:
                self.reporter.keep_prompt_logprobs(chunk, logits[batch.first_row[i] : batch.first_row[i + 1]])
        changed: dict[str, Request] = {}
        grown = []
        for draw, one in zip(draws, sampled):
            request = draw.seq.request
            changed[request.request_id] = request
            if one.error is not None:
                request.error = one.error
            elif draw.index == draw.seq.index:
                grown.append((draw.seq, one))
            else:
                child = self._new_sequence(request, draw.index)
                self.scheduler.fork(draw.seq, child)
                grown.append((child, one))
        for seq, one in grown:
            if seq.request.error is None:
                self._append(seq, one)
        for request in changed.values():
            if request.error is not None:
                for seq in request.sequences:
                    self._finish(seq, "error", f"{__name__}:Engine._commit#bad-logits")
        return [self.reporter.output(request) for request in changed.values()]

    def _append(self, seq: Sequence, one: Sampled) -> None:
        """One more token; ends the sequence if eos, a stop, or a limit says so (in this order)."""
        token, request, params = one.token, seq.request, seq.request.params
        seq.token_ids.append(token)
        self.metrics.generation_tokens += 1
        times, now = request.metrics, time.monotonic()
        times.num_generation_tokens += 1
        times.last_token_time = now
        if times.first_token_time is None:
            times.first_token_time = now
        if one.logprob is not None:
            seq.cumulative_logprob += one.logprob
        if one.logprobs is not None:
            seq.logprobs.append(self.reporter.named(one.logprobs))
        if self.trace.on:
            self.trace.emit(
                "sample",
                f"{__name__}:Engine._append#caught-up",
                request=request.number,
                seq=seq.seq_id,
                position=seq.num_tokens - 1,
                token=token,
            )
        count = seq.num_tokens - seq.num_prompt_tokens
        can_stop = count > params.min_tokens
        reason = src = None
        if can_stop and token in self.eos_token_ids and not params.ignore_eos:
            reason, src = "stop", f"{__name__}:Engine._append#eos"
        elif can_stop and token in params.stop_token_ids:
            reason, src = "stop", f"{__name__}:Engine._append#stop-token"
            seq.stop_reason = token
        elif count == params.max_tokens or seq.num_tokens >= self.max_model_len:
            reason, src = "length", f"{__name__}:Engine._append#length"
        if seq.text is not None:
            stop = seq.text.append(token, count, ends=reason == "stop")
            if stop is not None:
                reason, src = "stop", f"{__name__}:Engine._append#stop-string"
                seq.stop_reason = stop
        if reason is not None and src is not None:
            self._finish(seq, reason, src)

    def _finish(self, seq: Sequence, reason: str, src: str) -> None:
        if seq.status is Status.FINISHED:
            return
        if seq.row >= 0:
            table = self.blocks.tables[seq.row]
            seq.routed_experts = self.runner.storage.experts_of(table, seq.num_computed_tokens)
        self.scheduler.remove(seq)
        seq.status = Status.FINISHED
        late_stop = seq.text.finish() if seq.text is not None else None
        if late_stop is not None and reason == "length":
            reason, seq.stop_reason = "stop", late_stop
        seq.finish_reason = reason
        request = seq.request
        if self.trace.on:
            self.trace.emit(
                "finish",
                src,
                request=request.number,
                seq=seq.seq_id,
                reason=FINISH_REASONS.index(reason),
                tokens=seq.num_tokens - seq.num_prompt_tokens,
            )
        if request.finished:
            request.metrics.finished_time = time.monotonic()
            self.metrics.finished_requests += 1
            del self._requests[request.request_id]

    # Small helpers

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        seq = Sequence(self._next_seq_id, request, index)
        self._next_seq_id += 1
        if self.text is not None and request.params.detokenize:
            seq.text = self.text.text_state(request.params, request.prompt_token_ids)
        request.sequences.append(seq)
        return seq
