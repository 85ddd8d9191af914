"""`Residency`: places that never overlap, what counts as resident, and what it refuses."""

import hypothesis
from hypothesis import strategies

from torch_sparse_mla import GatherPlan, Residency

from ..decode.rejections import expect_rejection

SIZES = GatherPlan(4, 64, 64, 4, 4, 8, resident=32)


def make_residency(**lengths: int) -> Residency:
    residency = Residency(SIZES)
    for key, length in lengths.items():
        assert residency.admit(key, length)
    return residency


def test_places_come_one_behind_the_other_and_are_used_again():
    """64 tokens of 4 ranks in runs of 4 are 16 records of each."""
    residency = make_residency(a=64, b=17, c=16)
    chunk = residency.begin(["c", "a", "b"], [1, 1, 1], [1, 1, 1])
    assert chunk.starts == (21, 0, 16)
    residency.commit(chunk)
    assert residency.free_records == 32 - 16 - 5 - 4 and "b" in residency
    residency.release("b")
    assert "b" not in residency and not residency.admit("d", 128)
    assert residency.admit("e", 16) and residency.begin(["e"], [16], [16]).starts == (16,)


def test_what_is_resident_follows_commits():
    residency = make_residency(a=64)
    assert residency.resident_lengths(["a"], [20], [20]) == [0]
    residency.commit(residency.begin(["a"], [20], [20]))
    assert residency.resident_lengths(["a"], [30], [10]) == [20]
    residency.abandon(residency.begin(["a"], [30], [10]))
    assert residency.resident_lengths(["a"], [30], [10]) == [20]
    # Of the tokens before the chunk ten are not resident: another path computed them.
    assert residency.resident_lengths(["a"], [40], [10]) == [20]
    residency.commit(residency.begin(["a"], [40], [10]))
    # Written anew from token 33 on.
    residency.abandon(residency.begin(["a"], [36], [3]))
    assert residency.resident_lengths(["a"], [64], [0]) == [33]
    residency.truncate("a", 50)
    assert residency.resident_lengths(["a"], [64], [0]) == [33]
    residency.truncate("a", 5)
    assert residency.resident_lengths(["a"], [64], [0]) == [5]


def test_a_batch_that_is_not_resident_has_no_lengths():
    residency = make_residency(a=20)
    assert residency.resident_lengths(["a", "b"], [20, 3], [1, 3]) is None
    assert residency.resident_lengths(["a"], [21], [1]) is None
    assert residency.resident_lengths([], [], []) == []


def test_chunks_of_other_requests_may_be_open_together():
    residency = make_residency(a=16, b=16)
    first, second = residency.begin(["a"], [8], [8]), residency.begin(["b"], [8], [8])
    residency.commit(second)
    residency.commit(first)
    assert residency.resident_lengths(["a", "b"], [16, 16], [8, 8]) == [8, 8]


def test_refuses_what_does_not_fit():
    residency = make_residency(a=20, b=20)
    chunk = residency.begin(["a"], [8], [8])
    cases = [
        (lambda: Residency(GatherPlan(4, 64, 64, 4, 4, 8)), "sizes", "sizes with resident above 0"),
        (lambda: residency.admit("a", 5), "key", "release it when it ends"),
        (lambda: residency.admit("c", 0), "max_length", "an integer, 1 or more"),
        (lambda: residency.admit("c", 2.5), "max_length", "an integer, 1 or more"),
        (lambda: residency.release("c"), "key", "call admit(key, max_length) first"),
        (lambda: residency.release("a"), "key", "commit or abandon that chunk first"),
        (lambda: residency.truncate("a", 0), "key", "commit or abandon that chunk first"),
        (lambda: residency.truncate("b", -1), "length", "0 or more"),
        (lambda: residency.truncate("b", 1.5), "length", "integers"),
        (lambda: residency.begin(["b"], [8.0], [8]), "lengths", "integers"),
        (lambda: residency.begin(["a"], [8], [8]), "key", "commit or abandon that chunk first"),
        (lambda: residency.begin(["b", "b"], [8, 8], [8, 8]), "keys", "each request once"),
        (lambda: residency.begin(["b", "c"], [8, 8], [8, 8]), "key", "call admit(key, max_length) first"),
        (lambda: residency.begin(["b"], [21], [1]), "lengths", "at most 20, what request 'b' was admitted with"),
        (lambda: residency.begin(["b"], [8], [9]), "new_lengths", "0 to the request's length 8"),
        (lambda: residency.begin(["b"], [8], []), "new_lengths", "1, as many as keys"),
        (lambda: residency.begin(["b"], [8, 9], [1]), "lengths", "1, as many as keys"),
    ]
    for call, argument, allowed in cases:
        with expect_rejection("Residency", argument, allowed):
            call()
    assert residency.resident_lengths(["b"], [8], [8]) == [0]
    residency.commit(chunk)
    for call in (residency.commit, residency.abandon):
        with expect_rejection("Residency", "chunk", "what begin() returned, once"):
            call(chunk)


def records_of(length: int) -> int:
    """Records of the first rank, which has the most."""
    return sum(token // 4 % 4 == 0 for token in range(length))


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=25)
def test_places_never_overlap_and_none_is_refused_that_fits(data):
    residency, taken = Residency(SIZES), {}
    for key in range(data.draw(strategies.integers(1, 15))):
        if taken and data.draw(strategies.booleans()):
            gone = data.draw(strategies.sampled_from(sorted(taken)))
            residency.release(gone)
            del taken[gone]
        length = data.draw(strategies.integers(1, 80))
        free = set(range(32)).difference(*taken.values())
        needed = records_of(length)
        fits = any(free.issuperset(range(start, start + needed)) for start in range(32 - needed + 1))
        assert residency.admit(key, length) == fits
        if fits:
            chunk = residency.begin([key], [0], [0])
            residency.abandon(chunk)
            taken[key] = set(range(chunk.starts[0], chunk.starts[0] + needed))
            assert free.issuperset(taken[key])
        assert residency.free_records == 32 - sum(map(len, taken.values()))
