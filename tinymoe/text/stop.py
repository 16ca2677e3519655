"""The text of one sequence while it grows, and the stop strings that end it."""

from collections.abc import Iterable

from tinymoe.core.params import SamplingParams
from tinymoe.text.detokenize import Decoding, IncrementalDetokenizer


class StopChecker:
    """Finds the stop string that is complete first, one character at a time (Knuth, Morris and Pratt 1977).

    At equal ends the first of the list wins. `held` is how many characters at the end of the text may still become
    part of a stop string.
    """

    def __init__(self, stop: tuple[str, ...]):
        self.patterns = [(s, _borders(s)) for s in stop]
        self._matched = [0] * len(stop)  # characters of each stop string that the text ends with

    @property
    def held(self) -> int:
        return max(self._matched, default=0)

    def feed(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """(end in `text`, stop string) of the first one completed; unless armed, completed ones are passed over."""
        for i, char in enumerate(text if self.patterns else ""):
            for j, (stop, borders) in enumerate(self.patterns):
                k = self._matched[j]
                while k and stop[k] != char:
                    k = borders[k]
                k += stop[k] == char
                if k == len(stop):
                    if armed:
                        return i + 1, stop
                    k = borders[k]
                self._matched[j] = k
        return None

    def peek(self, text: str) -> tuple[int, str] | None:
        """What an armed feed(text) would return, without taking the text in."""
        matched = self._matched[:]
        try:
            return self.feed(text)
        finally:
            self._matched = matched


def _borders(pattern: str) -> list[int]:
    """borders[k]: length of the longest proper prefix of pattern[:k] that is also its suffix."""
    borders, k = [0, 0], 0
    for char in pattern[1:]:
        while k and pattern[k] != char:
            k = borders[k]
        k += pattern[k] == char
        borders.append(k)
    return borders


class TextState:
    """The text of one sequence while it is generated, and the stop string that ends it.

    `text` only grows: characters that may belong to a stop string (or to an unfinished character) are kept back
    until that is settled, so a stream never has to take anything back.
    """

    def __init__(self, decoding: Decoding, params: SamplingParams, prompt_token_ids: Iterable[int] = ()):
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                decoding, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_token_ids
            )
        self._checker = StopChecker(params.stop)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._armed = params.min_tokens == 0
        self._done = False
        self._all = ""
        self._safe = 0  # length of the part of _all that may be shown

    @property
    def text(self) -> str:
        return self._all[: self._safe]

    def append(self, token_id: int, num_output_tokens: int, *, ends: bool = False) -> str | None:
        """Take in the next token; returns the stop string that is complete with it, if any.

        num_output_tokens: outputs so far, this one included. No stop string fires while they are fewer than
        min_tokens, nor later for having been completed then. ends: the token is a stop id or eos, whose text is left
        out unless include_stop_str_in_output.
        """
        if self._detokenizer is None or self._done:
            return None
        self._armed = num_output_tokens >= self._min_tokens
        if ends and not self._include:
            return None
        stop = self._take(self._detokenizer.push((token_id,)))
        if stop is None and self._armed and self._checker.patterns:
            # Ending here would make pending characters final: a stop string in them need not wait for more tokens.
            pending = self._detokenizer.pending()
            stop = self._take(pending) if self._checker.peek(pending) else None
        return stop

    def finish(self) -> str | None:
        """The sequence has ended: release what was held back. Returns a stop string found in it, if any. Idempotent."""
        if self._detokenizer is None or self._done:
            return None
        stop = self._take(self._detokenizer.finish())
        self._safe, self._done = len(self._all), True
        return stop

    def _take(self, delta: str) -> str | None:
        found, start = self._checker.feed(delta, armed=self._armed), len(self._all)
        self._all += delta
        if found is None:
            self._safe = len(self._all) - (0 if self._include else self._checker.held)
            return None
        end, stop = start + found[0], found[1]
        self._all = self._all[: end if self._include else end - len(stop)]
        self._safe, self._done = len(self._all), True
        return stop
