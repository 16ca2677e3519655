"""Reference solutions of notebook 01, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "01.1": """
import math

def route(logits, k):
    safe = [-1e30 if math.isnan(x) else x for x in logits]
    ids = sorted(range(len(safe)), key=lambda expert: -safe[expert])[:k]  # sorted is stable: the lower id first
    parts = [math.exp(safe[expert] - safe[ids[0]]) for expert in ids]
    return ids, [part / sum(parts) for part in parts]
""",
}

WRONG = {
    "01.1": [
        # equal logits go to the higher id
        """
import math

def route(logits, k):
    safe = [-1e30 if math.isnan(x) else x for x in logits]
    ids = sorted(range(len(safe)), key=lambda expert: (safe[expert], expert), reverse=True)[:k]
    parts = [math.exp(safe[expert] - safe[ids[0]]) for expert in ids]
    return ids, [part / sum(parts) for part in parts]
""",
        # torch.topk leaves the order of equal logits open
        """
import torch

def route(logits, k):
    values, ids = torch.nan_to_num(torch.tensor(logits), nan=-1e30).topk(k)
    return ids, values.softmax(-1)
""",
        # torch's sort takes NaN for the largest number
        """
import torch

def route(logits, k):
    values, ids = torch.tensor(logits).sort(descending=True, stable=True)
    return ids[:k], values[:k].softmax(-1)
""",
        # no care for NaN at all: comparisons with it are all false, and the order is chance
        """
import math

def route(logits, k):
    ids = sorted(range(len(logits)), key=lambda expert: -logits[expert])[:k]
    parts = [math.exp(logits[expert] - logits[ids[0]]) for expert in ids]
    return ids, [part / sum(parts) for part in parts]
""",
        # exp of a large logit overflows
        """
import math

def route(logits, k):
    safe = [-1e30 if math.isnan(x) else x for x in logits]
    ids = sorted(range(len(safe)), key=lambda expert: -safe[expert])[:k]
    parts = [math.exp(safe[expert]) for expert in ids]
    return ids, [part / sum(parts) for part in parts]
""",
        # the softmax over all experts, not renormalised
        """
import torch

def route(logits, k):
    safe = torch.nan_to_num(torch.tensor(logits), nan=-1e30)
    ids = safe.sort(descending=True, stable=True).indices[:k]
    return ids, safe.softmax(-1)[ids]
""",
        # a NaN counted as 0 beats negative logits
        """
import torch

def route(logits, k):
    safe = torch.nan_to_num(torch.tensor(logits), nan=0.0)
    ids = safe.sort(descending=True, stable=True).indices[:k]
    return ids, safe[ids].softmax(-1)
""",
        # the right order, but where all are NaN: inf - inf
        """
import torch

def route(logits, k):
    safe = torch.nan_to_num(torch.tensor(logits), nan=-torch.inf)
    ids = safe.sort(descending=True, stable=True).indices[:k]
    return ids, safe[ids].softmax(-1)
""",
    ],
}
