"""Which judge an exercise has. The first two digits are the notebook's."""

from collections.abc import Mapping
from types import MappingProxyType

from tinymoe.lab.exercises import caching, paging, routing, scheduling, speculating, tiling
from tinymoe.lab.exercises.judge import Judge

JUDGES: Mapping[str, Judge] = MappingProxyType(
    {
        "00.1": scheduling.first_token,
        "01.1": routing.choose,
        "02.1": routing.imbalance,
        "05.1": tiling.align_block_size,
        "06.1": tiling.silu_and_mul,
        "06.2": tiling.row_mean,
        "06.3": tiling.add_up,
        "07.1": tiling.sort_pairs,
        "07.2": routing.path,
        "08.1": caching.bytes_per_token,
        "08.2": caching.tokens_computed,
        "09.1": paging.pool,
        "09.2": paging.next_block,
        "10.1": paging.hit_tokens,
        "10.2": caching.copy_on_write,
        "12.1": scheduling.plan,
        "16.1": speculating.residual,
        "16.2": speculating.fits,
        "17.1": speculating.best_depth,
    }
)
