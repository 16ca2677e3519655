"""Whether the newest token of a sequence is its last one."""

from collections.abc import Sequence as Seq

from tinymoe.core.sequence import Sequence
from tinymoe.engine.sampling.sampler import Sampled


def uneventful(seq: Sequence, run: Seq[Sampled], eos_token_ids: Seq[int], max_model_len: int) -> bool:
    """Whether these tokens surely end nothing, and nothing but their ids is to be kept: then they need no look one by one."""
    params, limit = seq.request.params, max_model_len
    if seq.text is not None or params.logprobs is not None:
        return False
    if params.max_tokens is not None:
        limit = min(limit, seq.num_prompt_tokens + params.max_tokens)
    stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
    return seq.num_tokens + len(run) < limit and not any(
        one.error is not None or one.token in stops for one in run
    )


def ending(seq: Sequence, eos_token_ids: Seq[int], max_model_len: int) -> tuple[str, str] | None:
    """Finish reason and src if eos, a stop, or a limit says so (in this order), else None; sets stop_reason, and appends
    the token to the sequence's text."""
    params, token = seq.request.params, seq.token_ids[-1]
    count = seq.num_tokens - seq.num_prompt_tokens
    can_stop = count > params.min_tokens
    end = None
    if can_stop and token in eos_token_ids and not params.ignore_eos:
        end = "stop", f"{__name__}:ending#eos"
    elif can_stop and token in params.stop_token_ids:
        end = "stop", f"{__name__}:ending#stop-token"
        seq.stop_reason = token
    elif count == params.max_tokens or seq.num_tokens >= max_model_len:
        end = "length", f"{__name__}:ending#length"
    if seq.text is not None:
        stop = seq.text.append(token, count, ends=end is not None and end[0] == "stop")
        if stop is not None:
            end = "stop", f"{__name__}:ending#stop-string"
            seq.stop_reason = stop
    return end
