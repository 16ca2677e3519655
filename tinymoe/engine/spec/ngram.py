"""Drafts without a model: what followed the last time that the newest tokens were seen (prompt lookup, Saxena 2023)."""

from tinymoe.core.sequence import Sequence


class Lookup:
    """Remembers where each run of `least` to `most` tokens of one sequence was last followed by another token."""

    __slots__ = ("least", "most", "read", "where")

    def __init__(self, least: int, most: int):
        self.least, self.most = least, most
        self.where: dict[tuple[int, ...], int] = {}  # run -> index of the token that followed it
        self.read = 0

    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Up to `count` tokens to follow token_ids, of the longest newest run that is known; none if none is."""
        for end in range(max(1, self.read), len(token_ids)):
            for n in range(self.least, min(self.most, end) + 1):
                self.where[tuple(token_ids[end - n : end])] = end
        self.read = len(token_ids)
        for n in range(min(self.most, len(token_ids)), self.least - 1, -1):
            at = self.where.get(tuple(token_ids[-n:]))
            if at is not None:
                return token_ids[at : at + count]
        return []


class NgramDrafter:
    """A Lookup for every sequence that runs."""

    def __init__(self, least: int, most: int):
        self.least, self.most = least, most
        self._lookups: dict[int, Lookup] = {}

    def propose(self, seq: Sequence, count: int) -> list[int]:
        """At most `count` tokens to follow seq.token_ids."""
        lookup = self._lookups.get(seq.seq_id)
        if lookup is None:
            lookup = self._lookups[seq.seq_id] = Lookup(self.least, self.most)
        return lookup.propose(seq.token_ids, count)

    def keep(self, seq_ids: set[int]) -> None:
        """Forget everybody else."""
        if len(self._lookups) > 2 * len(seq_ids) + 8:
            self._lookups = {i: lookup for i, lookup in self._lookups.items() if i in seq_ids}
