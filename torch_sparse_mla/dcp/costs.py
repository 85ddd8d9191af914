"""What each strategy should cost: a model of few terms, the same on every rank."""

import dataclasses
from typing import NamedTuple

import torch

# Of a request whose rows are not known: about 3,000 distinct tokens in four lists of 2,048. An assumption.
ASSUMED_UNION_GROWTH = 0.15
# Costs that may be None.
OPTIONAL = ("attend_peers_us", "moves_us", "moves_nccl_us")


@dataclasses.dataclass(frozen=True)
class LinkCosts:
    """Figures of a link and a device, in microseconds. `warmup` measures those that are not given.

    Attributes:
        hop_us: an exchange that moves next to nothing, where exchanges follow one another as in a graph.
        us_per_byte: a byte that a rank receives, beyond that, in an exchange as large as a layer's.
        attend_local_us: attention of the local heads over whole top-k lists.
        attend_owner_us: attention of all heads over one rank's share of the lists, and the merge.
        attend_peers_us: attention of the local heads that reads every rank's cache itself; None: not possible.
        plan_us: `plan_selection`, and hiding from it what lies beyond a row's length.
        slots_us: `selected_slots`.
        patch_us: bringing this step's tokens into records that were fetched ahead, for all Shared layers of a group:
            `current_token_slots` once, `write_ckv_records` for each.
        cover_us: how much of the travel of records that are fetched ahead is hidden by what the Full layer does
            meanwhile. Measured with its attention alone, which is all that is known here of a model: give the time of
            the whole layer where a transport works beside it. 0: none.
        union_growth: each further row of a request adds this share of a top-k list to the union. Not measured, since it
            depends on the model and its text: see `union_growth`.
        moves_us, moves_nccl_us: what owner_merge adds to its attention by moving queries and partial results, over its
            channels and by NCCL. Measured where there are both; None: two hops and their bytes, and not possible.
    """

    hop_us: float
    us_per_byte: float
    attend_local_us: float
    attend_owner_us: float
    plan_us: float = 0.0
    slots_us: float = 0.0
    cover_us: float = 0.0
    union_growth: float = ASSUMED_UNION_GROWTH
    attend_peers_us: float | None = None
    patch_us: float = 0.0
    moves_us: float | None = None
    moves_nccl_us: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in OPTIONAL:
                continue
            # Written so that NaN fails.
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(
                    f"torch_sparse_mla::LinkCosts: argument '{field.name}': got {value!r}; allowed: finite, 0 or more"
                )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes that decide what is moved: those of `DcpSparseDecode`."""

    world: int
    requests: int
    rows_per_request: int
    heads: int
    topk: int
    record_bytes: int
    query_bytes: int
    partial_bytes: int
    shared_layers: int

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


class Prediction(NamedTuple):
    """Means over a Full layer and the Shared layers that follow it; bytes are those that a rank receives.

    `over`: what moves them, "channel" or "nccl".
    """

    strategy: str
    hops_per_layer: float
    bytes_per_layer: float
    us_per_layer: float
    over: str = "channel"


def predict(sizes: Sizes, costs: LinkCosts) -> list[Prediction]:
    """What each strategy should take, in order of preference where two take equally long."""
    peers, layers = sizes.world - 1, 1 + sizes.shared_layers
    hop, hops = (costs.hop_us, 1) if peers else (0.0, 0)
    moved = moved_bytes(sizes, costs.union_growth) * peers
    travel = hop + moved * costs.us_per_byte
    plan, slots = costs.plan_us / layers, costs.slots_us / layers
    bulk, bulk_hops = travel, hops
    if sizes.shared_layers:
        ahead = hop + sizes.shared_layers * moved * costs.us_per_byte
        bulk = (travel + max(ahead - costs.cover_us, 0.0) + costs.patch_us) / layers
        bulk_hops = 2 * hops / layers
    table = [
        *_owner_merge(sizes, costs, hop, hops),
        Prediction("exchange", hops, moved, travel + costs.attend_local_us + plan),
        Prediction("exchange_bulk", bulk_hops, moved, bulk + costs.attend_local_us + plan),
    ]
    if costs.attend_peers_us is not None:
        # Every selected record of every row is read, shared or not: the measured attention has that in it.
        read = sizes.rows * sizes.topk * sizes.record_bytes * peers / sizes.world
        table.append(Prediction("peer_read", hops, read, hop + costs.attend_peers_us + slots))
    return table


def moved_bytes(sizes: Sizes, growth: float) -> float:
    """Selected records of one layer that one rank owns, which an exchange brings to each of its peers."""
    union = min(1 + growth * (sizes.rows_per_request - 1), sizes.rows_per_request) * sizes.topk
    return sizes.requests * union * sizes.record_bytes / sizes.world


def _owner_merge(sizes: Sizes, costs: LinkCosts, hop: float, hops: int) -> list[Prediction]:
    """One row for each way that there is to move queries and partial results."""
    merged = (sizes.world - 1) * sizes.rows * sizes.heads * (sizes.query_bytes + sizes.partial_bytes)
    moves = {"channel": 2 * hop + merged * costs.us_per_byte if costs.moves_us is None else costs.moves_us}
    if costs.moves_nccl_us is not None:
        moves["nccl"] = costs.moves_nccl_us
    attend = costs.attend_owner_us + costs.slots_us / (1 + sizes.shared_layers)
    return [Prediction("owner_merge", 2 * hops, merged, us + attend, over) for over, us in moves.items()]


def union_growth(topk: torch.Tensor, rows_per_request: int) -> float:
    """The figure of that name in `LinkCosts`, from top-k lists of a real step. Reads the device.

    Args:
        topk: [requests * rows_per_request, K] positions; negative: absent.
        rows_per_request: 2 or more.
    Returns: distinct tokens that each further row brought, as a share of a row's own, averaged over requests.
    Raises: ValueError where there is no further row.
    """
    if rows_per_request < 2 or len(topk) == 0 or len(topk) % rows_per_request:
        raise ValueError(
            f"torch_sparse_mla::union_growth: argument 'topk': got {len(topk)} rows of {rows_per_request} a request; "
            "allowed: one request or more, of 2 rows or more"
        )
    growths = []
    for lists in topk.view(-1, rows_per_request, topk.shape[1]).cpu():
        united = len(lists[lists >= 0].unique())
        own = sum(len(row[row >= 0].unique()) for row in lists) / rows_per_request
        growths.append((united / own - 1) / (rows_per_request - 1) if own else 0.0)
    return sum(growths) / len(growths)
