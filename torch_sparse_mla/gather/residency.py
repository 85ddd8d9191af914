"""Which records of which requests lie in resident buffers, and where: the host's side of the incremental gather.

residency = Residency(sizes)                          sizes with `resident`; one for the buffers of a lane's layers
residency.admit("a", max_length)                      reserves the request's place; False where there is no room
chunk = residency.begin(["a"], lengths, new_lengths)  what is there before the chunk: c4_plan_gather takes its lists
... every layer: c4_prefill_gather, c4_place_records
residency.commit(chunk)                               or abandon(chunk), where a layer failed
residency.truncate("a", length)                       tokens from there on were, or will be, written anew
residency.release("a")                                the place is free for another request

A place belongs to one request from `admit` to `release`, and nothing counts as resident in it before a chunk of that
request is committed, so a record that another request left there is never read. Host integers only: every rank makes
the same calls with the same numbers, and has the same lists.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..errors import reject
from ..sharding import local_length
from .plan import GatherPlan, checked_integers

_OP = "Residency"


@dataclass
class _Place:
    """A reserved run of records in every slice: where it begins, its records, the tokens that they are for, and how
    many of these are resident."""

    start: int
    records: int
    max_length: int
    length: int = 0


@dataclass(frozen=True, eq=False)
class ResidentChunk:
    """A chunk that is under way.

    Attributes:
        keys: its requests.
        lengths: their global lengths.
        starts, resident_lengths: `resident_starts` and `resident_lengths` of `c4_plan_gather`.
    """

    keys: tuple[Hashable, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    resident_lengths: tuple[int, ...]


class Residency:
    """Places of requests in resident buffers `[world, resident, record_bytes]`.

    Args:
        sizes: with `resident` above 0.
    Raises: ValueError for the sizes of a full gather.
    """

    def __init__(self, sizes: GatherPlan) -> None:
        if not sizes.resident:
            reject(_OP, "sizes", "sizes of the full gather", "sizes with resident above 0")
        self.sizes = sizes
        self._places: dict[Hashable, _Place] = {}
        self._open: set[ResidentChunk] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._places

    @property
    def free_records(self) -> int:
        """Records of a slice that no request has; not all of them need lie together."""
        return self.sizes.resident - sum(place.records for place in self._places.values())

    def admit(self, key: Hashable, max_length: int) -> bool:
        """Reserve a place for a request, the first one that is large enough. False, and nothing, where there is none.

        Args:
            key: of the request, such as its number in the engine.
            max_length: the most tokens that it will have while it is admitted.
        Raises: ValueError for a request that is admitted already, or for no tokens.
        """
        if key in self._places:
            reject(_OP, "key", repr(key), "a request that is not admitted; release it when it ends")
        if not isinstance(max_length, int) or max_length < 1:
            reject(_OP, "max_length", repr(max_length), "an integer, 1 or more")
        # The first rank has the most records of any length.
        records = local_length(0, max_length, self.sizes.world, self.sizes.interleave)
        start = self._first_fit(records)
        if start is None:
            return False
        self._places[key] = _Place(start, records, max_length)
        return True

    def release(self, key: Hashable) -> None:
        """Give a request's place back. What still reads its records must come before the next chunk, as on one stream.

        Raises: ValueError for a request that is not admitted, or is part of an open chunk.
        """
        self._place(key)
        self._refuse_open(key)
        del self._places[key]

    def truncate(self, key: Hashable, length: int) -> None:
        """Forget the records of a request from token `length` on: rejected, rolled back, or written anew in its cache.

        Raises: ValueError for a request that is not admitted, or is part of an open chunk, or a negative length.
        """
        place = self._place(key)
        self._refuse_open(key)
        (length,) = checked_integers(_OP, "length", [length])
        if length < 0:
            reject(_OP, "length", length, "0 or more")
        place.length = min(place.length, length)

    def resident_lengths(
        self, keys: Sequence[Hashable], lengths: Sequence[int], new_lengths: Sequence[int]
    ) -> list[int] | None:
        """What is resident of each request before a chunk, for `GatherPolicy.choose`; None if any is not admitted, or
        would outgrow its place."""
        self._check(keys, lengths, new_lengths)
        places = [self._places.get(key) for key in keys]
        if any(place is None or length > place.max_length for place, length in zip(places, lengths, strict=True)):
            return None
        # What a chunk writes is sent, whether or not an earlier one had brought it.
        before = (length - new for length, new in zip(lengths, new_lengths, strict=True))
        return [min(place.length, cached) for place, cached in zip(places, before, strict=True)]

    def begin(self, keys: Sequence[Hashable], lengths: Sequence[int], new_lengths: Sequence[int]) -> ResidentChunk:
        """Begin a chunk. Until it is committed, what it brings does not count as resident.

        Args:
            keys: its requests, in the order of the batch.
            lengths, new_lengths: as for `c4_plan_gather`. Records of the tokens before a request's new ones must be
                what they were when they were brought: call `truncate` where they are not.
        Raises: ValueError for a request that is not admitted, has more tokens than its place, comes twice, or is part
            of an open chunk; nothing is changed then.
        """
        self._check(keys, lengths, new_lengths)
        for request, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            place = self._place(key)
            self._refuse_open(key)
            if length > place.max_length:
                allowed = f"at most {place.max_length}, what request {key!r} was admitted with"
                reject(_OP, "lengths", f"{length} in request {request}", allowed)
        known = self.resident_lengths(keys, lengths, new_lengths)
        for key, length in zip(keys, known, strict=True):
            self._places[key].length = length
        starts = tuple(self._places[key].start for key in keys)
        chunk = ResidentChunk(tuple(keys), tuple(lengths), starts, tuple(known))
        self._open.add(chunk)
        return chunk

    def commit(self, chunk: ResidentChunk) -> None:
        """Every layer's records of a chunk are in place. Raises ValueError for a chunk that is not open."""
        self.abandon(chunk)
        for key, length in zip(chunk.keys, chunk.lengths, strict=True):
            self._places[key].length = length

    def abandon(self, chunk: ResidentChunk) -> None:
        """End a chunk of which not every layer is in place: later ones bring its records again.

        Ranks: all, where one of them failed. Raises ValueError for a chunk that is not open.
        """
        if chunk not in self._open:
            reject(_OP, "chunk", "a chunk that is not open", "what begin() returned, once")
        self._open.remove(chunk)

    def _first_fit(self, records: int) -> int | None:
        start = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - start >= records:
                break
            start = place.start + place.records
        return start if start + records <= self.sizes.resident else None

    def _place(self, key: Hashable) -> _Place:
        if key not in self._places:
            reject(_OP, "key", repr(key), "a request that is admitted; call admit(key, max_length) first")
        return self._places[key]

    def _refuse_open(self, key: Hashable) -> None:
        if any(key in chunk.keys for chunk in self._open):
            reject(_OP, "key", repr(key), "a request of no open chunk; commit or abandon that chunk first")

    def _check(self, keys: Sequence[Hashable], lengths: Sequence[int], new_lengths: Sequence[int]) -> None:
        for name, values in (("lengths", lengths), ("new_lengths", new_lengths)):
            checked_integers(_OP, name, values)
            if len(values) != len(keys):
                reject(_OP, name, f"{len(values)} requests", f"{len(keys)}, as many as keys")
        if len(set(keys)) != len(keys):
            reject(_OP, "keys", list(keys), "each request once")
        for request, (length, new) in enumerate(zip(lengths, new_lengths, strict=True)):
            if not 0 <= new <= length:
                reject(_OP, "new_lengths", f"{new} in request {request}", f"0 to the request's length {length}")
