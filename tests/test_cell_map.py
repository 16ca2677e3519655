"""Grouping and touch map: what their frames say of made-up sorts and accesses, counted by hand; and the watcher itself.

The builder here is a stand-in with the methods of Triton's, over ordinary numpy memory; tests/test_kernels_watched.py has
the real one.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinymoe.core.trace import resolve
from tinymoe.lab.widgets.lessons import grouping as groups
from tinymoe.lab.widgets.lessons.grouping import Grouping
from tinymoe.lab.widgets.lessons.touches import SRC, TouchMap, extent
from tinymoe.lab.widgets.lessons.watch import Stray, Touch, element_name, program_name, watched
from tinymoe.lab.widgets.replay import REPLAY


def made(ids, block_m, num_experts=6):
    """What sort_tokens returns, by loops; ids outside 0..E-1 belong to nobody."""
    order = [p for e in range(num_experts) for p, x in enumerate(ids) if x == e]
    offsets = [sum(0 <= x < e for x in ids) for e in range(num_experts + 1)]
    tiles = [(e, r) for e in range(num_experts) for r in range(offsets[e], offsets[e + 1], block_m)]
    return SimpleNamespace(
        order=torch.tensor(order, dtype=torch.int32),
        offsets=torch.tensor(offsets),
        tile_expert=torch.tensor([e for e, _ in tiles] + [77]),  # what lies behind num_tiles is undefined
        tile_row=torch.tensor([r for _, r in tiles] + [77]),
        num_tiles=torch.tensor([len(tiles)]),
        block_m=block_m,
    )


IDS = [4, 1, 4, 0, 1, 4]  # three tokens, two pairs each
WORDS = ["a", " b", "\n"]


@pytest.fixture
def grouping():
    return Grouping(IDS, made(IDS, 2), words=WORDS, follow=2)


def boxes(widget):
    """[kind, first line] of the boxes in each panel."""
    said = [[c for _, row in p["rows"] for c in row] for p in widget.frame["panels"]]
    return [
        [(c[0], c[1:].split("\n")[0]) for c in (x[0] if isinstance(x, list) else x for x in s)] for s in said
    ]


def test_stages_of_a_grouping(grouping):
    assert [e.kind for e in grouping.moments] == [
        "lie",
        *["count"] * 3,
        "begin",
        *["place"] * 6,
        *["tile"] * 4,
    ]
    assert grouping.controls.decisions == [1, 4, 5, 11]
    said = []
    for n in range(grouping.controls.count):
        grouping.seek(n)
        said.append(grouping.text)
    assert said[0] == "As they lie: 3 tokens with 2 pairs each; pair p belongs to token p // 2."
    assert said[3] == "Count: token 2, '\\n'; now expert 1 has 2 and expert 4 has 3."
    assert (
        said[4]
        == "Prefix sum: expert 0 begins at row 0, expert 1 begins at row 1 and expert 4 begins at row 3."
    )
    assert said[9] == (
        "Place: pair 4, '\\n', goes to row 2: expert 1 begins at row 1, and 1 earlier pair chose it."
    )
    assert said[-1] == (
        "Cut: tile 3 is expert 4, row 5, 1 of 2 in use. In all 4 tiles with room for 8 rows, 6 of them in use."
    )
    assert grouping.table[1:] == [
        [0, "a", 4, 3, 2],
        [1, "a", 1, 1, 1],
        [2, " b", 4, 4, 2],
        [3, " b", 0, 0, 0],
        [4, "\n", 1, 2, 1],
        [5, "\n", 4, 5, 3],
    ]


def test_boxes_of_a_grouping(grouping):
    grouping.seek(7)  # pairs 0, 1 and 2 are placed
    by_token, by_expert = boxes(grouping)
    assert by_token == [("e", "")] * 3 + [(".", "3"), (".", "4"), (".", "5")]
    assert by_expert == [("e", "0"), (".", "1"), ("e", "2"), (".", "0"), ("n", "2"), ("e", "5")]
    grouping.seek(-1)
    assert boxes(grouping)[1] == [
        *((".", "3"), ("r", "")), *((".", "1"), (".", "4")), *((".", "0"), (".", "2")), *(("n", "5"), ("r", "")),
    ]  # fmt: skip
    bundle = json.loads(grouping._repr_mimebundle_()[REPLAY])
    assert (bundle["esm"], len(bundle["frames"])) == ("cell_map", 15)
    assert "#sorted" in resolve(groups.SRC).text
    assert grouping.why()[0].words.startswith("A tile is multiplied with one expert's weights")


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_every_pair_is_in_one_place_at_every_moment(ids, block_m):
    """Also pairs of nobody: they stay where they are, and no tile has them."""
    widget = Grouping(ids, made(ids, block_m), words=[str(p) for p in range(len(ids))])
    for n in range(widget.controls.count):
        widget.seek(n)
        things = [c[1] for panel in boxes(widget) for c in panel if c[0] in ".n" and c[1]]
        assert sorted(things) == sorted(str(p) for p in range(len(ids)))
    tiles = [row for row in widget.frame["panels"][1]["rows"] if "tile" in row[0]]
    assert all(len(cells) == block_m for _, cells in tiles)


def test_a_sort_of_other_ids_is_refused():
    with pytest.raises(ValueError, match="row 0 holds pair 0, which does not belong there"):
        Grouping([1, 0], made([0, 1], 2), words=["a"])
    with pytest.raises(ValueError, match="got 3 pairs, 2 tokens"):
        Grouping([1, 0, 1], made([1, 0, 1], 2), words=["a", "b"])


# The watcher


class Builder:
    """The methods of Triton's interpreter that `watched` stands before; memory is whatever the addresses say."""

    def __init__(self):
        self.grid_idx, self.done = (0, 0, 0), []

    def set_grid_dim(self, *grid):
        self.done.append(("grid", grid))

    def create_masked_load(self, pointers, mask, *rest):
        self.done.append("load")
        return handle(np.zeros(len(pointers.data), np.float32))

    def create_masked_store(self, pointers, value, mask, *rest):
        self.done.append("store")

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        self.done.append("atomic")

    def create_atomic_cas(self, pointer, *rest):
        self.done.append("atomic")


def handle(values):
    return SimpleNamespace(data=np.asarray(values))


def at(tensor, *places):
    return handle((np.array(places) * tensor.element_size() + tensor.data_ptr()).astype(np.uint64))


def test_watcher_names_elements_lanes_and_programs():
    builder, x = Builder(), torch.zeros(3, 10)[:, :4]  # rows of 4, 10 apart
    with watched(builder, x=x) as seen:
        builder.set_grid_dim(2, 3, 1)
        builder.grid_idx = (1, 2, 0)
        got = builder.create_masked_load(at(x, 10, 11, 14, 99), handle([True, True, False, False]), None)
        builder.set_grid_dim(2, 1, 1)
        builder.grid_idx = (1, 0, 0)
        builder.create_masked_store(at(x, 23), None, handle([True]))
        builder.create_atomic_rmw("add", at(x, 0), None, handle([True]))
        builder.create_atomic_cas(at(x, 3), None, None)
    np.testing.assert_array_equal(got.data, [0, 0, np.nan, np.nan])  # no `other`: undefined where masked
    assert seen == [
        Touch(1, (1, 2), "load", "x", (4, 5), (14, 99)),
        Touch(2, (1,), "store", "x", (11,), ()),
        Touch(2, (1,), "atomic", "x", (0,), ()),
        Touch(2, (1,), "atomic", "x", (3,), ()),
    ]
    assert builder.done == [("grid", (2, 3, 1)), "load", ("grid", (2, 1, 1)), "store", "atomic", "atomic"]
    assert not set(vars(builder)) & {"create_masked_load", "set_grid_dim"}  # nothing stays behind


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (4, r"program 0 loads x \+ 4, between two rows of x \(\[3, 4\], a row every 10 elements\)"),
        (24, r"program 0 loads x \+ 24, outside x \(\[3, 4\], the last element is x \+ 23\)"),
        (-1, r"program 0 loads x \+ -1, outside x"),
    ],
)
def test_a_stray_program_is_stopped_before_it_reads(place, message):
    builder, x = Builder(), torch.zeros(3, 10)[:, :4]
    with pytest.raises(Stray, match=message), watched(builder, x=x):
        builder.create_masked_load(at(x, 0, place), handle([True, True]), None)
    assert builder.done == []
    builder.create_masked_load(at(x, place), handle([True]), None)  # watched no more
    assert builder.done == ["load"]


def test_an_address_that_belongs_to_no_tensor_is_named_after_none():
    builder, x = Builder(), torch.zeros(8)
    message = r"^program 0 loads an address in no tensor that you were given$"
    with pytest.raises(Stray, match=message), watched(builder, x=x):
        builder.create_masked_load(at(x, 10_000), handle([True]), None)


def test_masked_lanes_with_other_are_left_alone():
    builder, x = Builder(), torch.zeros(8)
    with watched(builder, x=x):
        got = builder.create_masked_load(at(x, 0, 9), handle([True, False]), handle([7.0, 7.0]))
    assert got.data.tolist() == [0, 0]


def test_names():
    assert (program_name((2,)), program_name((1, 0))) == ("2", "(1, 0)")
    assert element_name("out", 7, [2, 5]) == "out[1, 2]"
    assert extent([3], [8]) == "3"
    assert extent([4, 5, 6], [8]) == "4 to 6"
    assert extent([4, 6], [8]) == "2 elements"
    assert extent([5, 6, 9, 10], [4, 4]) == "rows 1 to 2, columns 1 to 2"
    assert extent([5, 10], [4, 4]) == "2 elements"
    assert extent([5], [4, 4]) == "row 1, column 1"
    assert extent([], [4]) == "nothing"


# The touch map

TOUCHES = [
    Touch(1, (0,), "load", "x", (0, 1), ()),
    Touch(1, (0,), "store", "out", (0, 1), ()),
    Touch(1, (1,), "load", "x", (1, 2), (3, 4)),
    Touch(1, (1,), "store", "out", (1, 2), ()),
]
SHAPES = {"x": [3], "out": [3]}


def test_touch_map_by_program():
    w = TouchMap(TOUCHES, SHAPES)
    assert (w.controls.count, w.controls.decisions) == (2, [0, 1])
    assert w.text == "Program 0 loads x 0 to 1, stores out 0 to 1. So far 2 loaded, 2 stored."
    assert boxes(w) == [[("n", "1"), ("n", "1"), (".", "")], [("s", "0"), ("s", "0"), (".", "")]]
    w.seek(1)
    assert w.text == (
        "Program 1 loads x 1 to 2, stores out 1 to 2. Some lanes are masked off. So far 4 loaded, 4 stored."
    ).replace("Some lanes are masked off", "2 of 4 lanes are masked off each time")
    assert boxes(w) == [
        [("d", "1"), ("n", "2"), ("n", "1"), ("r", ""), ("r", "")],
        [("d", "0"), ("!", "1"), ("s", "1")],  # element 1 was stored by both
    ]
    assert w.table[1:] == [["1", "load", "x", "1 to 2", 2], ["1", "store", "out", "1 to 2", 0]]
    assert [r.words.split(" ")[0] for r in w.why()] == ["The", "What"]
    assert "#note" in resolve(SRC).text


def test_touch_map_by_access_and_two_launches():
    again = [t._replace(launch=2, program=(0,)) for t in TOUCHES[2:]]
    w = TouchMap(TOUCHES[:2] + again, SHAPES, every="access")
    assert (w.controls.count, w.controls.decisions) == (4, [0, 2])
    w.seek(-1)
    assert w.text == "Program 0 stores out 1 to 2. So far 4 loaded, 4 stored."
    bundle = json.loads(w._repr_mimebundle_()[REPLAY])
    assert (bundle["esm"], len(bundle["frames"])) == ("cell_map", 4)


def test_what_a_touch_map_refuses():
    with pytest.raises(ValueError, match="no access was seen"):
        TouchMap([], SHAPES)
    with pytest.raises(ValueError, match="give the shape of out, too"):
        TouchMap(TOUCHES, {"x": [3]})
    with pytest.raises(ValueError, match='every must be "program" or "access"'):
        TouchMap(TOUCHES, SHAPES, every="step")
