"""Reference solutions of notebook 02, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "02.1": """
import math

def imbalance(counts):
    total = sum(counts)
    shares = [n / total for n in counts if n > 0]
    return max(counts) / (total / len(counts)), -sum(p * math.log2(p) for p in shares)
""",
}

WRONG = {
    "02.1": [
        # natural logarithm
        """
import math

def imbalance(counts):
    total = sum(counts)
    return max(counts) * len(counts) / total, -sum(n / total * math.log(n / total) for n in counts if n)
""",
        # the mean over busy experts only
        """
import math

def imbalance(counts):
    busy = [n for n in counts if n]
    total = sum(busy)
    return max(busy) / (total / len(busy)), -sum(n / total * math.log2(n / total) for n in busy)
""",
        # log of 0
        """
import math

def imbalance(counts):
    total = sum(counts)
    return max(counts) * len(counts) / total, -sum(n / total * math.log2(n / total) for n in counts)
""",
    ],
}
