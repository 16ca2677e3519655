"""One step from its chunks to its tokens, and the step after it, started before those tokens are known.

While a GPU decodes, the host would wait for the tokens, book them, choose the next step and launch it, and meanwhile the
GPU would idle. But as long as every sequence just decodes, the next step is known but for its token ids, and those are
on the GPU: so it is launched at once (vLLM calls this asynchronous scheduling). A sequence that turns out to have ended has
then run one token too many, into pages that are still its own on the GPU's time line; that token is dropped.
"""

from tinymoe.cache.blocks import BlockManager
from tinymoe.core.config import EngineConfig
from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.passes import Pending
from tinymoe.engine.forward.runner import Forward, Runner
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.scheduler import Scheduler


class Step:
    """A forward pass under way. settled: its pages and routes are booked already, since another step follows it."""

    __slots__ = ("batch", "forward", "settled")

    def __init__(self, batch: Batch, forward: Forward):
        self.batch = batch
        self.forward = forward
        self.settled = False


class Pipeline:
    """Starts steps and books their pages and routes."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: Runner,
        routes: RouteRecorder,
        max_model_len: int,
    ):
        self.config = config
        self.scheduler = scheduler
        self.blocks = blocks
        self.runner = runner
        self.routes = routes
        self.max_model_len = max_model_len

    def start(self, chunks: list[Chunk], pending: Pending | None) -> Step:
        """Run these chunks, whose blocks are reserved; pending: their drafts, if they are still to come. On a GPU it returns
        before they have run."""
        batch = Batch.build(chunks, self.blocks)
        if pending is not None and not self.runner.flies(batch):
            pending.land()
            batch, pending = Batch.build(chunks, self.blocks), None
        return Step(batch, self.runner.run(batch, self.blocks, pending))

    def follow(self, step: Step) -> Step | None:
        """Book this step and start the next one behind it, if what that will be does not depend on this one's tokens."""
        batch = step.batch
        if step.settled or not self.config.async_scheduling or not self._certain(step):
            return None
        self.blocks.settle(index=False)
        self.routes.settle()  # before another graph overwrites where the experts are
        step.settled = True
        step.forward = step.forward._replace(logits=None)  # the graph that follows writes there
        chunks = [Chunk(chunk.seq, chunk.stop, chunk.stop + 1, True) for chunk in batch.chunks]
        if not self.blocks.reserve(chunks):
            return None
        self.scheduler.follow(chunks)
        ahead = batch._replace(chunks=chunks)  # its tensors are not looked at: a graph runs it
        return Step(ahead, self.runner.follow(ahead, self.blocks))

    def settle(self, step: Step) -> None:
        """The step has run and counts: pages, routes, and now that all its tokens are known, prefixes."""
        if step.settled:
            self.blocks.index(step.batch.chunks)
        else:
            self.blocks.settle()
            self.routes.settle()

    def _certain(self, step: Step) -> bool:
        """Whether the next step decodes these very sequences, whatever their tokens (one that ends early is dropped)."""
        scheduler = self.scheduler
        chunks = step.batch.chunks
        if step.forward.flight is None or len(chunks) != len(scheduler.running):
            return False
        if len(step.batch.token_ids) > len(chunks):  # how many drafts stay, only the tokens tell
            return False
        if scheduler.waiting and len(scheduler.running) < self.config.max_num_seqs:
            return False
        return self.runner.flies(step.batch) and all(map(self._goes_on, chunks))

    def _goes_on(self, chunk: Chunk) -> bool:
        """Not ended already, nor by length with the token that comes."""
        seq: Sequence = chunk.seq
        params, after = seq.request.params, chunk.stop + 1
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, seq.num_prompt_tokens + params.max_tokens)
        told = params.plain and params.prompt_logprobs is None
        return seq.row >= 0 and told and after < limit
