"""Page accounting against a naive model: hypothesis drives both through the same life and compares everything.

The naive model keeps plain lists and no counts: who owns a block is found by looking at all tables, the prefix index maps
whole token tuples to blocks, and an undo is a restored copy. A simulated memory is written by slot, so that every table
position can be asked whether its block really holds that prefix.
"""

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.prefix import PrefixIndex, block_key, root_key
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Chunk, Request, Sequence, Status

MAX_LEN, ROWS = 20, 5
RANDOM = st.randoms(use_true_random=True)


def sequence(seq_id=0, tokens=(1, 2, 3), salt=None, **options):
    request = Request(str(seq_id), seq_id, list(tokens), SamplingParams(**options), 0, cache_salt=salt)
    seq = Sequence(seq_id, request)
    request.sequences.append(seq)
    return seq


def letter(r):
    """Nearly always the same: prefixes meet often."""
    return int(r.random() < 0.1)


def manager(num_blocks=8, block_size=4, rows=ROWS, **options):
    return BlockManager(num_blocks, block_size, max_num_seqs=rows, max_model_len=MAX_LEN, **options)


class Naive:
    """The same promises with none of the cleverness."""

    def __init__(self, num_blocks, size, caching):
        self.size, self.caching = size, caching
        self.blank, self.cached = list(range(num_blocks))[::-1], []
        self.tables, self.index = {}, {}  # seq_id -> blocks; (salt, tokens) -> block

    def owners(self, block):
        return sum(table.count(block) for table in self.tables.values())

    def free_list(self):
        return self.blank[::-1] + self.cached

    def take(self):
        if self.blank:
            return self.blank.pop()
        block = self.cached.pop(0)
        self.index = {k: b for k, b in self.index.items() if b != block}
        return block

    def let_go(self, block):
        """After a table entry is gone."""
        if not self.owners(block):
            (self.cached if block in self.index.values() else self.blank).append(block)

    def lookup(self, seq):
        hits = []
        if self.caching and seq.request.params.prompt_logprobs is None:
            for n in range(1, (len(seq.token_ids) - 1) // self.size + 1):
                block = self.index.get((seq.request.cache_salt, tuple(seq.token_ids[: n * self.size])))
                if block is None:
                    break
                hits.append(block)
        return hits

    def admit(self, seq, hits):
        self.tables[seq.seq_id] = list(hits)
        self.cached = [b for b in self.cached if b not in hits]

    def reserve(self, chunks):
        """Try it for real; False and unchanged if a block is missing."""
        before = deepcopy(self.__dict__)
        try:
            copies = []
            for seq, start, *_ in chunks:
                table, index = self.tables[seq.seq_id], start // self.size
                if index < len(table) and self.owners(table[index]) > 1:
                    new = self.take()
                    copies.append((table[index], new))
                    table[index] = new
            for seq, _, stop, _ in chunks:
                table = self.tables[seq.seq_id]
                while len(table) * self.size < stop:
                    table.append(self.take())
            return copies
        except IndexError:
            self.__dict__ = before
            return False

    def settle(self, chunks):
        for seq, start, stop, _ in chunks if self.caching else ():
            for n in range(start // self.size, stop // self.size):
                key = (seq.request.cache_salt, tuple(seq.token_ids[: (n + 1) * self.size]))
                self.index.setdefault(key, self.tables[seq.seq_id][n])

    def undo(self, before):
        """Tables and the order of the free list are as before; blocks whose prefix was dropped are blank now."""
        order = before.free_list()
        self.tables = before.tables
        self.cached = [b for b in before.cached if b in self.index.values()]
        self.blank = order[: len(order) - len(self.cached)][::-1]

    def free(self, seq):
        table = self.tables[seq.seq_id]
        while table:
            self.let_go(table.pop())
        del self.tables[seq.seq_id]


class Pages(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(5, 24), size=st.integers(1, 5), caching=st.sampled_from([True, True, False])
    )
    def start(self, blocks, size, caching):
        self.total, self.size = blocks, size
        self.real = manager(blocks, size, enable_prefix_caching=caching)
        self.naive = Naive(blocks, size, caching)
        self.memory: dict[int, tuple] = {}  # slot -> what was written there: the whole prefix that ends in it
        self.seqs: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.count = 0

    # what the machine writes

    def content(self, seq, position):
        return (seq.request.cache_salt, *seq.token_ids[: position + 1])

    def write(self, chunks, copies, limit=None):
        """Copies, then the tokens by the slots that `place` gives; only the first `limit` if the forward pass dies."""
        for old, new in copies:
            for offset in range(self.size):
                self.memory[new * self.size + offset] = self.memory.get(old * self.size + offset)
        where = [(seq, p) for seq, start, stop, _ in chunks for p in range(start, stop)]
        assert self.real.positions().tolist() == [p for _, p in where]
        slots = self.real.place(0).tolist()
        assert len(slots) == len(set(slots)) == len(where)
        for slot, (seq, p) in list(zip(slots, where))[:limit]:
            self.memory[slot] = self.content(seq, p)

    def pick_chunks(self, r):
        chunks = []
        for seq in r.sample(self.seqs, r.randint(1, len(self.seqs))):
            left = seq.num_tokens - seq.num_computed_tokens
            stop = seq.num_computed_tokens + (left if r.random() < 0.5 else r.randint(1, left))
            chunks.append(Chunk(seq, seq.num_computed_tokens, stop, stop == seq.num_tokens))
        return chunks

    def enter(self, seq):
        hits = self.real.lookup(seq)
        assert hits == self.naive.lookup(seq)
        fits = self.real.count_fitting([Chunk(seq, 0, seq.num_tokens, True)]) == 1
        free = [b for b in self.naive.free_list() if b not in hits]
        assert fits == (len(free) >= -(-seq.num_tokens // self.size) - len(hits))
        if not fits:
            return False
        self.real.admit(seq, hits)
        self.naive.admit(seq, hits)
        assert seq.num_computed_tokens == seq.num_cached_tokens == len(hits) * self.size < seq.num_tokens
        self.seqs.append(seq)
        return True

    # rules

    @precondition(lambda self: len(self.seqs) < ROWS)
    @rule(r=RANDOM)
    def admit(self, r):
        self.count += 1
        tokens = [letter(r) for _ in range(r.randint(1, 12))]
        logprobs = r.choice([None] * 5 + [0])
        self.enter(sequence(self.count, tokens, r.choice([None, None, "a", "b"]), prompt_logprobs=logprobs))

    @precondition(lambda self: self.preempted and len(self.seqs) < ROWS)
    @rule(r=RANDOM)
    def admit_again(self, r):
        seq = r.choice(self.preempted)
        if self.enter(seq):
            self.preempted.remove(seq)

    @precondition(lambda self: self.seqs)
    @rule(r=RANDOM)
    def step(self, r):
        chunks, calls = self.pick_chunks(r), r.choice([1, 1, 2])
        before = deepcopy(self.naive)
        state = (self.real.tables.copy(), self.real.lengths.copy(), self.real.pool.refs.copy())
        free, done, copies = self.real.pool.free_list(), [], []
        for part in (chunks,) if calls == 1 else (chunks[:1], chunks[1:]):
            wanted, unchanged = (
                self.naive.reserve(part),
                (self.real.tables.copy(), self.real.pool.free_list()),
            )
            assert self.real.reserve(part) == (wanted is not False)
            if wanted is not False:
                done += part
                assert len(self.real.place()) == sum(stop - start for _, start, stop, _ in done)
                copies += wanted
            else:
                assert np.array_equal(unchanged[0], self.real.tables)
                assert unchanged[1] == self.real.pool.free_list()
        assert self.real.copies == copies
        if not done:
            self.leave(r.choice(self.seqs))
            return
        if r.random() < 0.25:
            self.write(done, copies, limit=r.randint(0, 8))
            self.real.undo()
            self.naive.undo(before)
            for was, now in zip(state, (self.real.tables, self.real.lengths, self.real.pool.refs)):
                assert np.array_equal(was, now)
            assert free == self.real.pool.free_list()
            return
        self.write(done, copies)
        self.real.settle()
        self.naive.settle(done)
        for seq, _, stop, samples in done:
            assert seq.num_computed_tokens == stop
            if samples:
                self.caught_up(r, seq)

    def caught_up(self, r, seq):
        """A token follows, perhaps different ones for several children; at the length limit it ends."""
        family = [seq]
        for _ in range(r.choice([0, 0, 0, 1, 2])):
            if len(self.seqs) < ROWS:
                self.count += 1
                child = Sequence(self.count, seq.request, 1)
                child.token_ids = list(seq.token_ids)
                self.real.fork(seq, child)
                self.naive.tables[child.seq_id] = list(self.naive.tables[seq.seq_id])
                assert child.num_computed_tokens == seq.num_computed_tokens
                self.seqs.append(child)
                family.append(child)
        for one in family:
            one.token_ids.append(letter(r))
            if one.num_tokens >= MAX_LEN:
                self.leave(one)

    def leave(self, seq):
        self.real.free(seq)
        self.naive.free(seq)
        assert seq.row == -1
        self.seqs.remove(seq)

    @precondition(lambda self: self.seqs)
    @rule(r=RANDOM)
    def free(self, r):
        seq = r.choice(self.seqs)
        self.leave(seq)
        if r.random() < 0.5:
            seq.num_computed_tokens, seq.status = 0, Status.PREEMPTED
            self.preempted.append(seq)

    @rule(r=RANDOM)
    def forget(self, r):
        self.real.pool.forget_prefixes()
        naive = self.naive
        naive.index = {k: b for k, b in naive.index.items() if b not in naive.cached}
        naive.blank, naive.cached = naive.blank + naive.cached, []

    @rule(r=RANDOM, steps=st.integers(10, 40))
    def burst(self, r, steps):
        """Many of them in a row: hypothesis alone seldom goes deep."""
        for _ in range(steps):
            rules = [self.admit] * 2 * (len(self.seqs) < ROWS) + [self.step] * 6 * bool(self.seqs)
            rules += [self.admit_again] * (bool(self.preempted) and len(self.seqs) < ROWS)
            rules += [self.free] * bool(self.seqs) + [self.forget] * (r.random() < 0.05)
            r.choice(rules or [self.forget])(r=r)
            self.same_as_naive()
            self.conserved()
            self.holds_what_it_says()

    # what must always hold

    @invariant()
    def same_as_naive(self):
        if not hasattr(self, "real"):
            return
        pool = self.real.pool
        assert pool.free_list() == self.naive.free_list()
        assert (pool.num_free, pool.num_cached) == (len(pool.free_list()), len(self.naive.cached))
        for seq in self.seqs:
            length = int(self.real.lengths[seq.row])
            assert self.real.tables[seq.row, :length].tolist() == self.naive.tables[seq.seq_id]
            assert (self.real.tables[seq.row, length:] == -1).all()
        if pool.prefix is not None:
            assert {b for b in range(self.total) if b in pool.prefix} == set(self.naive.index.values())
            assert len(pool.prefix) == len(self.naive.index)

    @invariant()
    def conserved(self):
        if not hasattr(self, "real"):
            return
        pool, used = (
            self.real.pool,
            [b for s in self.seqs for b in self.real.tables[s.row].tolist() if b >= 0],
        )
        assert pool.refs.tolist() == np.bincount(np.array(used, dtype=int), minlength=self.total).tolist()
        assert sorted([*pool.free_list(), *set(used)]) == list(range(self.total))
        assert [pool.is_free(b) for b in range(self.total)] == [b not in used for b in range(self.total)]
        assert len({s.row for s in self.seqs}) == len(self.seqs)

    @invariant()
    def holds_what_it_says(self):
        if not hasattr(self, "real"):
            return
        for seq in self.seqs:
            table = self.real.tables[seq.row].tolist()
            for p in range(seq.num_computed_tokens):
                slot = table[p // self.size] * self.size + p % self.size
                assert self.memory[slot] == self.content(seq, p)
        for (salt, tokens), block in self.naive.index.items():
            for offset in range(self.size):
                end = len(tokens) - self.size + offset + 1
                assert self.memory[block * self.size + offset] == (salt, *tokens[:end])

    def teardown(self):
        if hasattr(self, "real"):
            for seq in list(self.seqs):
                self.leave(seq)
            assert self.real.pool.num_free == self.total
            assert not self.real.pool.refs.any()
            assert (self.real.tables == -1).all()
            assert sorted(self.real._free_rows) == list(range(ROWS))


Pages.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
TestPages = Pages.TestCase


# Single stories


def run(real, seq, stop=None):
    """Compute tokens up to `stop` in one step."""
    stop = seq.num_tokens if stop is None else stop
    assert real.reserve([Chunk(seq, seq.num_computed_tokens, stop, stop == seq.num_tokens)])
    real.settle()


def admitted(real, *args, **options):
    seq = sequence(*args, **options)
    real.admit(seq, real.lookup(seq))
    return seq


def test_equal_prefixes_share_blocks_and_the_last_token_is_always_left_to_run():
    real = manager()
    first = admitted(real, 1, range(8))
    run(real, first)
    second, longer = admitted(real, 2, range(8)), admitted(real, 3, range(9))
    assert second.num_cached_tokens == 4  # 8 of 8 are known, but the logits of the last token are not
    assert longer.num_cached_tokens == 8
    assert real.pool.refs[real.tables[first.row, 0]] == 3


def test_a_salt_separates_equal_prompts_and_no_salt_is_the_empty_root():
    keys = {root_key(salt) for salt in (None, "", "salt:", "root", "a")}
    assert len(keys) == 5
    real, found = manager(num_blocks=9), []
    for number, salt in enumerate((None, "a", "b")):
        seq = admitted(real, number, range(9), salt)
        assert seq.num_cached_tokens == 0
        run(real, seq)
        real.free(seq)
    for salt in (None, "a", "b"):
        found += real.lookup(sequence(9, range(9), salt))
    assert len(set(found)) == 6


def test_a_key_depends_on_every_token_before_it():
    chain = lambda tokens: block_key(block_key(root_key(None), tokens[:2]), tokens[2:])  # noqa: E731
    assert chain([1, 2, 3, 4]) == chain([1, 2, 3, 4])
    assert (
        len({chain(t) for t in ([1, 2, 3, 4], [9, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, 9], [2, 1, 3, 4])}) == 5
    )


def test_a_second_block_of_the_same_content_stays_out_of_the_index():
    index = PrefixIndex()
    assert index.add(b"k", 3)
    assert not index.add(b"k", 4)
    index.drop(4)
    assert index.find([b"k"]) == [3]
    index.drop(3)
    assert index.find([b"k"]) == []


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head():
    real = manager(num_blocks=4, block_size=2)
    old, new = admitted(real, 1, [1, 1, 1, 1]), admitted(real, 2, [2, 2, 2, 2])
    run(real, old)
    run(real, new)
    real.free(old)
    real.free(new)
    assert real.pool.num_cached == 4
    run(real, admitted(real, 3, [3]))
    assert len(real.lookup(sequence(4, [1, 1, 1, 1, 1]))) == 1  # the tail of the older one had to go
    assert len(real.lookup(sequence(5, [2, 2, 2, 2, 2]))) == 2


def test_blank_blocks_are_used_before_a_prefix_is_evicted():
    real = manager(num_blocks=4, block_size=2)
    seq = admitted(real, 1, [1, 1, 1])
    run(real, seq)
    real.free(seq)
    run(real, admitted(real, 2, [2, 2, 2, 2, 2]))
    assert len(real.lookup(sequence(3, [1, 1, 1]))) == 1


@pytest.mark.parametrize(("children", "copies"), [(1, 1), (3, 3)])
def test_the_last_writer_of_a_shared_block_keeps_it(children, copies):
    real = manager()
    parent = admitted(real, 1, range(6))
    run(real, parent)
    family = [parent]
    for number in range(children):
        child = Sequence(10 + number, parent.request, number + 1)
        real.fork(parent, child)
        family.append(child)
    for seq in family:
        seq.token_ids.append(seq.seq_id)
    assert real.reserve([Chunk(seq, 6, 7, True) for seq in family])
    assert len(real.copies) == copies
    assert len({int(real.tables[s.row, 1]) for s in family}) == children + 1
    assert len({int(real.tables[s.row, 0]) for s in family}) == 1
    assert real.tables[family[-1].row, 1] in [old for old, _ in real.copies]


def test_reserve_takes_all_or_nothing():
    real = manager(num_blocks=3)
    a, b = admitted(real, 1, range(8)), admitted(real, 2, range(8, 16))
    free = real.pool.free_list()
    assert not real.reserve([Chunk(a, 0, 8, True), Chunk(b, 0, 8, True)])
    assert real.pool.free_list() == free
    assert (real.tables == -1).all()
    assert real.reserve([Chunk(a, 0, 8, True), Chunk(b, 0, 4, False)])


def test_tokens_without_settle_are_not_found_by_others():
    real = manager()
    seq = admitted(real, 1, range(9))
    assert real.reserve([Chunk(seq, 0, 8, False)])
    assert real.lookup(sequence(2, range(9))) == []
    real.settle()
    assert len(real.lookup(sequence(2, range(9)))) == 2


def test_truncate_gives_back_the_blocks_behind():
    real = manager()
    seq = admitted(real, 1, range(10))
    run(real, seq)
    assert real.lengths[seq.row] == 3
    real.truncate(seq, 5)
    assert real.lengths[seq.row] == 2
    assert real.pool.num_free == 6
    assert real.tables[seq.row, 2] == -1
