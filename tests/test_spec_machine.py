"""Speculation under any order of arrivals, aborts, failures, preemptions and steps: pages are conserved after every one of them,
and whatever ends has ended with the tokens of the plain loop."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_spec_exactness import SPECS, guessing
from tiny_models import GREEDY, NEW, alone, cases, seeded, tokens_of

from tinymoe.core.sequence import Status


class Broken(RuntimeError):
    pass


class Speculation(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(["moe", "window", "dense"]),
        how=st.sampled_from([*SPECS]),
        size=st.sampled_from([1, 2, 3, 7]),
        spare=st.sampled_from([0, 2, 9, 60]),
        budget=st.sampled_from([3, 9, 30, 200]),
        seats=st.integers(2, 6),
        caching=st.booleans(),
        adaptive=st.booleans(),
    )
    def begin(self, name, how, size, spare, budget, seats, caching, adaptive):
        self.name, self.made, self.wanted, self.got = name, 0, {}, {}
        self.one = guessing(
            name,
            how,
            spec={"adaptive": adaptive},
            block_size=size,
            num_blocks=-(-60 // size) + spare,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
        )
        self.write = self.one.runner.storage.write

    @rule(
        case=st.integers(0, 6),
        kind=st.sampled_from(["greedy", "seeded", "two"]),
        drafts=st.sampled_from([None, None, 0, 1]),
        short=st.integers(1, NEW),
    )
    def arrive(self, case, kind, drafts, short):
        key, self.made = str(self.made), self.made + 1
        options = {"num_speculative_tokens": drafts, "max_tokens": short, "n": 2 if kind == "two" else 1}
        params = GREEDY.clone(**options | {"n": 1}) if kind == "greedy" else seeded(case, **options)
        self.one.add_request(key, cases(self.name)[case].prompt, params)
        if kind == "greedy":
            self.wanted[key] = [cases(self.name)[case].answer[:short]]
        else:
            self.wanted[key] = [alone(self.name, case, case + i)[:short] for i in range(params.n)]

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.got |= {o.request_id: o for o in self.one.step()}

    @precondition(lambda self: self.one.scheduler.running)
    @rule(layer=st.integers(0, 1))
    def fail(self, layer):
        """The forward pass breaks off; what was reserved, drafts included, must go back."""
        blocks, running = self.one.blocks, list(self.one.scheduler.running)
        before = blocks.pool.free_list(), blocks.pool.refs.tolist(), blocks.tables.copy()

        def broken(at, *arguments):
            if at >= layer:
                raise Broken
            self.write(at, *arguments)

        self.one.runner.storage.write = broken
        try:
            self.got |= {o.request_id: o for o in self.one.step()}
        except Broken:
            if running == self.one.scheduler.running:  # nobody was admitted or preempted before it broke
                assert before[:2] == (blocks.pool.free_list(), blocks.pool.refs.tolist())
                np.testing.assert_array_equal(before[2], blocks.tables)
        finally:
            self.one.runner.storage.write = self.write

    @precondition(lambda self: self.wanted)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        key = [*self.wanted][which % len(self.wanted)]
        last = self.one.abort_request(key)
        if last is not None:
            for tokens, wanted in zip(tokens_of(last), self.wanted.pop(key)):
                assert tokens == wanted[: len(tokens)]

    @precondition(lambda self: self.one.scheduler.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which):
        running = self.one.scheduler.running
        self.one.scheduler._preempt(running[which % len(running)])

    @invariant()
    def conserved(self):
        if not hasattr(self, "one"):
            return
        blocks, running = self.one.blocks, self.one.scheduler.running
        used = [b for s in running for b in blocks.tables[s.row].tolist() if b >= 0]
        assert (
            blocks.pool.refs.tolist()
            == np.bincount(np.array(used, int), minlength=blocks.pool.num_blocks).tolist()
        )
        for seq in running:
            assert seq.status is Status.RUNNING
            assert seq.num_computed_tokens <= seq.num_tokens
            assert not seq.draft_token_ids or seq.num_drafts
            # Not a page beyond what is computed: drafts have left nothing behind.
            assert blocks.lengths[seq.row] <= blocks.blocks_for(max(1, seq.num_computed_tokens)), seq

    def teardown(self):
        if not hasattr(self, "one"):
            return
        while self.one.has_unfinished_requests():
            self.got |= {o.request_id: o for o in self.one.step()}
        for key, wanted in self.wanted.items():
            assert tokens_of(self.got[key]) == wanted, key
        pool = self.one.blocks.pool
        assert pool.num_free == pool.num_blocks
        assert not pool.refs.any()
        assert (self.one.blocks.tables == -1).all()


Speculation.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSpeculation = Speculation.TestCase
