"""Chunked prefills of `glm5_next` over ranks, against one rank and against Transformers alone.

One rank and several run the same operators on the same chunks, so that their logits differ by rounding alone; a lost
record, a wrong slot or another selection moves them by more than 1.
"""

import pytest
import torch

from torch_sparse_mla.gather.policy import GatherCosts
from torch_sparse_mla.integrations import prefill_ranks, transformers
from torch_sparse_mla.integrations.sharded_prefill import PrefillClient

from .broken_prefill import forget_the_tail, lose_a_record, shift_slots
from .models import NOPE_LAYOUTS, forward, prompt, shared_model

pytestmark = pytest.mark.usefixtures("inference")

LAYOUT = "bf16_mla_nope"
# Of logits; rounding gives 1e-5, or 1e-3 where it tips a latent over to the next code.
CLOSE = 5e-3
TOKENS = prompt(1, 700, seed=3)[0]
LENGTH = 93


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


def client(world: int = 2, **options: object) -> PrefillClient:
    """A client whose memory holds NaN, so that nothing counts that was not written."""
    options = {"layout": LAYOUT, "max_len": 600, "max_rows": 300, "max_requests": 2} | options
    made = PrefillClient(shared_model("glm5_next"), world=world, **options)
    for layer in made.ranks.layers:
        for memory in (*layer.records, *layer.pools, *layer.rings):
            memory.view(torch.uint8).fill_(0xFF)
    return made


def prefill(client: PrefillClient, tokens: torch.Tensor, chunk: int, request=None) -> torch.Tensor:
    request = client.admit() if request is None else request
    return torch.cat([client.forward({request: part})[request] for part in tokens.split(chunk)])


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    # Written so that NaN fails.
    assert float((ours - expected).abs().max()) <= CLOSE


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Logits of one rank, one chunk."""
    with torch.inference_mode(), client(world=1) as one:
        return prefill(one, TOKENS[:LENGTH], LENGTH)


# 31 and 9 leave a pool open after most chunks. So few rows as 9 would not gather if bytes had a price.
@pytest.mark.parametrize("world, chunk", [(1, 31), (2, LENGTH), (2, 64), (2, 9), (4, LENGTH), (4, 31)])
def test_chunks_over_ranks_give_what_one_chunk_on_one_rank_gives(world, chunk, alone):
    with client(world, costs=GatherCosts(us_per_byte=0.0)) as ranks:
        assert_close(prefill(ranks, TOKENS[:LENGTH], chunk), alone)
        assert ranks.explain()["counts"]["eligible"] == len(ranks.reports) == -(-LENGTH // chunk)


def test_ranks_that_own_nothing_attend_all_the_same(alone):
    with client(4, costs=GatherCosts(us_per_byte=0.0)) as ranks:
        request = ranks.admit()
        parts = [ranks.forward({request: part})[request] for part in TOKENS[:5].split([3, 2])]
        parts += [ranks.forward({request: token}, decode=True)[request] for token in TOKENS[5:9].split(1)]
        assert ranks.explain()["counts"]["eligible"] == 2
    assert_close(torch.cat(parts), alone[:9])


@pytest.mark.parametrize("page_size, interleave", [(256, 8), (512, 4), (512, 256)])
def test_page_sizes_and_interleaves(page_size, interleave, alone):
    with client(4, page_size=page_size, interleave=interleave) as ranks:
        assert_close(prefill(ranks, TOKENS[:LENGTH], 50), alone)


@pytest.mark.parametrize("layout", NOPE_LAYOUTS)
def test_logits_are_those_of_transformers_on_rounded_latents(layout):
    with client(2, layout=layout) as ranks:
        ours = prefill(ranks, TOKENS[:LENGTH], 40)
    model = transformers.fake_quantise(shared_model("glm5_next"), layout)
    expected = model(TOKENS[None, :LENGTH]).logits[0]
    transformers.restore(model)
    difference = (ours - expected).abs().amax(-1)
    # A near tie may send a row to another pool or expert.
    assert int((difference > 0.03).sum()) <= 1


def test_the_serving_form_of_index_keys_is_the_same_on_every_number_of_ranks():
    logits = []
    for world in (1, 2, 4):
        with client(world, index_form="serving") as ranks:
            logits.append(prefill(ranks, TOKENS[:LENGTH], 50))
    assert_close(logits[1], logits[0])
    assert_close(logits[2], logits[0])


def test_requests_share_chunks_and_decode_steps(alone):
    with client(4) as ranks:
        first, second = ranks.admit(), ranks.admit()
        parts = [ranks.forward({first: TOKENS[:50], second: TOKENS[100:117]})]
        parts.append(ranks.forward({second: TOKENS[117:150], first: TOKENS[50:92]}))
        parts.append(ranks.forward({first: TOKENS[92:93], second: TOKENS[150:151]}, decode=True))
        assert_close(torch.cat([part[first] for part in parts]), alone)
        explained = ranks.explain()
        assert explained["counts"]["decode_tokens"] == 1 and explained["channel"]["transport"] == "loopback"
        assert ranks.reports[2]["path"] == "ordinary" and ranks.reports[0]["path"] == "gather"
        together = torch.cat([part[second] for part in parts])
    with client(1) as one:
        assert_close(together, prefill(one, TOKENS[100:151], 51))


def test_rejected_drafts_leave_nothing_behind(alone):
    """Wherever in a pool they begin: neither in an open pool's ring, nor as a pooled key, nor as a record."""
    with client(2) as ranks:
        request = ranks.admit()
        prefill(ranks, TOKENS[:84], 50, request)
        for accepted in range(84, 89):
            for drafts in (5, 1 + accepted % 5):
                mark = ranks.mark(request)
                ranks.forward({request: (TOKENS[accepted : accepted + drafts] + 1) % 1024}, decode=True)
                ranks.roll_back(request, mark)
            assert request.length == accepted
            logits = ranks.forward({request: TOKENS[accepted : accepted + 1]}, decode=True)[request]
            assert_close(logits, alone[accepted : accepted + 1])


def test_roll_backs_one_after_another_go_back_no_further_than_one():
    with client(1) as one:
        request = one.admit()
        prefill(one, TOKENS[:30], 30, request)
        first = one.mark(request)
        prefill(one, TOKENS[30:33], 3, request)
        second = one.mark(request)
        prefill(one, TOKENS[33:37], 4, request)
        one.roll_back(request, second)
        with pytest.raises(ValueError, match="got a mark 7 tokens back; allowed: 0 to 5"):
            one.roll_back(request, first)
        assert request.length == 33


def test_a_mark_ends_with_its_tokens():
    """Others may be written in their place, whose states it does not have."""
    with client(1) as one:
        request = one.admit()
        prefill(one, TOKENS[:30], 30, request)
        first = one.mark(request)
        prefill(one, TOKENS[30:32], 2, request)
        second = one.mark(request)
        one.roll_back(request, first)
        prefill(one, TOKENS[40:43], 3, request)
        with pytest.raises(ValueError, match="got a mark of tokens that were rolled back"):
            one.roll_back(request, second)
        one.roll_back(request, first)
        assert request.length == 30


def share_a_prefix(world: int, **options: object) -> tuple[list[torch.Tensor], dict]:
    """Logits of a prefix of 512 tokens, of two requests that go on from there, and of one that hits it later."""
    with client(world, max_requests=3, **options) as ranks:
        first = ranks.admit()
        whole = prefill(ranks, TOKENS[:512], 256, first)
        prefix = ranks.keep_prefix(first)
        second = ranks.admit(prefix)
        both = ranks.forward({first: TOKENS[512:540], second: TOKENS[600:621]})
        shared = 512 // (256 * world)
        assert first.pages[:shared] == second.pages[:shared] and first.pages[shared] != second.pages[shared]
        ranks.release(first)
        ranks.release(second)
        later = ranks.admit(prefix)
        again = ranks.forward({later: TOKENS[600:621]})[later]
        for held in (later, prefix):
            ranks.release(held)
        assert ranks.pages.free == ranks.pages.count
        return [whole, both[first], both[second], again], ranks.explain()["counts"]


def test_a_prefix_is_shared_and_hit_later():
    """By so few tokens, slices have room for a page: the prefix gathers, the requests behind it do not fit.

    (tests/commands/test_demo_prefill.py has requests behind a prefix that gather.)
    """
    expected, _ = share_a_prefix(1)
    logits, counts = share_a_prefix(2, costs=GatherCosts(us_per_byte=0.0), max_tokens=60)
    assert counts["eligible"] == counts["capacity"] == 2
    for ours, alone in zip(logits, expected, strict=True):
        assert_close(ours, alone)
    # A later request finds what an earlier one found, in pages that others have used meanwhile.
    assert_close(logits[3], logits[2])


def test_what_does_not_fit_or_pay_takes_the_ordinary_path_and_is_counted(alone):
    with client(2, max_rows=50) as ranks:
        request = ranks.admit()
        parts = [ranks.forward({request: part})[request] for part in TOKENS[:LENGTH].split([51, 40, 2])]
        assert_close(torch.cat(parts), alone)
        assert [report["reason"] for report in ranks.reports] == ["rows", "eligible", "cost"]
        assert [report["path"] for report in ranks.reports] == ["ordinary", "gather", "ordinary"]


@pytest.mark.parametrize(
    ("name", "broken"),
    [("c4_prefill_gather_wait", lose_a_record), ("c4_remap", shift_slots), ("c4_merge_pools", forget_the_tail)],
)
def test_the_comparison_has_teeth(name, broken, alone, monkeypatch):
    monkeypatch.setattr(prefill_ranks, name, broken)
    with client(2) as ranks:
        assert float((prefill(ranks, TOKENS[:LENGTH], LENGTH) - alone).abs().max()) > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "fp8_ds_mla"}, "argument 'layout': got 'fp8_ds_mla'; allowed: bf16_mla_nope"),
        ({"world": 3}, "argument 'world': got 3; allowed: a divisor of the model's 16 heads"),
        ({"world": True}, "argument 'world': got True"),
        ({"world": 2, "processes": True}, "a default group that is not initialised"),
        ({"interleave": 2}, "argument 'interleave': got 2; allowed: a multiple of 4"),
        ({"page_size": 64}, "argument 'page_size': got 64; allowed: a multiple of 256"),
        ({"max_len": 0}, "argument 'max_len': got 0"),
        ({"index_form": "fp8"}, "argument 'index_form': got 'fp8'; allowed: exact, serving"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_refuses_settings(options, message):
    model = shared_model("glm5_next")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as refused:
        PrefillClient(model, **{"layout": LAYOUT} | options)
    assert message in str(refused.value)
    assert [type(module) for module in model.modules()] == before


def test_refuses_models_that_are_not_its_own():
    with pytest.raises(ValueError, match="got GlmMoeDsaForCausalLM; allowed: a Glm5Next model"):
        PrefillClient(shared_model("glm_moe_dsa"), layout=LAYOUT)
    with client(), pytest.raises(ValueError, match="open PrefillClient; allowed: a model without"):
        client()


def test_refuses_batches_before_anything_is_written():
    with client(2, max_len=100) as ranks:
        first, second = ranks.admit(), ranks.admit()
        before = prefill(ranks, TOKENS[:40], 40, first)
        free = ranks.pages.free
        for batch, message in (
            ({}, "got no request"),
            ({first: []}, "got 0 tokens after 40; allowed: 1 to 60"),
            ({second: TOKENS[:50], first: TOKENS[:61]}, "got 61 tokens after 40; allowed: 1 to 60"),
            ({second: TOKENS[:50], first: [1, -1]}, "got tokens -1 to 1; allowed: 0 to 1023"),
            ({first: [1, 2**40]}, "got tokens 1 to 1099511627776; allowed: 0 to 1023"),
            ({first: [1.0]}, "got tokens of dtype torch.float32; allowed: int32 or int64"),
        ):
            with pytest.raises(ValueError, match=message):
                ranks.forward(batch)
        with pytest.raises(ValueError, match="got request 3; allowed: max_requests"):
            ranks.admit()
        with pytest.raises(ValueError, match="got 40 tokens; allowed: a multiple of page_size x world = 512"):
            ranks.keep_prefix(first)
        with pytest.raises(ValueError, match="got a mark of another request"):
            ranks.roll_back(first, ranks.mark(second))
        mark = ranks.mark(first)
        ranks.forward({first: TOKENS[40:46]})
        with pytest.raises(ValueError, match="got a mark 6 tokens back; allowed: 0 to 5"):
            ranks.roll_back(first, mark)
        assert first.length == 46 and second.length == 0 and ranks.pages.free == free
        ranks.release(second)
        for call in (ranks.release, ranks.mark, lambda request: ranks.forward({request: TOKENS[:1]})):
            with pytest.raises(ValueError, match="got one that was released"):
                call(second)
        with pytest.raises(ValueError, match="got Request; allowed: a Prefix"):
            ranks.admit(first)
        assert len(before) == 40
    with client(2, max_len=100) as another, pytest.raises(ValueError, match="got one of another client"):
        another.release(first)


def test_a_prefix_is_no_request():
    with client(1) as one:
        request = one.admit()
        prefill(one, TOKENS[:256], 256, request)
        prefix = one.keep_prefix(request)
        for call in (one.mark, one.keep_prefix, lambda prefix: one.forward({prefix: TOKENS[:1]})):
            with pytest.raises(ValueError, match="got Prefix; allowed: a Request"):
                call(prefix)


def test_memory_that_a_prefix_holds_is_not_given_to_others():
    with client(1, max_requests=1, max_len=300, max_rows=300) as one:
        request = one.admit()
        prefill(one, TOKENS[:254], 254, request)
        mark = one.mark(request)
        prefill(one, TOKENS[254:256], 2, request)
        prefix = one.keep_prefix(request)
        with pytest.raises(ValueError, match="got a mark within a prefix that others hold; allowed: one behind it"):
            one.roll_back(request, mark)
        one.release(request)
        other = one.admit()
        with pytest.raises(ValueError, match="got 2 pages more; allowed: the 1 that are free"):
            one.forward({other: TOKENS[:260]})
        assert other.length == 0 and not other.pages and len(one.reports) == 2
        one.release(prefix)
        with pytest.raises(ValueError, match="got one that was released"):
            one.release(prefix)
        assert len(one.forward({other: TOKENS[:260]})[other]) == 260


def test_a_forward_that_fails_ends_the_client_and_close_gives_the_model_back(monkeypatch):
    model = shared_model("glm5_next")
    expected = model(TOKENS[None, :20]).logits
    ranks = client(2)
    request = ranks.admit()
    monkeypatch.setattr(prefill_ranks, "c4_select", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ranks.forward({request: TOKENS[:20]})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="one whose last forward did not finish; allowed: an open one"):
        ranks.forward({request: TOKENS[:20]})
    ranks.close()
    ranks.close()
    with pytest.raises(ValueError, match="a client that is closed"):
        ranks.forward({request: TOKENS[:20]})
    assert torch.equal(model(TOKENS[None, :20]).logits, expected)
    with client(2) as another:
        assert len(prefill(another, TOKENS[:20], 20)) == 20


def test_a_converted_model_is_its_own_again_afterwards():
    model = transformers.convert(shared_model("glm5_next"), LAYOUT)
    with client(2) as ranks:
        prefill(ranks, TOKENS[:20], 20)
    cache = transformers.new_cache
    with pytest.raises(ValueError, match="not converted"):
        cache(model, 1, 30)
    assert forward(model, TOKENS[None, :20], None).shape == (1, 20, 1024)
