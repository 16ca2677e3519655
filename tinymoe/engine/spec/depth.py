"""How many tokens to propose: as many as the measured acceptance, verify times and draft times make worthwhile.

On a Mixture of Experts a longer verification visits more experts, so speculation can lose (Cascade, arXiv 2506.20675), and may
win again in batches that visit them all anyhow (MoESD, arXiv 2505.19645). So nothing is assumed, and what is not known is
tried: a few steps when it begins or the batch has a new size, and then ever again at a price of at most EXPLORE of the time.
"""

import math
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from tinymoe.engine.spec.estimates import Acceptance, CostModel, DraftTimes, Pace, chances

GAIN = 1.02  # a change of depth must promise 2 % more tokens per second
EXPLORE = 0.015  # share of the time that trying what looks worse may cost
REST, LONGEST_REST = 24, 480  # fewest and most steps between two trials
LOOKED_AT = 16  # while nothing is proposed, one sequence of so many is tried
CHOSEN_FOR = 4  # steps that a choice is good for
DOZE = 8  # steps between two choices while nothing is proposed
CERTAIN = 1e9  # drafts from which a rate is known, if it is simply given
WORTH_A_TRY = 0.8  # of plain decoding's speed must be promised before all requests get drafts for a trial
COUNTED = 8  # steps between two whose experts are counted, where that waits for a GPU


class Options(NamedTuple):
    """What a step could do: the first d + 1 drafts in order of their chance, of those that P passes of the draft reach.

    [P, D] all: whether draft d is among those of p passes, how many drafts that makes, and the step's expected tokens and its
    seconds.
    """

    taken_PD: np.ndarray
    count_PD: np.ndarray
    tokens_PD: np.ndarray
    seconds_PD: np.ndarray

    @property
    def speed_PD(self) -> np.ndarray:
        return self.tokens_PD / self.seconds_PD


class Depth:
    """Chooses depths, step by step. most: num_speculative_tokens; most_experts: of all layers together; most_tokens: of a step
    with drafts (beyond them a GPU has no captured graph)."""

    def __init__(self, most: int, most_experts: float = math.inf, most_tokens: int = 1 << 30):
        self.most, self.most_tokens = most, most_tokens
        pace = Pace()
        self.steps, self.drafts = CostModel(most_experts, pace), DraftTimes(pace)
        self.acceptance = Acceptance(0.7, weight=2.0, fade=0.995)  # of all requests
        self._trials: list[int] = []  # depths of the next steps
        self._met: set[int] = set()  # numbers of sequences, by powers of two, that have been tried
        self._level, self._passes = 0.0, 0  # drafts per sequence, and passes, last time
        self._asleep = False  # whether the last choice was to propose nothing
        self._wakes = False  # whether drafts would pay again if each request were like all by now
        self._since, self._pause = 0, REST  # steps since something else was tried, and until it will be
        self._key, self._chosen = (), []  # for which limits what was chosen
        self._turn = self._steps = 0
        self._tried, self._speed, self._tokens = False, 0.0, 1.0  # of the choice that was not taken

    def choose(
        self,
        rates: Seq[float],
        limits: Seq[int],
        others: int = 0,
        *,
        evidence: Seq[float] | None = None,
        learns: bool = True,
    ) -> list[int]:
        """Depths for sequences with these acceptance rates, at most `limits`; `others` more decode in the step.

        evidence: from how many drafts the rates are known (None: they are certain). learns: whether the time of the step
        will be observed; if not, nothing is tried. For each number of passes that the draft may make, drafts are added in
        the order of the chance that they are reached and kept; what promises the most expected tokens per second of the
        whole step is taken.
        """
        S = len(limits)
        room = self.most_tokens - S - others
        if not any(limits) or room <= 0:
            return [0] * S
        if learns:
            self._meet(S, others)
        if self._trials or not len(self.steps):
            return _uniform(self._trials.pop(0) if self._trials and learns else 0, limits, room)
        self._since += 1
        sequence_D = np.repeat(np.arange(S), limits)
        place_D = np.concatenate([np.arange(limit) for limit in limits]) + 1
        known_S = np.full(S, CERTAIN) if evidence is None else np.asarray(evidence)
        gain_D = chances(np.asarray(rates), known_S, place_D.max())[sequence_D, place_D - 1]
        order_D = np.argsort(-gain_D, kind="stable")
        options = self._options(place_D[order_D], gain_D[order_D], S, others)
        best = self._best(options, S)
        self._passes, last = divmod(best, len(order_D))
        self._level = options.count_PD.flat[best] / S
        self._asleep = not self._level
        if self._asleep:
            usual = np.array([self.acceptance.rate]), np.array([self.acceptance.evidence])
            usual_D = chances(*usual, place_D.max())[0, place_D[order_D] - 1]
            self._wakes = bool(self._best(self._options(place_D[order_D], usual_D, S, others), S))
        if learns and self._since >= self._pause:
            if self._asleep:
                return self._look(options, best, limits)
            best = self._explore(options, best)
        passes, last = divmod(best, len(order_D))
        chosen_D = order_D[: last + 1][options.taken_PD[passes, : last + 1]]
        depths = np.bincount(sequence_D[chosen_D], minlength=S).tolist()
        self._key, self._chosen = ((others, *limits) if self._since else ()), depths  # a trial is not kept
        return depths

    def kept(self, limits: Seq[int], others: int) -> list[int] | None:
        """What was chosen for a step like this one, if that was not long ago; see `choose`."""
        since = self._since + 1
        good = since % CHOSEN_FOR != 0 and since < self._pause and not self._trials
        if not good or (others, *limits) != self._key or not any(limits):
            return None
        self._since = since
        return self._chosen

    def _options(self, place_D: np.ndarray, gain_D: np.ndarray, S: int, others: int) -> Options:
        """For drafts at these places of their sequences, the likeliest first."""
        passes_P = np.arange(place_D.max() + 1)
        taken_PD = place_D <= passes_P[:, None]
        count_PD = taken_PD.cumsum(1)
        tokens_PD = S + others + (taken_PD * gain_D).cumsum(1)
        seconds_PD = self.steps.seconds(S + others, S + others + count_PD)
        seconds_PD = seconds_PD + self.drafts.seconds(S, passes_P)[:, None]
        seconds_PD[S + others + count_PD > self.most_tokens] = math.inf
        return Options(taken_PD, count_PD, tokens_PD, seconds_PD)

    def _best(self, options: Options, S: int) -> int:
        """The fastest, flat; or what lies nearest to the last choice, if that is hardly slower."""
        speed_PD, count_PD = options.speed_PD, options.count_PD
        best = int(speed_PD.argmax())
        passes = min(self._passes, len(count_PD) - 1)
        drafts = int(np.searchsorted(count_PD[passes], round(self._level * S)))
        last = passes * count_PD.shape[1] + min(drafts, count_PD.shape[1] - 1)
        return last if speed_PD.flat[best] < GAIN * speed_PD.flat[last] else best

    def _explore(self, options: Options, best: int) -> int:
        """Something else than the best, now and then: deeper, shallower, or as plain decoding."""
        speed_PD, D = options.speed_PD, options.count_PD.shape[1]
        self._turn += 1
        row, steps = 0, 3  # the first of several plain steps cannot follow another at once
        if self._turn % 2 and 2 * self._passes < len(speed_PD):
            row, steps = 2 * self._passes, 1
        elif self._turn % 4 and self._passes > 1:
            row, steps = self._passes // 2, 1
        self._trials = [0] * (steps - 1)
        other = row * D + int(speed_PD[row].argmax())
        self._wait(options, best, options.seconds_PD.flat[other], options.tokens_PD.flat[other], steps)
        return other

    def _look(self, options: Options, best: int, limits: Seq[int]) -> list[int]:
        """What do drafts bring by now? If they promise nearly what plain decoding does, all get some, twice in a row: the second
        time a draft model has nothing to read first. Otherwise a few sequences suffice, and always the first ones, so that
        there is not much to read."""
        speed_PD = options.speed_PD
        passes = 1 + int(speed_PD[1:].max(1).argmax())
        room = self.most_tokens - int(options.tokens_PD.flat[0])
        depths, self._trials = _uniform(passes, limits, room), [passes, 0, 0]
        if speed_PD[passes].max() < WORTH_A_TRY * speed_PD.flat[best]:
            able = [i for i, limit in enumerate(limits) if limit][: max(1, len(limits) // LOOKED_AT)]
            few = [limit if i in able else 0 for i, limit in enumerate(limits)]
            depths, self._trials = _uniform(passes, few, room), [0, 0]
        at = int(speed_PD[passes].argmax())
        steps = len(self._trials) - 1
        self._wait(options, best, options.seconds_PD[passes, at], options.tokens_PD[passes, at], steps)
        return depths

    def _wait(self, options: Options, best: int, seconds: Any, tokens: Any, steps: int) -> None:
        """The less a trial costs, the sooner comes another; see also `took`."""
        self._speed, self._tokens = options.speed_PD.flat[best], options.tokens_PD.flat[best]
        lost = steps * (seconds * self._speed - tokens) / self._tokens  # in steps
        self._since, self._pause = 0, int(min(max(REST, lost / EXPLORE), LONGEST_REST))
        self._tried = True

    def took(self, seconds: float) -> None:
        """A whole step has taken so long. If something was tried, it may have cost more than thought: what a draft model had to
        read first, for example."""
        if self._tried:
            lost = seconds * self._speed / self._tokens - 1
            self._pause = int(min(max(self._pause, lost / EXPLORE), LONGEST_REST))
        self._tried = False

    def _meet(self, S: int, others: int) -> None:
        """What was learnt of few sequences tells little of many: the first time that there are so many, try again, unless it
        looks hopeless."""
        if (size := (S + others).bit_length()) in self._met or self._trials:
            return
        self._met.add(size)
        if not len(self.steps):  # runs of 0: on a GPU a step that follows another at once is a cheaper one
            most, half = self.most, max(1, self.most // 2)
            self._trials = [most, 0, 0, 0, 1, most, 0, 0, half, half, most, 0, 0]
            return
        depths = np.array(sorted({0, max(1, self.most // 2), self.most}))
        tokens = others + S * np.array([sum(self.acceptance.rate**i for i in range(k + 1)) for k in depths])
        seconds = self.steps.seconds(S + others, others + S * (1 + depths)) + self.drafts.seconds(S, depths)
        worth = depths[tokens / seconds > WORTH_A_TRY * tokens[0] / seconds[0]]
        self._asleep = self._asleep and not len(worth[worth > 0])
        self._trials = [trial for k in worth[worth > 0].tolist() for trial in (k, k, 0, 0)]

    def counts_experts(self) -> bool:
        """Whether to count the experts of the next step where that costs time: while all is new, then now and then."""
        self._steps += 1
        return bool(self._trials) or not len(self.steps) or self._steps % COUNTED == 0

    def knows_enough(self) -> bool:
        """Whether the time of a step without drafts would tell nothing new: one of several in a row is enough."""
        return self._asleep and not self._trials and self._since % CHOSEN_FOR != 0

    def rests(self, n: int) -> bool:
        """Whether the next step will surely propose nothing, whatever the tokens of this one of n tokens are."""
        if self._trials:
            return n in self.steps and self._trials[0] == 0
        return self.dozes(n)

    def dozes(self, sequences: int) -> bool:
        """Whether nothing is proposed in the next step, and nobody needs to ask: see skip(). What is new is met awake: its
        experts have to be counted, which a step that runs ahead cannot do."""
        if not self._asleep or self._trials or sequences not in self.steps:
            return False
        if sequences.bit_length() not in self._met:
            return False
        since = self._since + 1
        return since < self._pause and not (self._wakes and since % DOZE == 0)

    def skip(self) -> None:
        """A step without drafts was not asked about."""
        if self._trials and not self._trials[0]:
            self._trials.pop(0)
        else:
            self._since += 1


def _uniform(depth: int, limits: Seq[int], room: int) -> list[int]:
    """As near to this depth for all as limits and room let it be; where there is no room for all, the first get one each."""
    able = sum(limit > 0 for limit in limits)
    depth = min(depth, max(1, room // max(1, able)))
    depths = [min(depth, limit) for limit in limits]
    if sum(depths) > room:
        before = np.cumsum(depths) - depths
        depths = np.minimum(depths, np.maximum(0, room - before)).tolist()
    return depths
