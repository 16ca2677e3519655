"""How many tokens to propose: as many as the measured acceptance, verify times and draft times make worthwhile.

On a Mixture of Experts a longer verification visits more experts, so speculation can lose (Cascade, arXiv 2506.20675), and may
win again in batches that visit them all anyhow (MoESD, arXiv 2505.19645). So nothing is assumed, and what is not known is
tried: a few steps when it begins or the batch has a new size, and then ever again at a price of at most EXPLORE of the time.
"""

import math
from typing import NamedTuple

import numpy as np

from tinymoe.engine.spec.estimates import Acceptance, CostModel, DraftTimes

GAIN = 1.02  # a change of depth must promise 2 % more tokens per second
EXPLORE = 0.01  # share of the time that trying what looks worse may cost
REST, LONGEST_REST = 24, 240  # fewest and most steps between two trials
DOZE = 16  # steps between two choices while nothing is proposed
WORTH_A_TRY = (
    0.8  # of plain decoding's speed must be promised before a number of requests not met before is tried
)
COUNTED = 8  # steps between two whose experts are counted, where that waits for a GPU


class Options(NamedTuple):
    """What a step could do: the first d + 1 drafts in order of their chance, of those that P passes of the draft reach.

    [P, D] all: whether draft d is among those of p passes, how many drafts that makes, and their tokens per second.
    """

    taken_PD: np.ndarray
    count_PD: np.ndarray
    tokens_PD: np.ndarray
    seconds_PD: np.ndarray

    @property
    def speed_PD(self) -> np.ndarray:
        return self.tokens_PD / self.seconds_PD


class Depth:
    """Chooses depths, step by step. most: num_speculative_tokens; most_experts: of all layers together."""

    def __init__(self, most: int, most_experts: float = math.inf):
        self.most = most
        self.steps = CostModel(most_experts)
        self.drafts = DraftTimes()
        self.acceptance = Acceptance(0.7, weight=2.0, fade=0.995)  # of all requests
        # First, to have something to compare. Runs of 0: on a GPU a step that follows another at once is a cheaper one.
        self._trials = [most, 0, 0, 0, 1, most, 0, 0, max(1, most // 2), most, 0, 0]
        self._met: set[int] = set()  # numbers of sequences, by powers of two, that have been tried
        self._level, self._passes = 0.0, 0  # drafts per sequence, and passes, last time
        self._asleep = False  # whether the last choice was to propose nothing
        self._wakes = False  # whether drafts would pay again if each request were like all by now
        self._since, self._pause = 0, REST  # steps since something else was tried, and until it will be
        self._turn = self._steps = 0

    def choose(self, rates: list[float], limits: list[int], others: int = 0) -> list[int]:
        """Depths for sequences with these acceptance rates, at most `limits`; `others` more decode in the step.

        For each number of passes that the draft may make, drafts are added in the order of the chance that they are reached
        and kept; what promises the most expected tokens per second of the whole step is taken.
        """
        if not any(limits):
            return [0] * len(limits)
        S = len(limits)
        self._meet(S, others)
        if self._trials or not len(self.steps):
            depth = self._trials.pop(0) if self._trials else self.most
            return [min(depth, limit) for limit in limits]
        self._since += 1
        sequence_D = np.repeat(np.arange(S), limits)
        place_D = np.concatenate([np.arange(limit) for limit in limits]) + 1
        gain_D = np.asarray(rates)[sequence_D] ** place_D
        order_D = np.argsort(-gain_D, kind="stable")
        options = self._options(place_D[order_D], gain_D[order_D], S, others)
        best = self._best(options, S)
        self._passes, last = divmod(best, len(order_D))
        self._level = options.count_PD.flat[best] / S
        self._asleep = not self._level
        if self._asleep:
            usual_D = self.acceptance.rate ** place_D[order_D]
            self._wakes = bool(self._best(self._options(place_D[order_D], usual_D, S, others), S))
        if self._since >= self._pause:
            best = self._explore(options, best)
        passes, last = divmod(best, len(order_D))
        chosen_D = order_D[: last + 1][options.taken_PD[passes, : last + 1]]
        return np.bincount(sequence_D[chosen_D], minlength=S).tolist()

    def _options(self, place_D: np.ndarray, gain_D: np.ndarray, S: int, others: int) -> Options:
        """For drafts at these places of their sequences, the likeliest first."""
        passes_P = np.arange(place_D.max() + 1)
        taken_PD = place_D <= passes_P[:, None]
        count_PD = taken_PD.cumsum(1)
        tokens_PD = S + others + (taken_PD * gain_D).cumsum(1)
        seconds_PD = self.steps.seconds(S + others, S + others + count_PD)
        return Options(taken_PD, count_PD, tokens_PD, seconds_PD + self.drafts.seconds(S, passes_P)[:, None])

    def _best(self, options: Options, S: int) -> int:
        """The fastest, flat; or what lies nearest to the last choice, if that is hardly slower."""
        speed_PD, count_PD = options.speed_PD, options.count_PD
        best = int(speed_PD.argmax())
        passes = min(self._passes, len(count_PD) - 1)
        drafts = int(np.searchsorted(count_PD[passes], round(self._level * S)))
        last = passes * count_PD.shape[1] + min(drafts, count_PD.shape[1] - 1)
        return last if speed_PD.flat[best] < GAIN * speed_PD.flat[last] else best

    def _explore(self, options: Options, best: int) -> int:
        """Something else than the best, now and then: things may have changed. The less it costs, the sooner again."""
        speed_PD, D = options.speed_PD, options.count_PD.shape[1]
        self._turn += 1
        if self._asleep:  # a look at what drafts would bring: what costs least for what it teaches
            lost_PD = options.seconds_PD * speed_PD.flat[best] - options.tokens_PD
            other = D + int((lost_PD / np.sqrt(np.maximum(options.count_PD, 1)))[1:].argmin())
            steps, self._trials = 1, [0, 0]
        elif self._turn % 2 and 2 * self._passes < len(speed_PD):
            row = 2 * self._passes
            other, steps = row * D + int(speed_PD[row].argmax()), 1
        elif self._turn % 4 and self._passes > 1:
            row = self._passes // 2
            other, steps = row * D + int(speed_PD[row].argmax()), 1
        else:  # as plain decoding; the first such step cannot follow another at once
            other, steps, self._trials = 0, 3, [0, 0]
        lost = options.seconds_PD.flat[other] * speed_PD.flat[best] - options.tokens_PD.flat[other]
        lost *= steps / options.tokens_PD.flat[best]  # in steps
        self._since, self._pause = 0, int(min(max(REST, lost / EXPLORE), LONGEST_REST))
        return other

    def _meet(self, S: int, others: int) -> None:
        """What was learnt of few sequences tells little of many: the first time that there are so many, try again, unless it
        looks hopeless."""
        if (size := S.bit_length()) in self._met:
            return
        self._met.add(size)
        if self._trials or not len(self.steps):
            return
        depths = np.array(sorted({0, max(1, self.most // 2), self.most}))
        tokens = others + S * np.array([sum(self.acceptance.rate**i for i in range(k + 1)) for k in depths])
        seconds = self.steps.seconds(S + others, others + S * (1 + depths)) + self.drafts.seconds(S, depths)
        worth = depths[tokens / seconds > WORTH_A_TRY * tokens[0] / seconds[0]]
        self._asleep = self._asleep and not len(worth[worth > 0])
        self._trials = [trial for k in worth[worth > 0].tolist() for trial in (k, 0, 0)]

    def counts_experts(self) -> bool:
        """Whether to count the experts of the next step where that costs time: while all is new, then now and then."""
        self._steps += 1
        return bool(self._trials) or self._steps % COUNTED == 0

    def rests(self, n: int) -> bool:
        """Whether the next step will surely propose nothing, whatever the tokens of this one of n tokens are."""
        if n not in self.steps:
            return False
        if self._trials:
            return self._trials[0] == 0
        return self.dozes(n)

    def dozes(self, sequences: int) -> bool:
        """Whether nothing is proposed in the next step, and nobody needs to ask: see skip()."""
        if not self._asleep or self._trials or sequences.bit_length() not in self._met:
            return False
        since = self._since + 1
        return since < self._pause and not (self._wakes and since % DOZE == 0)

    def skip(self) -> None:
        """A step without drafts was not asked about."""
        if self._trials and not self._trials[0]:
            self._trials.pop(0)
        else:
            self._since += 1
