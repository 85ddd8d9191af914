"""A Transformers cache layer that keeps sparse-MLA tokens as CKV records in pages.

write: new latents and RoPE parts -> `write_ckv_records` -> pages.
read: selected tokens -> slots, for `sparse_ckv_decode`.
One `TokenPages` is shared by all layers of a cache: token t of a sequence has the same slot in every layer.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers.cache_utils import CacheLayerMixin

from .. import sharding
from ..records.api import write_ckv_records
from ..records.layouts import LATENT_DIM, LAYOUTS
from .loopback_ranks import MAX_STEP_QUERIES, LoopbackRanks
from .process_ranks import ProcessRanks, peer_caches

_names = itertools.count()


@dataclass(frozen=True)
class Dcp:
    """Decode context parallelism: `world` shards, each with its own records and its own attention.

    Attributes:
        world: shards; 1 is an ordinary cache.
        interleave: consecutive tokens that one shard owns; divides the page size.
        strategy: how decode steps attend. "in_place": all heads over each shard, then a merge; nothing travels. Else a
            strategy of `torch_sparse_mla.dcp.DcpSparseDecode`: each shard is a loopback rank with its share of the
            heads, and all that it does not own reaches it through channels. Prompts are attended to in place.
        processes: each shard in a process of its own, those of the default group of `torch.distributed`, which all run
            the same model on the same tokens. Else all shards are in this process.
    """

    world: int = 1
    interleave: int = 4
    strategy: str = "in_place"
    processes: bool = False

    @property
    def shards(self) -> Sequence[int]:
        """The shards that are here."""
        return [dist.get_rank()] if self.processes else range(self.world)


@dataclass(frozen=True)
class CacheSettings:
    """What `convert` fixes: record layout, sharding, records in a page."""

    layout: str
    dcp: Dcp = field(default_factory=Dcp)
    page_size: int = 64


@dataclass(frozen=True, eq=False)
class NewStates:
    """Latents [batch, 1, tokens, 512] and RoPE parts [batch, 1, tokens, 64 or 0] that are in no cache yet."""

    latent: torch.Tensor
    rope: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.latent.shape


class TokenPages:
    """Where the tokens of a batch of sequences lie.

    The block table [batch, blocks] gives a sequence's pages, the same on every shard. Pages are dealt in a random but
    fixed order, as after some time in a server: nothing may rely on pages that follow each other.
    """

    def __init__(self, settings: CacheSettings, batch: int, max_len: int, device: torch.device | str) -> None:
        for name, value in (("batch", batch), ("max_len", max_len)):
            if value < 1:
                raise ValueError(
                    f"torch_sparse_mla.integrations.transformers.new_cache: {name}: got {value}; allowed: 1 up"
                )
        self.settings, self.batch, self.max_len = settings, batch, max_len
        self.num_pages = batch * self.blocks_of(max_len)
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(0), device="cpu")
        self.block_table = order.view(batch, -1).to(device)
        dcp = settings.dcp
        self.ranks = None
        if dcp.strategy != "in_place":
            self.ranks = ProcessRanks() if dcp.processes else LoopbackRanks()
        # Of processes, the only memory that peer_read can use.
        self.peers = None
        if dcp.processes and dcp.strategy in ("auto", "peer_read"):
            self.peers = peer_caches(torch.device(device), f"transformers.pages{next(_names)}")
        # The most Shared layers that follow a Full layer.
        self.shared_layers = 0
        # Set while a step of fixed shapes runs: where its tokens go, int64 [1] on the device.
        self.position: torch.Tensor | None = None
        self._new = (None, None, None)
        self._resized: TokenPages | None = None
        self.forget_selection()

    def forget_selection(self) -> None:
        """Let go of the last forward's selection and mask, which grows with queries x context."""
        self._selected = (None, None, None)

    def of_batch(self, batch: int) -> "TokenPages":
        """These pages, or those of another number of sequences: one object for all layers that ask in turn."""
        if batch == self.batch:
            return self
        if self._resized is None or self._resized.batch != batch:
            self._resized = TokenPages(self.settings, batch, self.max_len, self.block_table.device)
        return self._resized

    def pool(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """A layer's pool of records. Collective where other processes can read it."""
        if self.peers is None:
            return _pool(shape, torch.uint8, self.block_table.device)
        with torch.inference_mode(False):
            return self.peers.empty(*shape)

    def blocks_of(self, length: int) -> int:
        """Pages that a sequence of `length` tokens takes on shard 0, which holds the most."""
        dcp = self.settings.dcp
        return -(-sharding.local_length(0, length, dcp.world, dcp.interleave) // self.settings.page_size)

    def check_room(self, length: int, batch: int, count: int) -> None:
        """Raise ValueError unless `count` tokens of `batch` sequences fit behind the first `length`."""
        if batch != self.batch:
            raise ValueError(
                f"torch_sparse_mla.integrations.transformers: batch: got {batch} sequences; allowed: {self.batch}, as "
                "new_cache was told (for beam search, batch x num_beams)"
            )
        if length + count > self.max_len:
            raise ValueError(
                f"torch_sparse_mla.integrations.transformers: tokens: got {count} more after {length}; allowed: up to "
                f"max_len = {self.max_len} of new_cache in all. Nothing was written; make a cache with a larger max_len"
            )

    def slots_of_new(self, start: int, count: int) -> list[torch.Tensor]:
        """Slots of tokens start .. start + count - 1 of every sequence: per shard int64 [batch * count]."""
        if self.position is not None:
            tokens = self.places_of_new(count).expand(self.batch, count)
            return [shard.flatten() for shard in self._slots(tokens)]
        if not torch.compiler.is_compiling() and self._new[:2] == (start, count):
            return self._new[2]
        tokens = torch.arange(start, start + count, device=self.block_table.device).expand(self.batch, count)
        slots = [shard.flatten() for shard in self._slots(tokens)]
        if not torch.compiler.is_compiling():
            self._new = (start, count, slots)
        return slots

    def places_of_new(self, count: int) -> torch.Tensor:
        """Positions [count] of a static step's tokens."""
        return self.position + torch.arange(count, device=self.position.device)

    def slots_of_selected(self, tokens: torch.Tensor, visible: torch.Tensor | None) -> list[torch.Tensor]:
        """Slots of the tokens that each query selected.

        Args:
            tokens: [batch, queries, K] integer positions; -1 absent.
            visible: [batch, 1, queries, length] attention mask, boolean or additive; selected tokens that it hides are
                absent. None: all count.
        Returns: per shard int32 [batch * queries, K]; -1 where absent or another shard's.
        """
        # Shared layers pass the objects that their Full layer made: translate once. The references kept here make sure
        # that no later tensor can be taken for one of them.
        if not torch.compiler.is_compiling() and self._selected[0] is tokens and self._selected[1] is visible:
            return self._selected[2]
        slots = [shard.flatten(0, 1).int() for shard in self._slots(self.visible_tokens(tokens, visible))]
        if not torch.compiler.is_compiling():
            self._selected = (tokens, visible, slots)
        return slots

    @staticmethod
    def visible_tokens(tokens: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """Selected tokens [batch, queries, K], int64, those that the attention mask hides replaced by -1."""
        tokens = tokens.long()
        if visible is None:
            return tokens
        seen = visible[:, 0].expand(*tokens.shape[:2], -1).gather(-1, tokens.clamp(min=0))
        if seen.dtype != torch.bool:
            seen = seen > torch.finfo(seen.dtype).min / 2
        return torch.where(seen, tokens, -1)

    def _slots(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        page_size, dcp = self.settings.page_size, self.settings.dcp
        return [
            sharding.local_slots(tokens, self.block_table, page_size, shard, dcp.world, dcp.interleave)
            for shard in dcp.shards
        ]


class SparseMlaLayer(CacheLayerMixin):
    """One sparse-MLA layer's records, a paged pool per shard, and its index keys.

    `update` returns the layer itself in place of key and value states: the attention function reads records.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, pages: TokenPages) -> None:
        super().__init__()
        settings = pages.settings
        self.pages = pages
        self.batch_size = pages.batch
        shape = (pages.num_pages, settings.page_size, LAYOUTS[settings.layout].record_bytes)
        self.records = [pages.pool(shape) for _ in settings.dcp.shards]
        self.index_keys: torch.Tensor | None = None
        self.is_initialized = True
        # This step's latents and RoPE parts, for records that were fetched before they were written.
        self.current: tuple[torch.Tensor, torch.Tensor | None] | None = None
        # The Shared layers that reuse this layer's selection, in order; a Shared layer's place among them.
        self.followers: list[SparseMlaLayer] = []
        self.place: int | None = None
        # Set in the first layer of a cache while a forward runs, and left so by one that fails.
        self.in_forward = False
        self._set_length(0)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch_size, 1, self.length, LATENT_DIM)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do: the pool is as large as `new_cache` was told, from the start."""

    def update(
        self, latent: torch.Tensor | NewStates, rope: torch.Tensor | NewStates, *args: object, **kwargs: object
    ) -> tuple["SparseMlaLayer", "SparseMlaLayer"]:
        # Transformers 5.17 calls `expand_kv` before `update`, later versions after it.
        if isinstance(latent, NewStates):
            latent, rope = latent.latent, latent.rope
        batch, _, count, _ = latent.shape
        self.pages.check_room(self.length, batch, count)
        latent_rows, rope_rows = _record_rows(latent), _record_rows(rope)
        for records, slots in zip(self.records, self.pages.slots_of_new(self.length, count), strict=True):
            write_ckv_records(latent_rows, rope_rows, slots, records, self.pages.settings.layout)
        if self.pages.ranks is not None:
            self.current = (latent_rows, rope_rows) if count <= MAX_STEP_QUERIES else None
        # A static step's length is the business of whoever runs it.
        if self.pages.position is None:
            self._set_length(self.length + count)
        return self, self

    def update_indexer(self, index_keys: torch.Tensor) -> torch.Tensor:
        """Append index keys [batch, count, width] of the tokens that `update` has just written; returns all of them."""
        batch, count, width = index_keys.shape
        if self.index_keys is None:
            self.index_keys = _pool((batch, self.pages.max_len, width), index_keys.dtype, index_keys.device)
        if self.pages.position is not None:
            self.index_keys.index_copy_(1, self.pages.places_of_new(count), index_keys)
            return self.index_keys
        self.index_keys[:, self.length - count : self.length] = index_keys
        return self.index_keys[:, : self.length]

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.pages.max_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.pages.position is None else self.pages.max_len), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; as in Transformers, their number comes with a minus sign."""
        if not -self.length <= tokens_to_remove <= 0:
            raise ValueError(
                f"torch_sparse_mla.integrations.transformers: crop: tokens_to_remove: got {tokens_to_remove}; allowed: "
                f"{-self.length}..0 (minus the number of tokens to remove)"
            )
        self._set_length(self.length + tokens_to_remove)

    def reset(self) -> None:
        self.in_forward = False
        self.pages.forget_selection()
        self._set_length(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence beam_idx[i]; two beams of one parent part ways at the next token.

        Records are copied, not block tables: a step of beam search reads and writes every record and index key of the
        sequences so far, and for that long takes as much memory again as one layer's.
        """
        self._take_sequences(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` copies, next to each other. Copies records, as `reorder_cache` does."""
        self._take_sequences(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences (numbers, or a boolean per sequence). Copies records, as `reorder_cache` does."""
        self._take_sequences(torch.arange(self.batch_size, device=indices.device)[indices])

    def offload(self) -> None:
        self._refuse_offloading("offload")

    def prefetch(self) -> None:
        self._refuse_offloading("prefetch")

    def _refuse_offloading(self, function: str) -> None:
        raise ValueError(
            f"torch_sparse_mla.integrations.transformers: {function}: got a sparse-MLA layer, whose records stay where "
            "attention reads them; allowed: a cache without offloading"
        )

    def _take_sequences(self, rows: torch.Tensor) -> None:
        rows = rows.to(self.pages.block_table.device)
        old, new = self.pages, self.pages.of_batch(len(rows))
        blocks = old.blocks_of(self.length)
        source, target = old.block_table[rows, :blocks], new.block_table[:, :blocks]
        for shard, records in enumerate(self.records):
            taken = records[source]
            if new is not old:
                self.records[shard] = _pool((new.num_pages, *records.shape[1:]), records.dtype, records.device)
            self.records[shard][target] = taken
        if self.index_keys is not None:
            taken = self.index_keys[rows, : self.length]
            if new is not old:
                shape = (new.batch, *self.index_keys.shape[1:])
                self.index_keys = _pool(shape, self.index_keys.dtype, self.index_keys.device)
            self.index_keys[:, : self.length] = taken
        self.pages, self.batch_size = new, new.batch
        self._set_length(self.length)

    def _set_length(self, length: int) -> None:
        self.length = length
        # The glm5_next indexer asks for the shape of `keys` and for nothing else: zero strides, one byte.
        self.keys = self.records[0].view(-1)[:1].expand(self.batch_size, 1, length, 1)


def _pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that can be written in and out of inference mode, whichever the first forward ran in."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def _record_rows(states: torch.Tensor) -> torch.Tensor | None:
    """[batch, 1, tokens, width] as the [batch * tokens, width] that records are made of; None for width 0."""
    if states.shape[-1] == 0:
        return None
    rows = states.reshape(-1, states.shape[-1])
    return rows.float() if rows.dtype == torch.float64 else rows
