"""The engine: requests in, one step at a time, outputs out."""

import time
from collections import deque
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from tinymoe.core.config import EngineConfig
from tinymoe.core.interrupts import Section
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.model_config import brief, require
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Chunk, Request, Sequence, Status
from tinymoe.core.trace import FINISH_REASONS, Trace
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.pipeline import Pipeline, Step
from tinymoe.engine.forward.room import build_cache
from tinymoe.engine.forward.runner import Runner
from tinymoe.engine.intake import Intake, RequestError, Text, check_id
from tinymoe.engine.report import Reporter, totals
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.sampling import Sampled, Sampler
from tinymoe.engine.sampling.ends import ending, uneventful
from tinymoe.engine.sampling.plain import Plain, Run
from tinymoe.engine.scheduler import Scheduler
from tinymoe.engine.spec.proposer import Proposer, check_speculation
from tinymoe.engine.spec.speculator import Clock, Speculator
from tinymoe.model.decoder import Decoder


class Engine:
    """Serves many requests over one model. Not thread-safe: call it from one thread, or under a lock.

    model: a Decoder on its device. text: a tokenizer (tinymoe.text.Tokenizer) for text prompts, stop strings and texts.
    eos_token_ids: ids that end a sequence. draft: the Decoder for speculative_config's method "draft_model"; clock: its time.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        *,
        text: Text | None = None,
        eos_token_ids: Seq[int] = (),
        draft: Decoder | None = None,
        clock: Clock = time.perf_counter,
    ):
        self.config = config = config or EngineConfig()
        self.text = text
        self.eos_token_ids = tuple(eos_token_ids)
        known = all(0 <= token < model.config.vocab_size for token in self.eos_token_ids)
        require(
            known, f"eos_token_ids must be in 0..{model.config.vocab_size - 1}, got {brief(eos_token_ids)}"
        )
        self.max_model_len = config.model_len(model.config)
        check_speculation(config, model, draft, self.max_model_len)
        self.trace = Trace()
        self.metrics = EngineMetrics()
        if config.batch_invariant:
            model.make_invariant()
        self.blocks, storage = build_cache(model, config, self.max_model_len, self.trace, draft)
        self.routes = RouteRecorder(model.config, storage, self.trace)
        self.runner = Runner(model, storage, self.routes)
        self.runner.capture(config, self.max_model_len)
        self.scheduler = scheduler = Scheduler(config, self.blocks, self.metrics, self.trace)
        self.pipeline = Pipeline(config, scheduler, self.blocks, self.runner, self.routes, self.max_model_len)
        self._ahead: Step | None = None  # started before the tokens of the step before it were known
        self.sampler = Sampler()
        self.spec: Plain | Speculator = Plain()
        if config.speculation is not None:
            proposer = Proposer(config, model, draft, storage, self.blocks, self.trace, self.eos_token_ids)
            self.spec = Speculator(config, proposer, self.routes, self.metrics, self.max_model_len, clock)
        self.reporter = Reporter(text)
        self.intake = Intake(
            config, model.config.vocab_size, self.max_model_len, self.blocks.pool.num_blocks, text
        )
        self._requests: dict[str, Request] = {}
        self._next_seq_id = 0
        self._section = Section()

    def add_request(
        self,
        request_id: str,
        prompt: str | dict | Seq[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        outbox: deque[RequestOutput] | None = None,
        final_only: bool = False,
    ) -> None:
        """Queue one request. prompt: text, token ids, or {"prompt_token_ids": [...]}.

        priority: lower runs earlier under policy "priority". cache_salt: prefix pages are shared only between equal salts.
        outbox: gets the outputs of this request, one a step and the last one if it is aborted; step() leaves them out.
        final_only: only the last output is made.
        Raises RequestError if it is malformed, can never fit, or its id is in use; nothing else is disturbed.
        """
        check_id(request_id)
        if request_id in self._requests:
            raise RequestError(f"request id {brief(request_id)} is in use: wait until it ends, or abort it")
        params = sampling_params if sampling_params is not None else SamplingParams()
        with self._section:
            request = self.intake.accept(request_id, prompt, params, priority, cache_salt)
            request.outbox, request.final_only = outbox, final_only
            seq = self._new_sequence(request, 0)
            # Nothing can fail any more: until here nobody knows of the request.
            self.intake.count += 1
            self.scheduler.add(seq)
            self._requests[request_id] = request
            self.metrics.requests += 1
            self.metrics.prompt_tokens += len(request.prompt_token_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether another step() has something to run or to return."""
        return bool(self._requests or self.reporter.ready)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now, whatever it is doing, and return what it has so far; None if the id is unknown."""
        check_id(request_id)
        with self._section:
            request = self._requests.get(request_id)
            if request is None:
                return None
            for seq in request.sequences:
                self._finish(seq, "abort", f"{__name__}:Engine.abort_request#asked-for")
            return self.reporter.last(request)

    def drop_requests(self, outbox: deque[RequestOutput]) -> None:
        """Abort what still fills this outbox. May be called by a finaliser, so in the midst of a step: then it waits for
        the step's end."""
        self._section.after(partial(self._drop, outbox))

    def _drop(self, outbox: deque[RequestOutput]) -> None:
        for request in [r for r in self._requests.values() if r.outbox is outbox]:
            self.abort_request(request.request_id)

    def get_metrics(self) -> dict[str, Any]:
        """Totals since the start (engine.report.totals says which); times of one request are in its output's metrics."""
        return totals(self.metrics, self.blocks.pool, self.routes)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Does nothing and returns False while requests run."""
        with self._section:
            if not self.scheduler.running:
                self.blocks.pool.forget_prefixes()
            return not self.scheduler.running

    def step(self, *, collect: bool = True) -> list[RequestOutput]:
        """One step: choose tokens, run them all in one forward pass, sample, commit.

        Returns the requests that got a token or ended; collect=False keeps them for the next call. If the forward pass
        fails, the step is undone and can be retried. Ctrl-C interrupts nothing but the forward pass.
        """
        if self._requests:
            with self._section as section:
                self.trace.step = self.metrics.steps
                self.metrics.start()
                step = self._ahead
                try:
                    step = step or self._start(section)
                    rests = self.spec.rests(step.batch.chunks)
                    self._ahead = self.pipeline.follow(step) if rests else None
                    self.metrics.lap("forward")
                    with section.interruptible(not step.settled):
                        runs = self.spec.draw(self.sampler, step.batch, step.forward, self.eos_token_ids)
                    self.metrics.lap("sample")
                except BaseException:
                    self._ahead = step if step and step.settled else None  # what is booked comes again
                    self.blocks.undo()
                    self.spec.undo()
                    raise
                self._commit(step, runs)
                self.metrics.lap("commit")
        return self.reporter.collect() if collect else []

    def _start(self, section: Section) -> Step:
        """Choose the tokens of a step and run them."""
        self.spec.plan(self.scheduler.running)
        chunks = self.scheduler.schedule()
        self.metrics.lap("schedule")
        with section.interruptible():
            pending = self.spec.propose(chunks)
            self.metrics.lap("draft")
            return self.pipeline.start(chunks, pending)

    # After the forward pass

    def _commit(self, step: Step, runs: list[Run]) -> None:
        """The step counts: pages, routes, tokens, ends, outputs. Should it fail, the requests of the step end with it."""
        tokens = step.batch.token_ids.shape[0]
        try:
            self.spec.settle(runs, step.batch, step.forward.logits)
            self.pipeline.settle(step)
            self.metrics.computed_tokens += tokens
            self._grow(step.batch, step.forward.logits, runs)
            self.spec.finish(step.batch.chunks, tokens, self._ahead is not None)
        except BaseException as error:
            self._fail(step.batch.chunks, error)
            raise

    def _grow(self, batch: Batch, logits: torch.Tensor | None, runs: list[Run]) -> None:
        """Append the tokens, fork, finish; one output per request that changed."""
        if logits is not None:
            self.reporter.keep_prompt_logprobs(batch, logits)
        changed: dict[str, Request] = {}
        grown = []
        for seq, index, tokens in runs:
            request = seq.request
            if seq.status is Status.FINISHED:  # while this token was on its way
                continue
            changed[request.request_id] = request
            if tokens[0].error is not None:
                request.error = tokens[0].error
            elif index == seq.index:
                grown.append((seq, tokens))
            else:
                child = self._new_sequence(request, index)
                self.scheduler.fork(seq, child)
                grown.append((child, tokens))
        for seq, tokens in grown:
            self._append_run(seq, tokens)
        for request in changed.values():
            if request.error is not None:
                for seq in request.sequences:
                    self._finish(seq, "error", f"{__name__}:Engine._grow#bad-logits")
            self.reporter.deliver(request)

    def _fail(self, chunks: list[Chunk], error: BaseException) -> None:
        """End the requests of a step whose bookkeeping broke off (a bug): half booked, they would spoil the next one."""
        self._ahead = None
        self.blocks.undo()
        for request in {chunk.seq.request.number: chunk.seq.request for chunk in chunks}.values():
            if not request.finished:
                request.error = f"the step of this request could not be recorded: {brief(error)}"
            for seq in request.sequences:
                self._finish(seq, "error", f"{__name__}:Engine._fail#not-recorded")
            self.reporter.deliver(request)

    def _append_run(self, seq: Sequence, tokens: list[Sampled]) -> None:
        """Accepted drafts and one more token, as if each had come in a step of its own; what is behind an end is dropped."""
        if not self.trace.on and uneventful(seq, tokens, self.eos_token_ids, self.max_model_len):
            seq.token_ids += [one.token for one in tokens]
            self.metrics.count_tokens(seq.request.metrics, len(tokens))
            self.blocks.advance(seq, len(tokens) - 1)
            return
        for i, one in enumerate(tokens):
            if i:
                self.blocks.advance(seq, 1)
            seq.request.error = seq.request.error or one.error
            if seq.request.error is None:
                self._append(seq, one)
            if seq.status is Status.FINISHED:
                return

    def _append(self, seq: Sequence, one: Sampled) -> None:
        """One more token, which may be the last."""
        token, request = one.token, seq.request
        seq.token_ids.append(token)
        self.metrics.count_tokens(request.metrics, 1)
        if one.logprob is not None:
            seq.cumulative_logprob += one.logprob
        if one.logprobs is not None:
            seq.logprobs.append(self.reporter.named(one.logprobs))
        if self.trace.on:
            at, src = seq.num_tokens - 1, f"{__name__}:Engine._append#caught-up"
            self.trace.emit("sample", src, request=request.number, seq=seq.seq_id, position=at, token=token)
        if end := ending(seq, self.eos_token_ids, self.max_model_len):
            self._finish(seq, *end)

    def _finish(self, seq: Sequence, reason: str, src: str) -> None:
        if seq.status is Status.FINISHED:
            return
        if seq.row >= 0:
            table = self.blocks.tables[seq.row]
            seq.routed_experts = self.runner.storage.experts_of(table, seq.num_computed_tokens)
        self.scheduler.remove(seq)
        seq.status, seq.finish_reason, request = Status.FINISHED, reason, seq.request
        if request.finished:
            request.metrics.finished_time = time.monotonic()
            self.metrics.finished_requests += 1
            del self._requests[request.request_id]
        late_stop = seq.text.finish() if seq.text is not None else None
        if late_stop is not None and reason == "length":
            seq.finish_reason, seq.stop_reason = "stop", late_stop
        if self.trace.on:
            why, made = FINISH_REASONS.index(seq.finish_reason), seq.num_tokens - seq.num_prompt_tokens
            self.trace.emit("finish", src, request=request.number, seq=seq.seq_id, reason=why, tokens=made)

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        seq = Sequence(self._next_seq_id, request, index)
        if self.text is not None and request.params.detokenize:
            seq.text = self.text.text_state(request.params, request.prompt_token_ids)
        self._next_seq_id += 1
        request.sequences.append(seq)
        return seq
